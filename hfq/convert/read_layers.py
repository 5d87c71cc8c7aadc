"""Reading of quantized layers of a checkpoint without a model, and bit-exact comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import torch

from hfq.checkpoint import Checkpoint, Reader
from hfq.convert.gpt_oss_experts import halves_of
from hfq.convert.layer_plan import SourceLayer, refusal
from hfq.errors import CheckpointError, FormatError
from hfq.formats import Format, detect_formats, tensors_by_module
from hfq.formats.compressed_tensors import PackQuantized
from hfq.formats.configs.source_config import detection_hints, halves_experts
from hfq.formats.fp8 import Fp8
from hfq.formats.gguf.block_rows import Gguf
from hfq.formats.gpt_oss import GptOssMxfp4
from hfq.formats.gptq import Gptq
from hfq.formats.mxfp4 import Mxfp4
from hfq.tensor_spec import TensorInfo

__all__ = ["check_equal", "read_layers"]

_PANEL_ELEMENTS = 1 << 20


def read_layers(checkpoint: Checkpoint, config: Mapping, reader: Reader) -> dict[str, SourceLayer]:
    """Returns every quantized layer by its name on disk, with its small tensors checked.

    Layers in formats that cannot be converted are returned as detected.

    Raises:
        FormatError: The checkpoint is not quantized, or a tensor is missing, unexpected, or has a wrong dtype
            or shape.
    """
    modules = tensors_by_module(checkpoint.tensors)
    hints = detection_hints(checkpoint, config)
    if checkpoint.config.get("model_type") == "gpt_oss" and halves_experts(hints):
        _refuse_halves(checkpoint, modules)
    formats = detect_formats(modules, hints)
    layers = (_layer(name, found, modules[name], reader) for name, found in formats.items())
    return {part.module: part for layer in layers for part in _parts(layer)}


def _parts(layer: SourceLayer) -> Iterable[SourceLayer]:
    """Returns a layer, or the two halves of a fused one of gpt-oss."""
    return halves_of(layer) if isinstance(layer.weight_format, GptOssMxfp4) else (layer,)


def _refuse_halves(checkpoint: Checkpoint, modules: Mapping[str, object]) -> None:
    name = next((module for module in modules if re.search(r"\.experts\.\d+\.gate_proj$", module)), None)
    if name is not None:
        raise FormatError(
            "gptqmodel cut the experts of this checkpoint into halves that mix gate and up channels. Nothing "
            "was written.",
            file=checkpoint.root,
            tensor=name,
            expected="gate channels in gate_proj, up channels in up_proj",
            found="the first half of the interleaved channels of gpt-oss",
            fix="Load the unchanged checkpoint with hfq, which recognizes gptqmodel in config.json. No "
            "other format can describe this.",
        )


def check_equal(first: SourceLayer, second: SourceLayer) -> None:
    """Checks that two layers are bit-identical and quantize activations in the same way.

    Raises:
        CheckpointError: The layers differ.
    """
    tensors = [{local: layer.read(local) for local in layer.infos} for layer in (first, second)]
    rows, columns = first.size
    multiple = math.lcm(first.weight_format.row_multiple, second.weight_format.row_multiple)
    step = max(_PANEL_ELEMENTS // max(columns, 1) // multiple, 1) * multiple
    is_equal = first.size == second.size and _activations(first) == _activations(second)
    kinds = [layer.weight_format for layer in (first, second)]
    has_one_zero = any(isinstance(kind, Gguf) and kind.type.name == "MXFP4" for kind in kinds)
    for start in range(0, rows if is_equal else 0, step):
        panels = [torch.empty(min(step, rows - start), columns, dtype=torch.float32) for _ in tensors]
        for layer, panel, held in zip((first, second), panels, tensors, strict=True):
            layer.weight_format.dequantize_into(panel, held, start)
        if has_one_zero:
            panels = [panel.add_(0.0) for panel in panels]  # ggml's MXFP4 has no negative zero
        is_equal = is_equal and torch.equal(*(panel.view(torch.int32) for panel in panels))
    if not is_equal:
        raise CheckpointError(
            "A layer that was read back differs from the source's. Nothing was left behind.",
            tensor=first.module,
            expected=first.weight_format.describe(),
            found=second.weight_format.describe(),
            fix="Check the disk for errors. If it has none, report this as a bug in hfq.",
        )


def _activations(layer: SourceLayer) -> tuple | None:
    scheme = layer.weight_format.activation_scheme
    if scheme is None:
        return None
    return scheme.strategy, scheme.group_size, scheme.dtype, scheme.upper_bound, scheme.scale_name is not None


def _layer(name: str, found: Format, infos: Mapping[str, TensorInfo], reader: Reader) -> SourceLayer:
    if not isinstance(found, (Gptq, PackQuantized, Fp8, Gguf, Mxfp4, GptOssMxfp4)):
        return SourceLayer(name, found, infos, (0, 0), reader)
    if not isinstance(found, (Gguf, GptOssMxfp4)) and any(info.part_of for info in infos.values()):
        raise refusal(name, "experts in separate tensors", "fused experts", "Keep the checkpoint unchanged.")
    layer = SourceLayer(name, found, infos, (0, 0), reader)
    size = _size(layer, found)
    try:
        found = found.sized(size[1], size[0])
        specs = {spec.name: spec for spec in found.tensor_specs(size[1], size[0])}
    except FormatError as error:
        raise FormatError(
            error.message, tensor=name, expected=error.expected, found=error.found, fix=error.fix
        ) from error
    for local in {**specs, **infos}:
        spec, info = specs.get(local), infos.get(local)
        is_absent = info is None and spec is not None and spec.optional
        if not is_absent and (
            spec is None or info is None or info.dtype not in spec.dtypes or info.shape != spec.shape
        ):
            raise FormatError(
                "A tensor of a quantized layer contradicts its format. Nothing was written.",
                tensor=f"{name}.{local}",
                expected=spec if spec is not None else f"no such tensor in {found.describe()}",
                found=info or "nothing",
                fix="Restore the original config.json, or download the checkpoint again.",
            )
    small = {local: layer.read(local) for local in infos if local != found.codes_name}
    return SourceLayer(name, found.resolve(name, small), infos, size, reader)


def _size(layer: SourceLayer, found: Format) -> tuple[int, int]:
    """Returns (out, in) of a layer, computed from its tensors."""
    if not isinstance(found, PackQuantized):
        # shape() reads only shapes, which TensorInfo has
        out_features, in_features = found.shape(layer.infos)  # type: ignore[arg-type]
        return out_features, in_features
    if "weight_shape" in layer.infos:
        out_features, in_features = layer.read("weight_shape").tolist()
        return out_features, in_features
    if not found.num_bits:
        raise refusal(
            f"{layer.module}.weight_shape",
            "the layer's shape, or num_bits in the config",
            "neither",
            "Restore the original config.json.",
        )
    return layer.infos["weight_packed"].shape[0], found.width * 32 // found.num_bits
