"""The document of `python -m benchmarks.gpu`: parts, tables, and figures next to their acceptance numbers."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hfq.errors import SetupError
from hfq.tables import Table

__all__ = ["ACCEPTED", "Accepted", "Document", "Figure", "Values", "figures_of", "replace_text"]

Values = Mapping[str, float | str]
"""Measured values by the keys of `ACCEPTED`; the reason as text where nothing was measured."""


@dataclass(frozen=True)
class Accepted:
    """The acceptance number of one figure.

    Attributes:
        part: Name of the part that measures the figure.
        what: The measured quantity.
        bound: The acceptance number.
        at_least: True if a larger value is better.
        needs_gpu: False if a dry run measures it, too.
    """

    part: str
    what: str
    bound: float
    at_least: bool = False
    needs_gpu: bool = True


_AT_ONE = "14336 x 4096, M = 1"
ACCEPTED = {
    "spills": Accepted("compile", "most bytes that a kernel for one row spills", 0, needs_gpu=False),
    "error": Accepted(
        "exact", "worst error against fp64, in roundings of the activations' dtype", 1, needs_gpu=False
    ),
    "weights": Accepted(
        "exact", "share of cases with each weight equal to the CPU's", 1, True, needs_gpu=False
    ),
    "unaligned": Accepted(
        "exact", "share of cases with equal bits at unaligned addresses", 1, True, needs_gpu=False
    ),
    "twice": Accepted("exact", "share of cases with equal bits in a second call", 1, True, needs_gpu=False),
    "nan": Accepted(
        "exact", "share of FP8 cases whose NaN codes give NaN in their rows alone", 1, True, needs_gpu=False
    ),
    "four": Accepted("kernels", f"slowest 4 bits but gptq4, {_AT_ONE}: times bf16", 2.2, True),
    "four_rate": Accepted(
        "kernels", f"slowest 4 bits but gptq4, {_AT_ONE}: share of the copy rate", 0.5, True
    ),
    "gptq4": Accepted("kernels", f"gptq4, {_AT_ONE}: times bf16", 1.8, True),
    "fp8": Accepted("kernels", f"fp8, {_AT_ONE}: times bf16", 1.5, True),
    "some": Accepted("kernels", "slowest format and shape, M = 64: times bf16", 0.9, True),
    "many": Accepted("kernels", "slowest format and shape, M = 2048: times bf16", 0.85, True),
    "host": Accepted("kernels", "most host time of a product at M = 1, in microseconds", 15),
    "launches": Accepted("kernels", "most launches of a product at M <= 64", 3),
    "rate": Accepted("offload", "all layers in cpu: least copy rate over the pinned rate", 0.92, True),
    "busy": Accepted("offload", "all layers in cpu: least share of a pass in which copies run", 0.95, True),
    "waits": Accepted("offload", "most waits of the host for the device in 3 tokens", 0, needs_gpu=False),
    "accelerate": Accepted("offload", "fp8, all layers in cpu: tokens per second over accelerate's", 6, True),
    "offload_peak": Accepted("offload", "offloaded, device memory: peak over the plan", 1.02),
    "warm": Accepted("resident", "slowest warm load to the device over the pinned rate", 0.6, True),
    "resident_peak": Accepted("resident", "resident, device memory: peak over the plan", 1.02),
    "failed": Accepted("suite", "failed tests", 0, needs_gpu=False),
}
"""Acceptance numbers by key, in the order of the parts."""


@dataclass(frozen=True)
class Figure:
    """A measured value next to its acceptance number; without a value, the reason."""

    what: str
    bound: float
    at_least: bool
    value: float | None
    reason: str = ""

    @property
    def verdict(self) -> str:
        """`ok`, `short`, or `not measured`."""
        if self.value is None:
            return "not measured"
        is_met = self.value >= self.bound if self.at_least else self.value <= self.bound
        return "ok" if is_met else "short"

    def cells(self) -> tuple[str, ...]:
        """Returns the row of a table."""
        value = "-" if self.value is None else f"{self.value:.3g}"
        said = f"{self.verdict}: {self.reason}" if self.reason else self.verdict
        return self.what, value, f"{'>=' if self.at_least else '<='} {self.bound:g}", said


def figures_of(part: str, values: Values, otherwise: str, is_dry: bool = False) -> list[Figure]:
    """Returns the figures of one part.

    Args:
        part: Name of the part.
        values: The values that it measured.
        otherwise: The reason of figures that it did not mention.
        is_dry: True for a dry run, which says nothing about speed and memory.
    """
    figures = []
    for key, accepted in ACCEPTED.items():
        if accepted.part == part:
            found = values.get(key, otherwise)
            if is_dry and accepted.needs_gpu:
                found = "a dry run"
            value, reason = (None, found) if isinstance(found, str) else (float(found), "")
            figures.append(Figure(accepted.what, accepted.bound, accepted.at_least, value, reason))
    return figures


class Document:
    """The content of `gpu.json`, which is replaced after each part.

    Args:
        folder: Folder of `gpu.json` and `gpu.md`. It is created if missing.
        device: Name of the device. Parts that another device ran are dropped.
        is_dry: True for a run on the simulated accelerator.
        sources: Fingerprint of the code. Parts that other code ran count as unfinished, and stay until they
            run again.

    Raises:
        SetupError: A dry run would replace measurements.
    """

    def __init__(self, folder: Path, device: str, is_dry: bool, sources: str) -> None:
        self._file, self._page = folder / "gpu.json", folder / "gpu.md"
        self._sources = sources
        self._content: dict[str, Any] = {"device": device, "is_dry": is_dry, "parts": {}}
        folder.mkdir(parents=True, exist_ok=True)
        found = _read(self._file)
        if is_dry and found and not found.get("is_dry"):
            raise SetupError(
                "A dry run does not replace measurements. Nothing was run.",
                file=self._file,
                expected="a folder without measurements",
                found=f"measurements on {found.get('device')}",
                fix="Pass another --out.",
            )
        if found.get("device") == device and found.get("is_dry") == is_dry:
            self._content["parts"] = found["parts"]

    @property
    def is_dry(self) -> bool:
        """True for a run on the simulated accelerator."""
        return self._content["is_dry"]

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """The entry of each part that was tried, by name."""
        return self._content["parts"]

    def is_finished(self, name: str) -> bool:
        """Returns True if a part of this code ran to its end."""
        entry = self.parts.get(name, {})
        return entry.get("status") == "done" and entry["sources"] == self._sources

    def records(self, name: str) -> list[dict[str, Any]]:
        """Returns what a part measured, also one that did not end."""
        return self.parts.get(name, {}).get("records", [])

    def put(
        self, name: str, entry: dict[str, Any], tables: Iterable[Table], figures: Iterable[Figure]
    ) -> None:
        """Puts the entry of a part, and replaces both files."""
        shown = [asdict(table) for table in tables]
        judged = [asdict(figure) | {"verdict": figure.verdict} for figure in figures]
        self.parts[name] = entry | {"sources": self._sources, "tables": shown, "figures": judged}
        ordered = sorted(self.parts.items(), key=lambda item: item[1]["number"])
        self._content["parts"] = dict(ordered)
        replace_text(self._file, json.dumps(self._content, indent=1) + "\n")
        replace_text(self._page, self.to_markdown())

    def to_markdown(self) -> str:
        """Returns the page: all figures first, then the tables of each part."""
        kind = "dry run: a check, not a measurement" if self._content["is_dry"] else "measured"
        lines = [f"# hfq on {self._content['device']} ({kind})\n", "`make gpu` made this page.\n"]
        figures = [
            Figure(each["what"], each["bound"], each["at_least"], each["value"], each["reason"]).cells()
            for entry in self.parts.values()
            for each in entry["figures"]
        ]
        if figures:
            header = ("what", "measured", "accepted", "")
            lines.append(
                Table(
                    "Acceptance", "Figures next to their acceptance numbers.", header, figures
                ).to_markdown()
            )
        for name, entry in self.parts.items():
            lines.append(
                f"# Part {entry['number']}: {name}\n\n{headline(entry)}; {entry['date']}, sources {entry['sources']}\n"
            )
            lines += [Table(**table).to_markdown() for table in entry["tables"]]
        return "\n".join(lines)


def headline(entry: Mapping[str, Any]) -> str:
    """Returns the state of a part in one line."""
    reason = f": {entry['reason']}" if entry["reason"] else ""
    return f"{entry['status']} after {entry['seconds']:.1f} s{reason}".replace("|", "/")


def replace_text(file: Path, text: str) -> None:
    """Replaces a file: readers see the old text or the complete new one."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SetupError(
            "The results of earlier parts cannot be read. Nothing was run.",
            file=file,
            expected="a file that `make gpu` wrote",
            found=error,
            fix="Remove the file, or pass another --out.",
        ) from error
    return found
