"""Conversion of a whole checkpoint.

hfq plans every layer before it writes anything. It then writes one tensor at a time and reads everything
back.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.write_checkpoint import (
    NewFile,
    check_target,
    in_order,
    index_file,
    shard_head,
    side_files,
    write_folder,
)
from hfq.convert.gguf_file import gguf_file
from hfq.convert.gguf_template import template_header
from hfq.convert.layer_plan import LayerPlan, NewTensor, SourceLayer, refusal
from hfq.convert.read_layers import check_equal, read_layers
from hfq.convert.targets import TARGET_FORMATS, GgufTarget, Target
from hfq.errors import CheckpointError, FormatError, SetupError, nearest
from hfq.formats.configs.source_config import SIDE_FILES, source_config
from hfq.formats.gguf.block_rows import Gguf
from hfq.formats.layouts.fused_experts import split_experts
from hfq.tensor_spec import ByteRange, TensorInfo

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
    source: Checkpoint,
    target: str | os.PathLike,
    to: str,
    progress: Callable[[int], None] | None = None,
    template: Checkpoint | None = None,
    check_template: Callable[[Checkpoint, Checkpoint], None] | None = None,
) -> ConvertReport:
    """Writes a checkpoint in another format without changing any weight.

    Nothing is written unless the format can hold every layer without loss. The new folder gets its name after
    all files are on disk and every layer, read back from them, dequantizes to the same bits. Only one layer
    is in memory at a time.

    Args:
        source: The checkpoint. The other files of its folder are copied, except those that describe the old
            quantization, and other weights. Of a GGUF file, `config` must be that of the language model.
        target: The folder to create: absent or empty, and outside the source.
        to: One of `TARGET_FORMATS`.
        progress: A function that receives the bytes of tensors written since its last call; None for no
            calls.
        template: The GGUF file of the same model whose metadata are copied, for `to="gguf"`; None for other
            formats.
        check_template: `hfq.loading.gguf.conversion.check_template`, which a template requires. It compares
            the config of the source, which transformers alone can read, with the template.

    Raises:
        SetupError: There is no format of this name, the checkpoint is already in this format, or there is a
            template for another format than GGUF or none for GGUF.
        TypeError: There is a template, and no `check_template`.
        FormatError: The format cannot hold a layer, which the error names, or the checkpoint is not
            quantized.
        CheckpointError: `target` is in use, the disk is full or not writable, the source changed during the
            conversion, or the written files do not read back correctly.
    """
    variant = _target(to, template)
    _check_folder(target)
    folder = check_target(source, target)
    config = {} if source.gguf is not None else source_config(source) or {}
    reader = Reader(source)
    read = read_layers(source, config, reader)
    layers = {name: layer for name, layer in read.items() if not _is_float(layer)}
    _check_source(variant, layers, config, source)
    if template is not None:
        if check_template is None:
            raise TypeError("A template requires check_template of hfq.loading.gguf.conversion.")
        template_header(template)
        check_template(source, template)
    plans = {name: variant.plan(layer) for name, layer in layers.items()}
    tensors = variant.arrange({**_floats(source, read, reader), **_planned(layers, plans)}, source, reader)
    if template is not None:
        files, new_config = [gguf_file(tensors, plans, template, reader)], {}
    else:
        new_config = variant.config(
            {name: plan.options for name, plan in plans.items()}, _dense_matrices(source, layers), config
        )
        shards, infos = _shards(source, tensors)
        files = [*shards, *([index_file(infos)] if len(shards) > 1 else [])]
    files += _json_files(source, variant, new_config)
    known, left_out = side_files(source)
    dropped = {"config.json", *SIDE_FILES}
    copied = {path: header for path, header in known.items() if Path(path).name not in dropped}
    made = {file.name for file in files}
    left_out += [
        name for name in (Path(path).name for path in known) if name in SIDE_FILES and name not in made
    ]
    written = write_folder(
        folder,
        source,
        files,
        copied,
        lambda new: _check_written(new, new_config, layers, tensors, reader),
        progress,
    )
    return ConvertReport(
        len(layers), len(files) + len(copied), written, source.nbytes, tuple(sorted(left_out))
    )


def _check_folder(target: str | os.PathLike) -> None:
    """Raises an error for a target with the name of a GGUF file."""
    name = os.fspath(target)
    if name.endswith(".gguf"):
        raise SetupError(
            "A conversion writes a folder, and this is the name of a GGUF file. Nothing was written.",
            file=name,
            expected="a folder, for model.gguf and config.json",
            found="the name of a file",
            fix=f"Pass {name.removesuffix('.gguf')}.",
        )


def _target(to: str, template: Checkpoint | None) -> Target:
    """Returns the target format of a name."""
    variant = TARGET_FORMATS.get(to)
    if variant is None:
        raise SetupError(
            f"hfq cannot convert to {to!r}.{nearest(to, TARGET_FORMATS)}",
            expected=", ".join(TARGET_FORMATS),
            found=to,
            fix=f"Pass one of {', '.join(TARGET_FORMATS)}.",
        )
    if isinstance(variant, GgufTarget) != (template is not None):
        raise SetupError(
            f"A conversion to {to} takes {'no template' if template is not None else 'a template'}. Nothing "
            "was written.",
            expected="a GGUF file of the same model, whose metadata and tokenizer are copied"
            if template is None
            else "a template for --to gguf alone",
            found="none" if template is None else next(iter(template.headers)),
            fix="Leave out --template."
            if template is not None
            else "Pass --template FILE.gguf, a GGUF file of this model or its id on the Hub.",
        )
    return variant


def _check_source(
    variant: Target, layers: Mapping[str, SourceLayer], config: Mapping, source: Checkpoint
) -> None:
    method = str(config.get("quant_method", ""))
    if not layers:
        raise FormatError(
            "The checkpoint is not quantized. Nothing was written.",
            file=next(iter(source.headers)),
            expected="at least one quantized layer",
            found="only unquantized tensors",
            fix="Quantize the model with hfq quantize.",
        )
    if all(variant.is_source(layer.weight_format, method) for layer in layers.values()):
        raise SetupError(
            f"The checkpoint is already in format {variant.name}. Nothing was written.",
            file=source.root,
            expected="another format",
            found=next(iter(layers.values())).weight_format.describe(),
            fix=f"Choose another of {', '.join(TARGET_FORMATS)}.",
        )
    for name, layer in layers.items():
        if not isinstance(layer.weight_format, variant.sources):
            kinds = " or ".join(cls.name for cls in variant.sources)
            raise refusal(
                name,
                f"a format with the same numbers as {variant.name}: {kinds}",
                layer.weight_format.describe(),
                "Quantize the original model again, or keep the checkpoint unchanged.",
            )
    packed = {info.part_of or info.name for layer in layers.values() for info in layer.infos.values()}
    kept = {} if source.gguf is None else source.gguf.kept
    for name, info in (*source.tensors.items(), *kept.items()):
        if name in kept or (name not in packed and info.dtype in _CODES):
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


def _is_float(layer: SourceLayer) -> bool:
    """Returns True for a layer of numbers in a GGUF file, such as permuted rows."""
    found = layer.weight_format
    return isinstance(found, Gguf) and found.type.dtype != "U8"


def _floats(source: Checkpoint, layers: Mapping[str, SourceLayer], reader: Reader) -> dict[str, NewTensor]:
    """Returns the tensors that are not quantized, with the values of the model.

    Raises:
        FormatError: A GGUF file stores the transpose of a weight.
    """
    packed = {info.part_of or info.name for layer in layers.values() for info in layer.infos.values()}
    tensors = {
        name: NewTensor.of_model(info, reader) for name, info in source.tensors.items() if name not in packed
    }
    for module, layer in layers.items():
        if not _is_float(layer):
            continue
        blocks = layer.infos["weight"].blocks
        if blocks is not None and blocks.rows is None and blocks.columns is None:
            raise refusal(
                f"{module}.weight",
                "weights that the file stores as the model has them",
                "the transpose, or fused experts",
                "Use the original checkpoint of this model.",
            )
        for local, info in layer.infos.items():
            tensors[f"{module}.{local}"] = NewTensor.of_model(info, reader)
    return tensors


def _planned(layers: Mapping[str, SourceLayer], plans: Mapping[str, LayerPlan]) -> dict[str, NewTensor]:
    """Returns the tensors of quantized layers, each in the place of the codes of its layer."""
    tensors = {}
    for module, plan in plans.items():
        codes = layers[module].infos[layers[module].weight_format.codes_name]
        for local, tensor in plan.tensors.items():
            tensors[f"{module}.{local}"] = dataclasses.replace(tensor, place=codes.range)
    return tensors


def _shards(
    source: Checkpoint, tensors: Mapping[str, NewTensor]
) -> tuple[list[NewFile], dict[str, list[TensorInfo]]]:
    """Returns the new files, and the contents of each.

    There are as many files as in the source. All tensors of a layer are in the same file.
    """
    grouped: dict[str, list[TensorInfo]] = {}
    for name in sorted(tensors, key=lambda name: tensors[name].place[:2]):
        grouped.setdefault(tensors[name].place.file, []).append(tensors[name].described(name))
    metadata = {**source.metadata(), "format": "pt"}
    shards, held = [], {}
    for number, (_, group) in enumerate(sorted(grouped.items()), 1):
        infos = in_order(group)
        name = (
            "model.safetensors"
            if len(grouped) == 1
            else f"model-{number:05d}-of-{len(grouped):05d}.safetensors"
        )
        parts = tuple(tensors[info.name].part() for info in infos)
        shards.append(NewFile(name, shard_head(infos, metadata), parts))
        held[name] = infos
    return shards, held


def _json_files(source: Checkpoint, variant: Target, quantization: dict) -> list[NewFile]:
    """Returns config.json with the new quantization, and the side files of other tools."""
    config, key = json.loads(json.dumps(source.config)), "quantization_config"
    owner = next(
        (each for each in (config, *config.values()) if isinstance(each, dict) and each.get(key) is not None),
        config,
    )
    owner.pop(key, None)
    if quantization:
        owner[key] = quantization
    written = {"config.json": config, **variant.side_files(quantization)}
    return [
        NewFile(name, (json.dumps(content, indent=2) + "\n").encode()) for name, content in written.items()
    ]


def _check_written(
    folder: Path,
    config: Mapping,
    layers: Mapping[str, SourceLayer],
    tensors: Mapping[str, NewTensor],
    reader: Reader,
) -> None:
    """Reads the new folder as a checkpoint and compares every tensor with the source's.

    Layers are compared dequantized. Of other tensors that are copied into safetensors files, only dtypes and
    shapes are compared.
    """
    written = Checkpoint.open(folder)
    own = Reader(written)
    try:
        found = read_layers(written, config, own)
    except FormatError as error:
        raise _unlike(error.tensor, error.expected, f"{error.message} {error.found}") from error
    for name, layer in layers.items():
        if name not in found:
            raise _unlike(name, "a packed layer", "none")
        check_equal(layer, found[name])
    packed = {
        stored
        for name in layers
        for local, info in found[name].infos.items()
        if local != "bias"
        for stored in (f"{name}.{local}", info.part_of)
    }
    stored = split_experts(written.tensors) if written.gguf is not None else written.tensors
    for name, tensor in tensors.items():
        info = stored.get(name)
        if name in packed:
            continue
        is_same = info is not None and (info.shape == tensor.shape)
        is_computed = written.gguf is not None or not isinstance(tensor.data, ByteRange)
        if info is not None and is_same and is_computed:
            values = NewTensor.of_model(info, own).values(own)
            both = values.to(torch.float32), tensor.values(reader).to(torch.float32)
            is_same = torch.allclose(*both, rtol=0, atol=0, equal_nan=True)
        if info is None or not is_same or (written.gguf is None and info.dtype != tensor.dtype):
            raise _unlike(name, tensor.described(name), info)


def _unlike(tensor: str | None, expected: object, found: object) -> CheckpointError:
    return CheckpointError(
        "The new checkpoint does not read back as it was written. Nothing was left behind.",
        tensor=tensor,
        expected=expected,
        found=found,
        fix="Check the disk for errors. If it has none, report this as a bug in hfq.",
    )
