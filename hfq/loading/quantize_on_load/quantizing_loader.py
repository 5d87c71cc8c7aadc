"""Load of a float checkpoint that quantizes one layer at a time.

At most one float weight is in memory. Once devices are chosen, each device gets a private unnamed file: in
`offload_folder` for `disk`, and in memory for every other device. hfq reads, maps, and offloads these files
in the same way as checkpoint files. If no module maps a file in memory, for example for an accelerator, its
memory is freed after the read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hfq.checkpoint import Checkpoint
from hfq.checkpoint.temporary_file import TemporaryFile
from hfq.errors import FormatError
from hfq.formats.gptq import Gptq
from hfq.formats.layouts.rounding import round_weight
from hfq.loading.config import HfqConfig
from hfq.loading.context import load_context
from hfq.loading.matching.renaming import Names
from hfq.loading.model_loader import ModelLoader
from hfq.loading.quantize_on_load.device_files import (
    check_offload_folder,
    device_label,
    free_unmapped,
    open_device_file,
)
from hfq.loading.quantize_on_load.virtual_checkpoint import (
    FloatLayer,
    VirtualCheckpoint,
    lay_out_layers,
    plan_virtual_checkpoint,
)
from hfq.loading.read_weights import progress_bar
from hfq.loading.validation import open_files
from hfq.modules.flat_buffer import read_tensor
from hfq.modules.quantized_module import QuantizedModule
from hfq.tensor_spec import TensorInfo

__all__ = ["QuantizingLoader"]

logger = logging.get_logger("hfq")


class QuantizingLoader(ModelLoader):
    """Load that quantizes; see `ModelLoader`.

    Attributes:
        quantizing: Layers that are quantized, with their recipe and format.
    """

    quantizing: VirtualCheckpoint

    def saved_like_source(
        self, model: nn.Module, folder: Any, is_main_process: bool
    ) -> AbstractContextManager[bool]:
        return self._saved(model, folder, is_main_process)

    def _open(self, config: HfqConfig, files: list[str] | None) -> tuple[Checkpoint, dict[str, Any] | None]:
        if config._source is not None:
            raise FormatError(
                "quantize_weights requires a float checkpoint. This one is quantized. Nothing was loaded.",
                file="config.json",
                expected="no quantization_config",
                found=f"quant_method={config._source.get('quant_method')!r}",
                fix="Leave quantize_weights out to load it, or pass the original float checkpoint.",
            )
        self.quantizing = plan_virtual_checkpoint(
            self.model,
            open_files(files),
            config,
            Names(self.model, load_context().key_mapping),
            load_context().ignores_sizes,
        )
        return self.quantizing.checkpoint, self.quantizing.source

    def _load_rows(self) -> None:
        files = self._pack()
        super()._load_rows()
        free_unmapped(files, self.read_plan)

    @contextmanager
    def _saved(self, model: nn.Module, folder: Any, is_main_process: bool) -> Iterator[bool]:
        with super().saved_like_source(model, folder, is_main_process) as is_written_here:
            yield is_written_here
            is_whole = (
                is_main_process
                and not getattr(model, "_hf_peft_config_loaded", False)
                and not Path(folder).is_file()
            )
            # older GPTQ readers look for quantize_config.json
            if is_whole and isinstance(self.quantizing.format, Gptq):
                text = json.dumps(self.quantizing.source, indent=2) + "\n"
                Path(folder, "quantize_config.json").write_text(text, encoding="utf-8")

    def _pack(self) -> dict[str, TemporaryFile]:
        """Quantizes every layer into the file of its device, one after another."""
        started, by_device = time.perf_counter(), self._by_device()
        files: dict[str, TemporaryFile] = {}
        for device, modules in by_device.items():
            layers = [layer for _, layer in modules]
            placed, nbytes = lay_out_layers(layers, self.quantizing.format, device_label(device))
            files[device] = open_device_file(self.reader, device, nbytes)
            for module, layer in modules:
                self._rebind(module, layer, placed)
        with progress_bar(
            sum(layer.weight.nbytes for layer in self.quantizing.layers.values()), "quantizing"
        ) as progress:
            for device, modules in by_device.items():
                for module, layer in modules:
                    self._quantize_layer(module, layer, files[device])
                    progress(layer.weight.nbytes)
                files[device].finish()
        logger.info(
            "hfq: quantized %d layers as %s in %.2f s",
            len(self.quantizing.layers),
            self.quantizing.format.describe(),
            time.perf_counter() - started,
        )
        return files

    def _by_device(self) -> dict[str, list[tuple[QuantizedModule, FloatLayer]]]:
        """Returns the quantized modules of each device with their float layers, in model order."""
        made = {}
        for name, module in self.quantized.items():
            stored = next(iter(module.infos.values())).name.rpartition(".")[0]
            if stored in self.quantizing.layers:
                made[stored] = name, module
        found: dict[str, list[tuple[QuantizedModule, FloatLayer]]] = {}
        for stored, layer in self.quantizing.layers.items():
            name, module = made[stored]
            device = self.devices[name]
            check_offload_folder(device, layer.name)
            found.setdefault(device, []).append((module, layer))
        return found

    def _rebind(self, module: QuantizedModule, layer: FloatLayer, placed: dict[str, TensorInfo]) -> None:
        """Stores the final byte ranges of a layer in the module, the match, and the checkpoint."""
        own = {local: placed[f"{layer.stored}.{local}"] for local in module.infos}
        module.infos.update(own)
        self.match.quantized[module.name].infos.update(own)
        self.checkpoint.tensors.update({info.name: info for info in own.values()})

    def _quantize_layer(self, module: QuantizedModule, layer: FloatLayer, file: TemporaryFile) -> None:
        weight = read_tensor(self.reader, layer.weight).to(torch.float32)
        tensors = round_weight(
            layer.name, weight.t() if layer.is_transposed else weight, self.quantizing.format
        )
        del weight
        if layer.bias is not None:
            tensors["bias"] = read_tensor(self.reader, layer.bias)
        for local, info in module.infos.items():
            flat = tensors[local].contiguous().reshape(-1).view(torch.uint8)
            if flat.numel() != info.nbytes:
                raise FormatError(
                    "A quantized layer has another size than planned. Nothing was loaded.",
                    tensor=info.name,
                    expected=f"{info.nbytes} bytes",
                    found=f"{flat.numel()} bytes",
                    fix="Report this error as a bug in hfq.",
                )
            # numpy arrays have the buffer protocol
            file.write(info.range.offset, memoryview(flat.numpy()))  # type: ignore[arg-type]
