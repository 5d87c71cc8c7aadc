"""Load that rounds the output head of a checkpoint, and changes nothing else."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hfq.loading.matching.match import CheckpointMatch
from hfq.loading.model_loader import ModelLoader
from hfq.loading.quantize_on_load.device_files import (
    check_offload_folder,
    device_label,
    free_unmapped,
    open_device_file,
)
from hfq.loading.quantize_on_load.rounded_head import RoundedHead
from hfq.modules.flat_buffer import map_tensor

__all__ = ["RoundingLoader"]

logger = logging.get_logger("hfq")


class RoundingLoader(ModelLoader):
    """Load that rounds the output head; see `ModelLoader`.

    The rounded head is in a private file of its device, as layers are that are quantized on load.

    Attributes:
        head: The head, with its float weight and its format.
    """

    head: RoundedHead

    def describe_changes(self) -> str:
        return self.head.describe()

    def state_dict(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Returns the tensors by checkpoint name, with the head that the checkpoint stores."""
        state, metadata = super().state_dict(model)
        layer = self.head.layer
        for info in self.quantized[layer.name].infos.values():
            state.pop(info.name, None)
        if not self.head.is_tied:
            stored = map_tensor(self.reader, layer.weight)
            state[layer.weight.name] = stored.to(self._dtypes[f"{layer.name}.weight"])
        return state, metadata

    def _match(self, source: dict[str, Any] | None) -> CheckpointMatch:
        match = super()._match(source)
        self.head = RoundedHead.take(self.model, match, self.checkpoint, self.config)
        return match

    def _load_rows(self) -> None:
        started, name = time.perf_counter(), self.head.layer.name
        module, device = self.quantized[name], self.devices[name]
        check_offload_folder(device, name)
        infos, nbytes = self.head.place(device_label(device))
        file = open_device_file(self.reader, device, nbytes)
        module.infos.update(infos)
        self.match.quantized[name].infos.update(infos)
        self.head.write(self.reader, infos, file)
        logger.info("hfq: %s: %.2f s", self.head.describe(), time.perf_counter() - started)
        super()._load_rows()
        free_unmapped({device: file}, self.read_plan)
