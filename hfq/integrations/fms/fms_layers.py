"""Quantized layers of an FMS model, filled from a checkpoint in FMS's row order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hfq.checkpoint import Reader
from hfq.errors import FormatError, PlacementError
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.integrations.fms.fms_config import Source
from hfq.integrations.fms.row_layout import Layout, Part
from hfq.kernels.registry import choose_kernel
from hfq.loading.config import HfqConfig
from hfq.loading.matching.replace_modules import ModuleBuilder
from hfq.loading.validation import check_bias
from hfq.modules.concat_linear import ConcatLinear
from hfq.modules.flat_buffer import FlatBuffer, is_mappable, map_tensors
from hfq.modules.linear import QuantizedLinear
from hfq.modules.quantized_module import QuantizedModule
from hfq.tensor_spec import ByteRange, Cut, LayerSlice, TensorInfo

__all__ = ["Layers", "rank_slice_of"]


class Layers:
    """Builder of the quantized layers of one model.

    Args:
        source: The checkpoint.
        layout: The stored layers and row order of each FMS layer.
        config: Options of hfq.
        reader: Reader of the checkpoint. None means a new reader.
    """

    def __init__(
        self, source: Source, layout: Layout, config: HfqConfig, reader: Reader | None = None
    ) -> None:
        self.reader = reader or Reader(source.checkpoint)
        self.layout = layout
        self._match = source.match
        self._config = config
        self._builder = ModuleBuilder(config)

    def __deepcopy__(self, memo: dict) -> Layers:
        return self  # FMS copies its configs and the objects in them

    def build(self, name: str) -> nn.Module:
        """Returns an empty module for an FMS layer. `fill` loads its weights."""
        parts = [self._build_part(name, part) for part in self.layout.layers[name]]
        if len(parts) == 1:
            return parts[0]
        linears = [part for part in parts if isinstance(part, QuantizedLinear)]
        if len(linears) != len(parts):
            raise FormatError(
                "FMS fuses quantized modules that are not linear layers. Nothing was loaded.",
                tensor=name,
                expected="linear layers",
                found=", ".join(type(part).__name__ for part in parts),
                fix="Pass fused_weights=False.",
            )
        return ConcatLinear({str(index): linear for index, linear in enumerate(linears)})

    def sizes(self, name: str) -> tuple[int, int]:
        """Returns (out, in) of the whole FMS layer with this name."""
        targets = [self._match.quantized[part.name].target for part in self.layout.layers[name]]
        return sum(target.out_features for target in targets), targets[0].in_features

    def fill(
        self, name: str, module: nn.Module, device: torch.device, part: LayerSlice | None = None
    ) -> None:
        """Loads the weights of a layer that `build` returned.

        Args:
            name: The layer's name in FMS.
            module: The module from `build`.
            device: Device on which the weights are stored.
            part: The slice that this rank holds, or None for the whole layer.

        Raises:
            FormatError: The values of a small tensor are impossible, or the format cannot be reordered or
                sliced there.
        """
        modules = list(module.values()) if isinstance(module, ConcatLinear) else [module]
        for shape, stored in zip(modules, self.layout.layers[name], strict=True):
            try:
                self._fill_part(shape, stored, device, part)
            except FormatError as error:  # formats do not know module names
                raise FormatError(
                    error.message,
                    tensor=error.tensor or stored.name,
                    expected=error.expected,
                    found=error.found,
                    fix=error.fix,
                ) from error

    def _build_part(self, name: str, part: Part) -> QuantizedModule:
        found = self._match.quantized[part.name]
        if found.target.kind not in ("linear", "embedding"):
            raise FormatError(
                "hfq cannot load this kind of quantized module into an FMS model. Nothing was loaded.",
                tensor=part.name,
                found=found.target.kind,
                expected="a linear layer or an embedding",
                fix="Load it with transformers: from_pretrained(path, quantization_config=HfqConfig()).",
            )
        return self._builder.build(name, found)

    def _fill_part(self, module: Any, stored: Part, device: torch.device, part: LayerSlice | None) -> None:
        found = self._match.quantized[stored.name]
        tensors = self._read(found.infos)
        small = {local: tensor for local, tensor in tensors.items() if local != found.format.codes_name}
        weight_format = found.format.resolve(stored.name, small)
        check_bias(stored.name, small.get("bias"), found.target.has_bias)
        if stored.order is not None:
            weight_format, tensors = weight_format.reorder(tensors, stored.order)
        if part is not None:
            index = {local: tensor for local, tensor in tensors.items() if local.endswith("g_idx")}
            weight_format, cuts = weight_format.shard(part, _described(stored.name, tensors), index)
            tensors = {local: _cut(tensors[local], cut) for local, cut in cuts.items()}
        module.weight_format = weight_format
        if isinstance(module, QuantizedLinear):
            out_features, in_features = found.target.out_features, found.target.in_features
            if part is not None:
                count = part.stop - part.start
                out_features, in_features = (
                    (count, in_features) if part.axis == "out" else (out_features, count)
                )
            module.is_sliced = part is not None
            module.local_in_features = in_features
            module.kernel = choose_kernel(self._config.kernel, weight_format, in_features, out_features)
        module.hold({local: tensor.to(device) for local, tensor in tensors.items()})

    def _read(self, infos: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
        cpu_memory = self._config.cpu_memory
        if cpu_memory != "private" and is_mappable(infos):
            return map_tensors(self.reader, infos)
        if cpu_memory == "mmap":
            raise PlacementError(
                "The tensors of this layer cannot be memory-mapped. Nothing was loaded.",
                tensor=next(iter(infos.values())).name,
                expected="tensors aligned to their dtype",
                found="misaligned tensors",
                fix='Pass HfqConfig(cpu_memory="auto").',
            )
        with torch.inference_mode(False):
            return FlatBuffer.read(self.reader, infos).tensors()


def rank_slice_of(
    name: str, shape: tuple[int, int], whole: tuple[int, int], rank: int, world: int
) -> LayerSlice | None:
    """Returns the slice of a layer that FMS assigns to a rank, or None for the whole layer.

    Slices are assigned in rank order. If there are fewer slices than ranks, several ranks hold the same
    slice.

    Args:
        name: The layer's name, for messages.
        shape: (out, in) of the module on this rank.
        whole: (out, in) of the stored layer.
        rank: The rank.
        world: Number of ranks.

    Raises:
        FormatError: The module's shape is not the shape of a slice of the layer.
    """
    if shape == whole:
        return None
    axis = 0 if shape[0] != whole[0] else 1
    count = whole[axis] // shape[axis] if shape[axis] else 0
    if shape[1 - axis] != whole[1 - axis] or count * shape[axis] != whole[axis] or not 1 < count <= world:
        raise FormatError(
            "The shape of a quantized layer does not match the FMS model. Nothing was loaded.",
            tensor=name,
            expected=f"[{shape[0]}, {shape[1]}] on each of {world} ranks",
            found=f"[{whole[0]}, {whole[1]}] stored",
            fix="Restore the checkpoint's own config.json, or use another number of ranks.",
        )
    start = rank * count // world * shape[axis]
    return LayerSlice("in" if axis else "out", start, start + shape[axis], whole[axis])


def _described(module: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Returns descriptions of tensors in memory, in the form of a safetensors header."""
    return {
        local: TensorInfo(
            f"{module}.{local}",
            safetensors_dtype(tensor.dtype),
            tuple(tensor.shape),
            ByteRange("", 0, tensor.nbytes),
        )
        for local, tensor in tensors.items()
    }


def _cut(tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    return tensor if cut is None else tensor.narrow(cut.dim, cut.start, cut.stop - cut.start).contiguous()
