"""The page reference/errors.md of the site: every error of hfq with its cause and its fix, from the sources."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

from generate.errors import ErrorCall, error_calls, error_classes, read_modules

__all__ = ["as_markdown", "entries"]

ROOT = Path(__file__).parents[2]
_INSIDE = ("-",)
"""The fix of an error that is always replaced by another before a caller sees it."""
_HEAD = """# Troubleshooting

Made by `make docs` from the sources; a test compares the two. Every error that hfq raises on purpose is an `HfqError` of one form:

```
PlacementError: device_map contains keys that match no module. Nothing was loaded.
  expected: names of modules
  - 'model.layer.1'. Did you mean 'model.layers.1'?
Fix: Use full module names.
```

Search this page for the first line. What differs from case to case stands in braces here, and an error also names its file, tensor and
rank where it has one. In Python they are attributes: `error.message`, `error.file`, `error.tensor`, `error.rank`, `error.expected`,
`error.found`, `error.problems`, `error.fix`. All classes derive from `hfq.HfqError`; the first four are importable from `hfq`.

Where no error was raised and something is odd all the same:

| question | command |
|---|---|
| What is in this checkpoint, which kernel multiplies it, and why no other? | `hfq inspect MODEL --kernels` |
| Does it fit, where would it rest, how fast would it be? | `hfq plan MODEL` |
| Is this machine, or a DeepSpeed or accelerate config, in the way? | `hfq doctor MODEL --config FILE` |
| What has a loaded model done so far? | `print(hfq.report(model))` |
| Are two checkpoints, or two placements, the same model? | `hfq compare A B` |

`hfq doctor` prints a block for a report of a bug, without names of hosts, users or folders.
"""


@functools.cache
def entries() -> list[ErrorCall]:
    """Every error that a user can meet, each text once in a module."""
    found = {
        (error.cls, error.module.name, error.message, error.expected, error.found, error.fix): error
        for error in error_calls(read_modules(ROOT / "hfq"))
        if error.fix != _INSIDE and error.message != ("{message}",)  # the second repeats another error's text
    }
    return sorted(
        found.values(),
        key=lambda error: (error.module.name, error.message, error.fix, error.expected, error.found),
    )


def as_markdown() -> str:
    """The text of the page."""
    errors, parts = entries(), [_HEAD]
    for name, summary in error_classes(read_modules(ROOT / "hfq")).items():
        own = [error for error in errors if error.cls == name]
        if own:
            parts.append(f"## {name}\n\n{summary}\n")
        for module, group in itertools.groupby(own, key=lambda error: error.module):
            parts.append(f"**{module.name}** · {module.summary}\n")
            parts += [
                _entry(list(same))
                for _, same in itertools.groupby(group, key=lambda error: (error.message, error.fix))
            ]
    return "\n".join(parts)


def _entry(errors: list[ErrorCall]) -> str:
    """One message with one fix: its causes are what is expected and found wherever it is raised."""
    causes = dict.fromkeys(_cause(error) for error in errors)
    lines = [f"- {_either(errors[0].message)}", *(f"    {cause}" for cause in causes if cause)]
    return "\n".join([*(f"{line}  " for line in lines), f"    **Fix:** {_either(errors[0].fix)}\n"])


def _cause(error: ErrorCall) -> str:
    said = [
        (label, texts)
        for label, texts in (("expected", error.expected), ("found", error.found))
        if any(map(_says, texts))
    ]
    text = ", ".join(f"{label} {_either(texts)}" for label, texts in said)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _says(text: str) -> bool:
    """Whether a template is more than the place of what is filled in."""
    return text not in ("{expected}", "{found}", "{error}", "{…}")


def _either(texts: tuple[str, ...]) -> str:
    return " or ".join(map(_code, texts))


def _code(text: str) -> str:
    """The text as it is, in a code span."""
    text = " ".join(text.split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"
