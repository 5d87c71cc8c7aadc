#!/usr/bin/env python3
"""Holds the form of commit messages: `area: verb object` in at most 72 characters, the reasons in the body.

As a commit-msg hook it is given the file of the message; in CI, `--since COMMIT` checks what came after it.
"""

import re
import subprocess
import sys
from pathlib import Path

SUBJECT = re.compile(r"[a-z0-9_./-]+(, [a-z0-9_./-]+)*: [a-z]\S* .*[^.]")
MOST = 72


def problem(message: str) -> str | None:
    """Returns what is wrong with a message, or None."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if len(subject) > MOST:
        return f"the subject has {len(subject)} characters, at most {MOST} are allowed"
    if not SUBJECT.fullmatch(subject):
        return "the subject is not `area: verb object`, without a full stop"
    if len(lines) > 1 and lines[1].strip():
        return "the second line is not empty"
    return None


def messages_since(commit: str) -> list[str]:
    """Returns the messages after a commit; none where the clone does not reach back to it."""
    command = ["git", "log", "--no-merges", "--format=%B%x00", f"{commit}..HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{commit} is not in this clone: no message was checked")
        return []
    return [message.strip() for message in done.stdout.split("\0") if message.strip()]


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--since"]:
        found = messages_since(arguments[1])
    else:
        found = [Path(arguments[0]).read_text(encoding="utf-8")]
    bad = [(message.partition("\n")[0], wrong) for message in found if (wrong := problem(message))]
    for subject, wrong in bad:
        print(f"{subject}\n  {wrong}\n  Fix: reword it, for example: loading: name the missing shard")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
