"""The surroundings of one part: its device, its folders, its sizes, and its deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfq.errors import SetupError

if TYPE_CHECKING:
    import torch

__all__ = ["CEILINGS", "Bench", "NotAvailable", "Record", "find_missing", "missing", "select"]


class NotAvailable(RuntimeError):
    """The device has no such function."""


Record = dict[str, Any]
"""One measurement, JSON-ready. `kind` tells records apart."""

CEILINGS = "ceiling"
"""Kind of the records of part 1 that later parts divide by: {"kind", "name", "value"}."""


@dataclass(frozen=True)
class Bench:
    """What a part needs to know.

    Attributes:
        is_dry: True on the simulated accelerator, with small sizes.
        scratch: Folder in memory that keeps models between parts.
        disk: Folder on a disk.
        out: Folder of the results.
        ends: Time of the clock `time.time` at which the part is killed.
        ceilings: Rates that part 1 measured, by name, in bytes or operations per second.
    """

    is_dry: bool
    scratch: Path
    disk: Path
    out: Path
    ends: float
    ceilings: dict[str, float]

    def to_json(self) -> str:
        """Returns the arguments as JSON, for another process."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Bench:
        """Returns the surroundings that `to_json` wrote."""
        found = json.loads(text)
        return cls(**found | {name: Path(found[name]) for name in ("scratch", "disk", "out")})

    @property
    def seconds_left(self) -> float:
        """Seconds until the part is killed."""
        return self.ends - time.time()

    @cached_property
    def device(self) -> torch.device:
        """The accelerator: the first GPU, or the simulated one in a dry run.

        Raises:
            SetupError: There is none.
        """
        import torch

        if self.is_dry:
            from tests.support import simulated_accelerator

            reason = simulated_accelerator.missing()
            if reason:
                raise SetupError(
                    "The dry run has no device.",
                    expected="a compiler and ninja",
                    found=reason,
                    fix="Install them, or run on a machine with a GPU.",
                )
            simulated_accelerator.start(count=1, capacity=4 << 30)
            return torch.device("sim:0")
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            raise SetupError(
                "This machine has no accelerator that torch can use.",
                expected="a GPU",
                found=f"torch {torch.__version__}",
                fix="Run on a machine with a GPU, or pass --dry-run.",
            )
        return torch.device(found.type, 0)

    def outlived(self, kind: str, error: BaseException, **labels: Any) -> Record:
        """Returns the record of something that an error kept from being measured.

        Raises:
            RuntimeError: The device does not work any more, so that the part ends here.
            Exception: The error itself in a dry run, which tests this code, unless it is `NotAvailable`.
        """
        import torch

        if self.is_dry and not isinstance(error, NotAvailable):
            raise error

        torch.accelerator.synchronize(self.device)
        return missing(kind, error, **labels)


def missing(kind: str, reason: str | BaseException, **labels: Any) -> Record:
    """Returns the record of something that was not measured, with the reason."""
    if isinstance(reason, BaseException):
        reason = f"{type(reason).__name__}: {str(reason).strip().partition(chr(10))[0]}"
    return {"kind": kind, "missing": reason, **labels}


def select(records: list[Record], kind: str, **labels: Any) -> Iterator[Record]:
    """Yields the measured records of a kind with these labels."""
    for record in records:
        is_meant = record["kind"] == kind and all(record.get(key) == value for key, value in labels.items())
        if is_meant and "missing" not in record:
            yield record


def find_missing(records: list[Record], kind: str, **labels: Any) -> str | None:
    """Returns the first reason why a record of this kind was not measured, or None."""
    for record in records:
        is_meant = record["kind"] == kind and all(record.get(key) == value for key, value in labels.items())
        if is_meant and "missing" in record:
            return record["missing"]
    return None
