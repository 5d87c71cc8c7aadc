"""Recording of the experts that a model routes its tokens to."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from hfq.errors import CheckpointError, SetupError
from hfq.loading.loaded_model import loader_of
from hfq.modules.experts import QuantizedExperts
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.experts.simulated_cache import hit_rate
from hfq.output_file import write_output_file

__all__ = ["Call", "Routing", "record_routing"]

Call = tuple[int, list[list[int]]]
"""The number of a module of experts, and the experts of each token."""

_KIND = "hfq routing"


@dataclass
class Routing:
    """Recording of a model; empty until it runs.

    Attributes:
        modules: Names of the modules of experts, in model order.
        experts: Number of experts in each.
        nbytes: Bytes of one expert of each, as stored.
        calls: Each call of one of them, in order.
    """

    modules: list[str] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def requests(self) -> list[list[tuple[int, int]]]:
        """Returns the distinct experts of each call, as (number of the module, expert)."""
        return [
            [(module, expert) for expert in sorted({each for row in rows for each in row})]
            for module, rows in self.calls
        ]

    def requests_by_token(self) -> list[list[tuple[int, int]]]:
        """Returns the experts of each token in each module, in the order of decoding one by one."""
        found: list[list[tuple[int, int]]] = []
        for calls in self._passes():
            for token in range(max(len(rows) for _, rows in calls)):
                found += [
                    [(module, each) for each in rows[token]] for module, rows in calls if token < len(rows)
                ]
        return found

    def hit_rate(self, share: float) -> float:
        """Returns the share of routed experts that a cache holds while these tokens are decoded.

        The first half of the recording fills the cache, and does not count.

        Args:
            share: Share of all experts that have a place in the cache.
        """
        return 1.0 if share >= 1 else hit_rate(self.requests_by_token(), int(share * sum(self.experts)))

    def check(self, model: nn.Module) -> None:
        """Raises SetupError if this is no recording of a model, or has no token."""
        own = {name: len(module) for name, module in _experts_of(model).items()}
        recorded = dict(zip(self.modules, self.experts, strict=True))
        if own != recorded:
            raise SetupError(
                "The routing was recorded with another model.",
                expected=_shown(own),
                found=_shown(recorded),
                fix="Record this model with hfq.record_routing.",
            )
        if not any(rows for _, rows in self.calls):
            raise SetupError(
                "The recording of routing has no token.",
                expected="calls with tokens",
                found="none",
                fix="Run the model while hfq.record_routing records.",
            )

    def __str__(self) -> str:
        return f"the routing of {sum(len(rows) for module, rows in self.calls if module == 0)} tokens"

    def save(self, path: str | os.PathLike) -> None:
        """Writes the recording as JSON.

        Raises:
            SetupError: The file cannot be written. An old file keeps its content.
        """
        content = {"kind": _KIND, "modules": self.modules, "experts": self.experts, "nbytes": self.nbytes}
        text = json.dumps({**content, "calls": self.calls}, separators=(",", ":"))
        write_output_file(path, text + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Routing:
        """Reads a recording that `save` wrote.

        Raises:
            CheckpointError: The file cannot be read, or is no recording.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            calls = [(module, [list(row) for row in rows]) for module, rows in content["calls"]]
            modules, experts, nbytes = (list(content[name]) for name in ("modules", "experts", "nbytes"))
            found = cls(modules, experts, nbytes, calls)
            is_valid = content["kind"] == _KIND and found._is_valid()
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise _no_recording(path, error) from error
        if not is_valid:
            raise _no_recording(path, "other content")
        return found

    def _passes(self) -> list[list[Call]]:
        """Returns the calls of each forward pass."""
        found: list[list[Call]] = []
        for call in self.calls:
            if not found or call[0] <= found[-1][-1][0]:
                found.append([])
            found[-1].append(call)
        return found

    def _is_valid(self) -> bool:
        """Returns True if the values of a file are of the right types, and agree."""
        sizes = [*self.experts, *self.nbytes]
        return (
            len({len(self.modules), len(self.experts), len(self.nbytes)}) == 1
            and len({name for name in self.modules if isinstance(name, str)}) == len(self.modules)
            and all(type(size) is int and size >= 0 for size in sizes)
            and all(map(self._is_valid_call, self.calls))
        )

    def _is_valid_call(self, call: Call) -> bool:
        module, rows = call
        if type(module) is not int or not 0 <= module < len(self.experts):
            return False
        count = self.experts[module]
        return all(type(each) is int and 0 <= each < count for row in rows for each in row)

    def _add(self, module: int, top_k_index: torch.Tensor) -> None:
        count = self.experts[module]
        rows = top_k_index.tolist()
        self.calls.append((module, [[each for each in row if 0 <= each < count] for row in rows]))


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[Routing]:
    """Records the routed experts of a model that hfq loaded, inside a `with` statement.

        with hfq.record_routing(model) as routing:
            model.generate(**inputs)
        routing.save("routing.json")

    `python -m benchmarks experts --model routing.json` compares cache policies on it.

    Raises:
        SetupError: hfq did not load the model, it has no quantized experts, or it is being recorded already.
    """
    loader_of(model)
    found = _experts_of(model)
    if not found:
        raise _error("This model has no quantized experts.", "a mixture of experts", type(model).__name__)
    if any(module.on_route is not None for module in found.values()):
        raise _error("The routing of this model is being recorded already.", "one recording at a time", "two")
    sizes = [_nbytes(module[0]) for module in found.values()]
    routing = Routing([*found], [len(module) for module in found.values()], sizes)
    try:
        for number, module in enumerate(found.values()):
            module.on_route = functools.partial(routing._add, number)
        yield routing
    finally:
        for module in found.values():
            module.on_route = None


def _experts_of(model: nn.Module) -> dict[str, QuantizedExperts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedExperts)}


def _shown(experts: Mapping[str, int]) -> str:
    first = next(iter(experts.items()), None)
    where = "" if first is None else f", of which {first[0]} has {first[1]} experts"
    return f"{len(experts)} modules of experts{where}"


def _nbytes(expert: nn.Module) -> int:
    layers = [layer for layer in expert.children() if isinstance(layer, QuantizedModule)]
    return sum(info.nbytes for layer in layers for info in layer.infos.values())


def _error(message: str, expected: str, found: object) -> SetupError:
    fix = "Record one mixture of experts at a time, whose experts hfq loaded."
    return SetupError(message, expected=expected, found=found, fix=fix)


def _no_recording(path: str | os.PathLike, found: object) -> CheckpointError:
    return CheckpointError(
        "This file is no recording of routing.",
        file=str(path),
        expected="JSON of Routing.save",
        found=found,
        fix="Record it again with hfq.record_routing.",
    )
