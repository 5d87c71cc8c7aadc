"""`python -m benchmarks plan`: planned and measured bytes, and predicted and measured steps.

Rates depend on the machine's other work, so every round measures the rates for its own predictions. Reports
contain medians over the rounds. Bytes are planned from headers. Steps are predicted from rates of products
with layers of the model's sizes, and from tiny models (`product_probes`, `model_probes`, `zero3_ranks`). The
products use random weights and run in isolation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.checkpoints import LAYOUTS, architecture_of_size, make_checkpoint
from benchmarks.plan.plan_cases import PLACEMENTS, WORKLOAD, Case, open_cases
from benchmarks.plan.plan_report import plan_report
from benchmarks.records import Record
from hfq.loading.dry_run import PlannedModel, open_model
from hfq.machine_profile.local_ranks import Ranks, zero3_ranks
from hfq.machine_profile.measure_machine import MachineProbe, disk_file
from hfq.machine_profile.probe_models import Architecture
from hfq.machine_profile.product_probes import KindProbe, layers_of
from hfq.machine_profile.zero3_ranks import RanksProbe
from hfq.placement.estimate.hardware import Hardware
from hfq.placement.estimate.roofline import predict
from hfq.placement.zero.fit import ZeroFit, fit_zero3, gathering_work
from hfq.placement.zero.model_states import count_states
from hfq.tables import Report

__all__ = ["GENERATED", "bench_plan", "generated"]

GENERATED = ("fp8", "gptq4")
"""Formats of the generated models."""

_PROBED_NBYTES = 512 << 20
_MANY_STEPS_NBYTES = 64 << 20
_STEPS = 3
_EVERYTHING = 1 << 50


@dataclasses.dataclass
class _Probes:
    """Probes for all checkpoints."""

    machine: MachineProbe
    ranks: Ranks | None
    gathering: RanksProbe | None
    count: int
    copies: int | None


def bench_plan(
    folder: Path,
    checkpoints: Sequence[Path],
    nbytes: float,
    rounds: int,
    say: Callable[[str], None],
    ranks: int = 2,
    quick: bool = False,
) -> Report:
    """Runs the benchmark.

    Args:
        folder: Folder of the checkpoints. Missing ones are created.
        checkpoints: Further checkpoints.
        nbytes: Size of each generated checkpoint in bytes.
        rounds: Number of interleaved rounds.
        say: Function that receives progress lines.
        ranks: Local ranks under ZeRO-3. 0 omits ZeRO-3.
        quick: True to use small probes, which test the benchmark without useful predictions.

    Raises:
        SetupError: The disk has too little free space, or DeepSpeed is missing or fails.
    """
    say("making checkpoints")
    paths = [*checkpoints, *(generated(folder, weights, nbytes) for weights in GENERATED)]
    records: list[Record] = []
    with _probes(folder, ranks, quick) as probes:
        for path in paths:
            say(f"{path.name}: loading")
            records += _measure(path, probes, rounds, say)
            gc.collect()
    facts = {
        "rounds": f"{rounds}, each with rates of its own; medians",
        "threads": str(torch.get_num_threads()),
    }
    return plan_report(folder, facts, records)


def generated(folder: Path, weights: str, nbytes: float) -> Path:
    """Returns a generated checkpoint of this size and format.

    Args:
        folder: Folder of the checkpoints.
        weights: One of `checkpoints.FORMATS`.
        nbytes: Size in bytes.
    """
    hidden = architecture_of_size(nbytes).hidden
    empty, one = (
        sum(t.nbytes for t in Architecture(hidden, layers).tensors(LAYOUTS[weights]).values())
        for layers in (0, 1)
    )
    return make_checkpoint(
        folder, Architecture(hidden, max(round((nbytes - empty) / (one - empty)), 8)), weights
    )


@contextlib.contextmanager
def _probes(folder: Path, count: int, quick: bool) -> Iterator[_Probes]:
    size, nbytes = (256, 4 << 20) if quick else (2048, _PROBED_NBYTES)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(disk_file(folder, nbytes))
        models = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        machine = MachineProbe(file, models, size, quick)
        ranks = stack.enter_context(zero3_ranks(count)) if count else None
        gathering = RanksProbe(ranks, count, models, quick) if ranks is not None else None
        yield _Probes(machine, ranks, gathering, count, 1 if quick else None)


def _measure(path: Path, probes: _Probes, rounds: int, say: Callable[[str], None]) -> list[Record]:
    """Returns the records of one checkpoint, one per placement."""
    model = open_model(path)
    dtype = getattr(torch, model.sizes.dtype)
    products = {
        kind: KindProbe(layers, dtype, probes.copies)
        for kind, layers in layers_of(model, model.sizes.dtype).items()
    }
    cases = list(open_cases(path, model, PLACEMENTS))
    label = {"checkpoint": path.name, "formats": model.loading.describe_formats()}
    records = {case.placement: label | case.describe() for case in cases}
    if probes.ranks is not None:
        probes.ranks.ask("load", path=str(path))
        shards = label | _sharded(probes.ranks.ask("held", path=str(path)), model, probes.count)
        records[shards["placement"]] = shards
    for number in range(rounds):
        say(f"{path.name}: round {number + 1} of {rounds}")
        for placement, found in _round(path, model, probes, products, cases).items():
            records[placement]["rounds"].append(found)
    if probes.ranks is not None:
        probes.ranks.ask("drop", path=str(path))
    return list(records.values())


def _round(
    path: Path, model: PlannedModel, probes: _Probes, products: Mapping[str, KindProbe], cases: Sequence[Case]
) -> dict[str, Record]:
    """Returns {placement: predictions and measurements of one round}.

    Rates are measured before, between, and after the steps that they explain.
    """
    for probe in (probes.machine, probes.gathering, *products.values()):
        if probe is not None:
            probe.forget()
    probes.machine.measure()
    achieved: dict[str, list[float]] = {}
    for case in cases:
        for probe in products.values():
            probe.measure()
        achieved[case.placement] = case.decoder.steps(_STEPS)
    for probe in products.values():
        probe.measure()
    if probes.ranks is not None and probes.gathering is not None:
        probes.gathering.measure()
        answers = probes.ranks.ask(
            "steps", path=str(path), count=1 if model.loading.checkpoint.nbytes > _MANY_STEPS_NBYTES else 4
        )
        seconds = [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)]
        achieved[_zero3(probes.count)] = seconds
    profile = dataclasses.replace(
        probes.machine.profile(),
        products={kind: {1: probe.rate} for kind, probe in products.items()},
        zero3=None if probes.gathering is None else probes.gathering.rates,
    )
    works = {case.placement: case.work for case in cases} | {
        _zero3(probes.count): gathering_work(_fit(model, probes.count), model.sizes, WORKLOAD)
    }
    rates = dataclasses.asdict(profile)
    return {
        placement: {
            "predicted": (found := predict(works[placement], profile)).step_seconds,
            "terms": dict(found.terms),
            "achieved": statistics.median(steps),
            "steps": steps,
            "profile": rates,
        }
        for placement, steps in achieved.items()
    }


def _zero3(count: int) -> str:
    return f"ZeRO-3, {count} ranks"


def _fit(model: PlannedModel, count: int) -> ZeroFit:
    states = count_states(model.loading.checkpoint, itemsize={"float32": 4}.get(model.sizes.dtype, 2))
    return fit_zero3(states, model.sizes, Hardware((), _EVERYTHING), WORKLOAD, max(count, 1))


def _sharded(held: list[dict], model: PlannedModel, count: int) -> Record:
    """Returns ZeRO-3's planned and measured bytes on the fullest rank."""
    fit = _fit(model, count)
    planned = {
        name: sum(fit.memory.parts.get(f"{name} weights", {}).values()) for name in ("quantized", "frozen")
    }
    measured = {name: max(rank[name] for rank in held) for name in ("quantized", "frozen")}
    return {"placement": _zero3(count), "planned": planned, "measured": measured, "rounds": []}
