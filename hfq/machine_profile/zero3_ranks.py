"""Costs of a ZeRO-3 step on ranks of this machine, from two tiny models and a wider one.

Gathers use gloo (NCCL on accelerators). DeepSpeed's operator for ranks with shared memory is not used,
because it requires a compiler.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from hfq.checkpoint import Checkpoint
from hfq.formats.gptq import Gptq
from hfq.loading.dry_run import open_model
from hfq.machine_profile.local_ranks import Ranks, zero3_ranks
from hfq.machine_profile.probe_models import GPTQ4, Architecture, make_checkpoint
from hfq.machine_profile.product_probes import Layer, ProductProbe
from hfq.placement.accelerators import accelerator_kind
from hfq.placement.estimate.profile import Zero3Rates
from hfq.placement.zero.model_states import count_states

__all__ = ["RanksProbe", "measure_ranks"]

_SHAPES = {"few": Architecture(128, 2), "many": Architecture(128, 10), "wide": Architecture(2048, 2)}
_QUICK = {"few": Architecture(128, 1), "many": Architecture(128, 2), "wide": Architecture(256, 1)}
_STEPS, _ROUNDS = {"few": 4, "many": 4, "wide": 1}, 3


class RanksProbe:
    """Steps of three models on all ranks, and products on all ranks compared with one alone.

    Args:
        ranks: The ranks.
        count: Number of ranks.
        folder: Folder for the checkpoints.
        quick: True to use small models.
    """

    def __init__(self, ranks: Ranks, count: int, folder: Path, quick: bool = False) -> None:
        self._ranks, self._count = ranks, count
        shapes = _QUICK if quick else _SHAPES
        self._paths = {name: make_checkpoint(folder, shape, GPTQ4) for name, shape in shapes.items()}
        self._layers = {name: shape.layers for name, shape in shapes.items()}
        self._samples: dict[str, list[float]] = {name: [] for name in shapes}
        self._slowdowns: list[float] = []
        self._alone = ProductProbe(Layer(Gptq(4, 128, False, "stored"), 2048, 2048))
        for path in self._paths.values():
            ranks.ask("load", path=str(path))

    def measure(self) -> None:
        """Adds samples of each model and of the product."""
        for name, path in self._paths.items():
            answers = self._ranks.ask("steps", path=str(path), count=_STEPS[name])
            self._samples[name] += [
                max(seconds) for seconds in zip(*(each["seconds"] for each in answers), strict=True)
            ]
        self._alone.measure()
        together = statistics.mean(answer["seconds"] for answer in self._ranks.ask("product"))
        self._slowdowns.append(together / self._alone.run())

    def forget(self) -> None:
        """Drops all samples."""
        self._alone.forget()
        self._slowdowns.clear()
        for samples in self._samples.values():
            samples.clear()

    @property
    def rates(self) -> Zero3Rates:
        """Rates computed from the medians of all samples."""
        seconds = {name: statistics.median(samples) for name, samples in self._samples.items()}
        slowdown = max(statistics.median(self._slowdowns), 1.0)
        each = max(seconds["many"] - seconds["few"], 0.0) / (self._layers["many"] - self._layers["few"])
        step = max(seconds["few"] - each * self._layers["few"], 0.0)
        weights = sum(count for count, _ in open_model(self._paths["wide"]).sizes.weights.values())
        computing = weights / self._alone.rate * slowdown + step + each * self._layers["wide"]
        states = count_states(Checkpoint.open(self._paths["wide"]))
        gathered = sum(states.quantized) + sum(states.frozen) * states.itemsize
        gathering = gathered / max(seconds["wide"] - computing, seconds["wide"] / 100)
        return Zero3Rates(self._count, accelerator_kind() or "cpu", gathering, slowdown, each, step)


def measure_ranks(count: int, quick: bool = False) -> Zero3Rates:
    """Starts ranks on this machine and measures them.

    Raises:
        SetupError: DeepSpeed is not installed, or a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder, zero3_ranks(count) as ranks:
        probe = RanksProbe(ranks, count, Path(folder), quick)
        for _ in range(1 if quick else _ROUNDS):
            probe.measure()
        return probe.rates
