"""`python -m benchmarks.real_sizes.merge FOLDER FILE.json …`: one page of several runs of `real_sizes`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.real_sizes.real_sizes_report import real_sizes_report
from benchmarks.records import Record
from hfq.tables import Report

__all__ = ["merge"]


def merge(files: Sequence[Path]) -> Report:
    """Returns the report of the records of all files, with the facts of the last one.

    Where several files have a contender of a case, the last one counts.
    """
    records: dict[tuple[str, str], list[Record]] = {}
    for file in files:
        document = json.loads(file.read_text(encoding="utf-8"))
        own: dict[tuple[str, str], list[Record]] = {}
        for record in document["records"]:
            own.setdefault((record["case"], record["contender"]), []).append(record)
        records |= own
    return real_sizes_report(document["facts"], [each for found in records.values() for each in found])


if __name__ == "__main__":
    merge([Path(name) for name in sys.argv[2:]]).write(Path(sys.argv[1]), "real_sizes")
