"""The state of one load, as the steps of the load read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.read_plan import ReadPlan
from hfq.loading.config import HfqConfig
from hfq.loading.matching.match import CheckpointMatch
from hfq.modules.quantized_module import QuantizedModule
from hfq.placement.plan import Plan

if TYPE_CHECKING:
    from hfq.loading.read_weights import ReadReport

__all__ = ["LoadState"]


class LoadState:
    """One load: what was opened, matched, placed and read.

    Attributes:
        model: The model; on the meta device until transformers has loaded it.
        config: The user's config, with the checkpoint's own config as its source.
        checkpoint: The files, by their headers.
        reader: Reads the files.
        match: The stored tensor of every parameter.
        quantized: The quantized modules, by name.
        devices: The device of every tensor, by name.
        main: The execution device.
        plan: Device and bytes of every tensor.
        read_plan: Source and destination of every quantized tensor.
        read_report: Bytes, seconds and threads of carrying out the read plan.
    """

    model: PreTrainedModel
    config: HfqConfig
    checkpoint: Checkpoint
    reader: Reader
    match: CheckpointMatch
    quantized: dict[str, QuantizedModule]
    devices: dict[str, str]
    main: str
    plan: Plan
    read_plan: ReadPlan
    read_report: ReadReport

    def describe_formats(self) -> str:
        """Returns the distinct formats of the model, as one line."""
        return ", ".join(sorted({module.weight_format.describe() for module in self.quantized.values()}))
