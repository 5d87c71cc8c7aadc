"""State of one load, shared by all of its steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from hfq.checkpoint import Checkpoint, Reader
from hfq.loading.config import HfqConfig
from hfq.loading.matching.match import CheckpointMatch
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.pinned_weights import PinnedWeights
from hfq.placement.plan import Plan, PlanEntry

if TYPE_CHECKING:
    from hfq.loading.read_weights import ReadReport

__all__ = ["LoadState"]


class LoadState:
    """Files, matches, placement, and reads of one load.

    Attributes:
        model: The model; on the meta device until transformers has loaded it.
        config: The config of the user, with the quantization config of the checkpoint as its source.
        checkpoint: The checkpoint files, known by their headers.
        reader: Reader of the files.
        match: Stored tensor of every parameter.
        quantized: Quantized modules by module name.
        devices: Device of every quantized module and every unquantized tensor, by name.
        executes: Execution device of each of them, by name.
        main: The first execution device.
        read_report: Bytes, seconds, and threads that the read plan took.
        pinned: Weights from which accelerators copy, in pinned memory; None if there are none.
    """

    model: PreTrainedModel
    config: HfqConfig
    checkpoint: Checkpoint
    reader: Reader
    match: CheckpointMatch
    quantized: dict[str, QuantizedModule]
    devices: dict[str, str]
    executes: dict[str, str]
    main: str
    read_report: ReadReport
    pinned: PinnedWeights | None

    _unquantized_entries: tuple[PlanEntry, ...] = ()

    @property
    def plan(self) -> Plan:
        """Device and bytes of every tensor; without tensors until devices are chosen."""
        return Plan((*self._quantized_entries(), *self._unquantized_entries))

    def places_of(self, name: str) -> tuple[str, str]:
        """Returns device and execution device of a quantized module or an unquantized tensor."""
        device = self.devices[name]
        return device, self.executes.get(name, self.main) if device in ("cpu", "disk") else device

    def _quantized_entries(self) -> Iterable[PlanEntry]:
        if not self.devices:
            return []
        entries = [
            PlanEntry(f"{name}.{local}", *self.places_of(name), info.nbytes, True)
            for name, module in self.quantized.items()
            for local, info in module.infos.items()
        ]
        return sorted(entries, key=lambda entry: entry.name)

    def describe_changes(self) -> str:
        """Returns what the load changes in the model of the checkpoint, as one line; "" for nothing."""
        return ""

    def describe_formats(self) -> str:
        """Returns the distinct formats of the model in one line."""
        return ", ".join(sorted({module.weight_format.describe() for module in self.quantized.values()}))
