"""Conversion of a whole checkpoint.

hfq plans every layer before it writes anything. It then writes one tensor at a time and reads everything
back.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.write_checkpoint import (
    Made,
    NewFile,
    check_target,
    in_order,
    index_file,
    shard_head,
    side_files,
    write_folder,
)
from hfq.convert.layer_plan import LayerPlan, NewTensor, SourceLayer, refusal
from hfq.convert.read_layers import check_equal, read_layers
from hfq.convert.targets import TARGET_FORMATS, Target
from hfq.errors import CheckpointError, FormatError, SetupError, nearest
from hfq.formats.configs.source_config import SIDE_FILES, source_config
from hfq.tensor_spec import DTYPE_BITS, ByteRange, TensorInfo

__all__ = ["ConvertReport", "convert_checkpoint"]

_CODES = ("U8", "I8", "I32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4")
_CACHE_SCALES = re.compile(r"\.(kv_scale|(k|v|q|prob)_(scale|zero_point|global_scale))$")


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion.

    Attributes:
        layers: The quantized layers, all bit-identical when read back.
        files: All files of the new folder.
        nbytes: The size of these files in bytes.
        source_nbytes: The size of the source's safetensors files in bytes.
        left_out: The other files in the source folder that were not copied.
    """

    layers: int
    files: int
    nbytes: int
    source_nbytes: int
    left_out: tuple[str, ...] = ()


def convert_checkpoint(
    source: Checkpoint, target: str | os.PathLike, to: str, progress: Callable[[int], None] | None = None
) -> ConvertReport:
    """Writes a checkpoint in another format without changing any weight.

    Nothing is written unless the format can hold every layer without loss. The new folder gets its name after
    all files are on disk and every layer, read back from them, dequantizes to the same bits. Only one layer
    is in memory at a time.

    Args:
        source: The checkpoint. The other files of its folder are copied, except those that describe the old
            quantization.
        target: The folder to create: absent or empty, and outside the source.
        to: One of `TARGET_FORMATS`.
        progress: A function that receives the bytes of tensors written since its last call; None for no
            calls.

    Raises:
        SetupError: There is no format of this name, or the checkpoint is already in this format.
        FormatError: The format cannot hold a layer, which the error names, or the checkpoint is not
            quantized.
        CheckpointError: `target` is in use, the disk is full or not writable, the source changed during the
            conversion, or the written files do not read back correctly.
    """
    variant = TARGET_FORMATS.get(to)
    if variant is None:
        raise SetupError(
            f"hfq cannot convert to {to!r}.{nearest(to, TARGET_FORMATS)}",
            expected=", ".join(TARGET_FORMATS),
            found=to,
            fix=f"Pass one of {', '.join(TARGET_FORMATS)}.",
        )
    folder = check_target(source, target)
    config = source_config(source) or {}
    reader = Reader(source)
    layers = read_layers(source, config, reader)
    _check_source(variant, layers, config, source)
    plans = {name: variant.plan(layer) for name, layer in layers.items()}
    new_config = variant.config(
        {name: plan.options for name, plan in plans.items()}, _dense_matrices(source, layers), config
    )
    shards, infos = _shards(source, layers, plans)
    files = [
        *shards,
        *([index_file(infos)] if len(shards) > 1 else []),
        *_json_files(source, variant, new_config),
    ]
    known, left_out = side_files(source)
    dropped = {"config.json", *SIDE_FILES}
    copied = {path: header for path, header in known.items() if Path(path).name not in dropped}
    made = {file.name for file in files}
    left_out += [
        name for name in (Path(path).name for path in known) if name in SIDE_FILES and name not in made
    ]
    written = write_folder(
        folder, source, files, copied, lambda new: _check_written(new, new_config, layers, source), progress
    )
    return ConvertReport(
        len(layers), len(files) + len(copied), written, source.nbytes, tuple(sorted(left_out))
    )


def _check_source(
    variant: Target, layers: Mapping[str, SourceLayer], config: Mapping, source: Checkpoint
) -> None:
    method = str(config.get("quant_method", ""))
    for name, layer in layers.items():
        if not isinstance(layer.weight_format, variant.sources):
            kinds = " or ".join(cls.name for cls in variant.sources)
            raise refusal(
                name,
                f"a format with the same numbers as {variant.name}: {kinds}",
                layer.weight_format.describe(),
                "Quantize the original model again, or keep the checkpoint unchanged.",
            )
    if all(variant.is_source(layer.weight_format, method) for layer in layers.values()):
        raise SetupError(
            f"The checkpoint is already in format {variant.name}. Nothing was written.",
            file=source.root,
            expected="another format",
            found=next(iter(layers.values())).weight_format.describe(),
            fix=f"Choose another of {', '.join(TARGET_FORMATS)}.",
        )
    packed = {info.name for layer in layers.values() for info in layer.infos.values()}
    for name, info in source.tensors.items():
        if name not in packed and info.dtype in _CODES:
            raise refusal(
                name,
                "floats, or the codes of a quantized layer",
                str(info),
                "Keep the checkpoint unchanged.",
            )
    cache = next((name for name in source.tensors if _CACHE_SCALES.search(name)), None)
    if cache is not None or config.get("kv_cache_scheme"):
        raise refusal(
            cache or "kv_cache_scheme",
            "quantization of weights only",
            "a quantized KV cache, which the target cannot describe in the same way",
            "Keep the checkpoint unchanged.",
        )


