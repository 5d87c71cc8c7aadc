"""The page docs/reference/command_line.md, generated from the help of the verbs."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from hfq.cli.main import VERBS

__all__ = ["as_markdown"]

_HEAD = """# Command line

`make docs` generates this page from the help of the verbs. `hfq --help` lists the verbs, and
`hfq VERB -h` shows the options of one.

- MODEL is a folder or a Hub id. `inspect` and `plan` fetch only headers from the Hub.
- Sizes need a unit, such as `24GiB` or `24GB`.
- Results go to stdout, and everything else to stderr. `--json` prints one object, with sizes in
  bytes (`_nbytes`) and times in seconds (`_seconds`).
- Exit status: 0 for success, 1 for an error or a problem found, 2 for wrong usage, and 130 after
  Ctrl-C. `compare` returns 0 for equal, 1 for different, and 2 for trouble.
- After two seconds a progress bar appears, if standard error is a terminal. Tables fit the
  terminal, or `COLUMNS`, or else 150 characters. `NO_COLOR` turns colors off.
- `--push-to-hub` uploads a new checkpoint with a model card that names its source. The token is
  that of `hf auth login`, or `HF_TOKEN`.
- `hfq --install-completion` installs completion of verbs and options for bash, zsh, fish, or
  PowerShell.
- `python -m hfq` is the same as `hfq`. After `pip install ./optimum-hfq` in a clone of the
  repository, `optimum-cli hfq VERB` is, too.

| verb | task |
|---|---|
"""
_VALUES = {int: "integer", float: "number", str: "text", Path: "path", bool: ""}


def as_markdown() -> str:
    """Returns the text of the page."""
    parts = [_HEAD + "\n".join(f"| [{verb.name}](#hfq-{verb.name}) | {verb.help} |" for verb in VERBS) + "\n"]
    for verb in VERBS:
        parts.append(f"## hfq {verb.name}\n\n{verb.help} Example:\n\n`{verb.example}`\n")
        hints = get_type_hints(verb.run, include_extras=True)
        rows = [
            _row(parameter, hints[name])
            for name, parameter in inspect.signature(verb.run).parameters.items()
            if hints[name] is not typer.Context
        ]
        header = "| argument or option | value | default | meaning |\n|---|---|---|---|\n"
        if rows:
            parts.append(header + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(parameter: inspect.Parameter, hint: Any) -> str:
    """Returns the row of one argument or option of a verb."""
    kind, info = get_args(_unwrapped(hint))[:2]
    kind, default = _unwrapped(kind), parameter.default
    if isinstance(info, ArgumentInfo):
        names, value = [info.metavar or parameter.name.upper()], ""
    else:
        names, value = _option_names(parameter.name, info, kind), info.metavar or _value(kind)
    if default is inspect.Parameter.empty:
        shown = "required"
    else:
        shown = "" if default in (None, False, (), []) else f"`{default}`"
    cells = (", ".join(f"`{name}`" for name in names), value, shown, " ".join((info.help or "").split()))
    return f"| {' | '.join(re.sub(r'([|*<>])', lambda found: chr(92) + found[1], cell) for cell in cells)} |"


def _option_names(name: str, info: Any, kind: Any) -> list[str]:
    declared = [
        info.default,
        *(info.param_decls or ()),
    ]  # typer keeps the first name of an Annotated as default
    given = [part for names in declared if isinstance(names, str) for part in names.split("/")]
    if given:
        return given
    kebab = name.replace("_", "-")
    return [f"--{kebab}", f"--no-{kebab}"] if kind is bool else [f"--{kebab}"]


def _unwrapped(hint: Any) -> Any:
    """Returns X of `X | None` and of `list[X]`, else the hint."""
    if get_origin(hint) is Annotated:
        return hint
    if get_origin(hint) in (types.UnionType, list, tuple):
        return next((_unwrapped(part) for part in get_args(hint) if part is not types.NoneType), hint)
    return hint


def _value(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, str) and kind is not str:
        return ", ".join(kind)  # type: ignore[arg-type]
    return _VALUES.get(kind, "text")
