"""The tensors of GGUF files under the names of transformers' models."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hfq.checkpoint.gguf.architectures import ARCHITECTURES, CHECKED_TENSORS, Architecture
from hfq.checkpoint.gguf.header import GgufHeader, Value, read_gguf_header
from hfq.checkpoint.gguf.layouts import apply_layout, integer_key
from hfq.checkpoint.gguf.split_files import check_parts
from hfq.checkpoint.header import HeaderLimits
from hfq.errors import FormatError
from hfq.tensor_spec import TensorInfo

__all__ = ["GgufModel", "name_tensors", "open_gguf"]

_SUFFIX = re.compile(r"(.+)\.(weight|bias|scale|input_scale)")
_LAYER = re.compile(r"blk\.(0|[1-9]\d*)\.")
_EXPERTS = re.compile(r"_exps\.weight$")
_WITH_ROWS = ("weight", "bias")


@dataclass(frozen=True)
class GgufModel:
    """The tensors and the metadata of GGUF files.

    Attributes:
        architecture: `general.architecture`.
        keys: The metadata.
        tensors: The tensors, by name in the model.
        checked: Tensors that repeat what config.json says, by name in the file.
        kept: Tensors of layers that transformers does not have, by name in the file.
    """

    architecture: str
    keys: Mapping[str, Value]
    tensors: dict[str, TensorInfo] = field(repr=False)
    checked: dict[str, TensorInfo] = field(default_factory=dict)
    kept: dict[str, TensorInfo] = field(default_factory=dict, repr=False)

    @property
    def known(self) -> Architecture:
        """The tables of the architecture."""
        return ARCHITECTURES[self.architecture]


def open_gguf(files: Sequence[Path], limits: HeaderLimits) -> tuple[dict[str, GgufHeader], GgufModel]:
    """Returns the headers of all files of a model by path, and the model.

    Args:
        files: The single file, or all parts of a split in order.
        limits: Limits on each header.

    Raises:
        CheckpointError: A header is damaged, or files do not belong together.
        FormatError: hfq does not read a type or the architecture.
    """
    headers = [read_gguf_header(file, limits) for file in files]
    return {header.file: header for header in headers}, name_tensors(headers)


def name_tensors(headers: Sequence[GgufHeader]) -> GgufModel:
    """Gives all tensors their names in the model, with what the file stores differently.

    Args:
        headers: The headers in order; the first one has the metadata.

    Raises:
        CheckpointError: Files do not belong together.
        FormatError: hfq does not read the architecture, a tensor has no place in it, or the metadata
            contradict a tensor.
    """
    check_parts(headers)
    first = headers[0]
    architecture = _architecture(first)
    model = GgufModel(architecture, first.keys, {})
    layers = _layer_count(first)
    unknown = []
    for header in headers:
        for name, info in header.tensors.items():
            layer = _LAYER.match(name)
            if layer is not None and int(layer[1]) >= layers:
                model.kept[name] = info
            elif name in CHECKED_TENSORS:
                model.checked[name] = info
            elif (named := _named(info, model.known, first)) is None:
                unknown.append(name)
            else:
                _add(model.tensors, named, info)
    if unknown:
        raise FormatError(
            f"The GGUF file holds tensors that {architecture} does not have. Nothing was loaded.",
            file=first.file,
            problems=sorted(unknown),
            found=f"{len(unknown)} tensors without a place, such as {min(unknown)}",
            fix="Update hfq, or load the original checkpoint of this model.",
        )
    return model


def _architecture(header: GgufHeader) -> str:
    """Returns the architecture of a model that hfq reads."""
    kind, name = header.keys.get("general.type", "model"), header.keys.get("general.architecture")
    if kind != "model":
        raise FormatError(
            "The GGUF file is not a model. Nothing was loaded.",
            file=header.file,
            expected="general.type='model'",
            found=f"general.type={kind!r}"[:80],
            fix="Pass the GGUF file of the language model.",
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise FormatError(
            "hfq does not read GGUF files of this architecture. Nothing was loaded.",
            file=header.file,
            expected=", ".join(sorted(ARCHITECTURES)),
            found=f"general.architecture={name!r}"[:80],
            fix="Load the original checkpoint of this model. Or add the architecture: see "
            "docs/contributing/add_a_gguf_architecture.md.",
        )
    return name


def _layer_count(header: GgufHeader) -> int:
    """Returns the number of layers, without those that predict further tokens."""
    layers = integer_key(header, "block_count")
    predicting = header.keys.get(f"{header.keys['general.architecture']}.nextn_predict_layers", 0)
    return layers - predicting if isinstance(predicting, int) and 0 <= predicting < layers else layers


def _named(info: TensorInfo, architecture: Architecture, header: GgufHeader) -> TensorInfo | None:
    """Returns a tensor under its name in the model, or None if it has no place there."""
    layer = _LAYER.match(info.name)
    general = f"blk.N.{info.name[layer.end() :]}" if layer else info.name
    number, suffix = layer[1] if layer else "", _SUFFIX.fullmatch(general)
    target = architecture.tensors.get(general)
    layouts = architecture.layouts.get(general, ())
    if target is None and suffix is not None and suffix[1] in architecture.modules:
        target = f"{architecture.modules[suffix[1]]}.{suffix[2]}"
        if suffix[2] in _WITH_ROWS:
            layouts = layouts or architecture.layouts.get(suffix[1], ())
    if target is None:
        return None
    for layout in layouts:
        if info.blocks is not None:
            info = apply_layout(info, info.blocks, layout, header)
    if _EXPERTS.search(info.name) and info.blocks is not None and len(info.shape) == 3:
        info = info._replace(blocks=dataclasses.replace(info.blocks, is_layer=True))
    return info._replace(name=target.replace(".N.", f".{number}."))


def _add(tensors: dict[str, TensorInfo], named: TensorInfo, info: TensorInfo) -> None:
    if named.name in tensors:
        raise FormatError(
            "Two tensors of the GGUF files are the same tensor of the model. Nothing was loaded.",
            file=info.range.file,
            tensor=info.name,
            expected="each tensor once",
            found=f"two tensors for {named.name}",
            fix="Download the files again.",
        )
    tensors[named.name] = named