def _dense_matrices(source: Checkpoint, layers: Mapping[str, SourceLayer]) -> list[str]:
    """Returns the modules with a float matrix, among them all unquantized linear layers."""
    modules = {
        name.removesuffix(".weight"): info
        for name, info in source.tensors.items()
        if name.endswith(".weight")
    }
    return [name for name, info in modules.items() if name not in layers and len(info.shape) == 2]


def _shards(
    source: Checkpoint, layers: Mapping[str, SourceLayer], plans: Mapping[str, LayerPlan]
) -> tuple[list[NewFile], dict[str, list[TensorInfo]]]:
    """Returns the new files, and the contents of each.

    There are as many files as in the source. All tensors of a layer are in the same file.
    """
    packed = {info.name for layer in layers.values() for info in layer.infos.values()}
    tensors = {name: NewTensor.copied(info) for name, info in source.tensors.items() if name not in packed}
    devices = {name: source.tensors[name].range.file for name in tensors}
    for module, plan in plans.items():
        file = layers[module].infos[layers[module].weight_format.codes_name].range.file
        for local, tensor in plan.tensors.items():
            tensors[f"{module}.{local}"] = tensor
            devices[f"{module}.{local}"] = file
    grouped: dict[str, list[TensorInfo]] = {}
    for name in sorted(tensors, key=lambda name: _place(source, layers, name)):
        grouped.setdefault(devices[name], []).append(_described(name, tensors[name]))
    metadata = {**source.metadata(), "format": "pt"}
    shards, held = [], {}
    for number, (_, group) in enumerate(sorted(grouped.items()), 1):
        infos = in_order(group)
        name = (
            "model.safetensors"
            if len(grouped) == 1
            else f"model-{number:05d}-of-{len(grouped):05d}.safetensors"
        )
        shards.append(
            NewFile(name, shard_head(infos, metadata), tuple(_part(tensors[info.name]) for info in infos))
        )
        held[name] = infos
    return shards, held


def _place(source: Checkpoint, layers: Mapping[str, SourceLayer], name: str) -> tuple[str, int]:
    """Returns the source file and offset of a tensor, or of the codes of its layer."""
    info = source.tensors.get(name)
    if info is None:
        layer = layers[name.rpartition(".")[0]]
        info = layer.infos[layer.weight_format.codes_name]
    return info.range.file, info.range.offset


def _described(name: str, tensor: NewTensor) -> TensorInfo:
    nbytes = torch.Size(tensor.shape).numel() * DTYPE_BITS[tensor.dtype] // 8
    return TensorInfo(name, tensor.dtype, tensor.shape, ByteRange("", 0, nbytes))


def _part(tensor: NewTensor) -> ByteRange | Made:
    if isinstance(tensor.data, ByteRange):
        return tensor.data
    make = tensor.data
    return Made(_described("", tensor).nbytes, lambda: _bytes(make()))


def _bytes(tensor: torch.Tensor) -> memoryview:
    # memoryview accepts numpy arrays, which have the buffer protocol
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _json_files(source: Checkpoint, variant: Target, quantization: dict) -> list[NewFile]:
    """Returns config.json with the new quantization, and the side files of other tools."""
    config, key = json.loads(json.dumps(source.config)), "quantization_config"
    owner = next(
        (each for each in (config, *config.values()) if isinstance(each, dict) and each.get(key) is not None),
        config,
    )
    owner[key] = quantization
    written = {"config.json": config, **variant.side_files(quantization)}
    return [
        NewFile(name, (json.dumps(content, indent=2) + "\n").encode()) for name, content in written.items()
    ]


def _check_written(
    folder: Path, config: Mapping, layers: Mapping[str, SourceLayer], source: Checkpoint
) -> None:
    """Reads the new folder as a checkpoint and compares every layer with the source's."""
    written = Checkpoint.open(folder)
    try:
        found = read_layers(written, config, Reader(written))
    except FormatError as error:
        raise _unlike(error.tensor, error.expected, f"{error.message} {error.found}") from error
    for name, layer in layers.items():
        if name not in found:
            raise _unlike(name, "a packed layer", "none")
        check_equal(layer, found[name])
    packed = {info.name for layer in layers.values() for info in layer.infos.values()}
    for name, info in source.tensors.items():
        if name not in packed and str(written.tensors.get(name)) != str(info):
            raise _unlike(name, info, written.tensors.get(name))


def _unlike(tensor: str | None, expected: object, found: object) -> CheckpointError:
    return CheckpointError(
        "The new checkpoint does not read back as it was written. Nothing was left behind.",
        tensor=tensor,
        expected=expected,
        found=found,
        fix="Check the disk for errors. If it has none, report this as a bug in hfq.",
    )
