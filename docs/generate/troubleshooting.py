"""Generated page reference/errors.md of the site: every error of hfq with its cause and its fix."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

from generate.errors import ErrorCall, error_calls, error_classes, read_modules

__all__ = ["as_markdown", "entries"]

ROOT = Path(__file__).parents[2]
_INSIDE = ("-",)
"""Fix of errors that are always replaced by another error before a caller sees them."""
_HEAD = """# Errors

Every error that hfq raises is an `HfqError` of this form:

```
PlacementError: device_map contains keys that match no module. Nothing was loaded.
  expected: names of modules
  - 'model.layer.1'. Did you mean 'model.layers.1'?
Fix: Use full module names.
```

To find an error, search this page for its first line. Words in braces stand for a value of your model or machine; `{suggestion}` is a similar
valid name.

An error also names its file, tensor, and rank if it has one. In Python, read the attributes `message`, `file`, `tensor`,
`rank`, `expected`, `found`, `problems`, and `fix`. All classes derive from `hfq.HfqError`. `hfq` exports `CheckpointError`,
`FormatError`, `PlacementError`, and `SetupError`.

The most frequent problems, and those without an error, are in [Troubleshoot](../how_to/troubleshoot.md). This page is
generated from the sources of hfq.
"""


@functools.cache
def entries() -> list[ErrorCall]:
    """Returns all errors that users can see, without repetitions inside a module."""
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
    """Returns the page."""
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
    """Returns one message with its fix and the expected and found values of each place that raises it."""
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
    """True if a template has more text than one field."""
    return text not in ("{expected}", "{found}", "{error}", "{…}")


def _either(texts: tuple[str, ...]) -> str:
    return " or ".join(map(_code, texts))


def _code(text: str) -> str:
    """Returns a code span with the unchanged text."""
    text = " ".join(text.split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"
