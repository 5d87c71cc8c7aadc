"""Matches a model's skeleton with a checkpoint's tensors, by headers alone: all have one place, or one error says what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from hfq.checkpoint import Checkpoint
from hfq.errors import FormatError, nearest
from hfq.formats import Format, detect_formats, tensors_by_module
from hfq.spec import DTYPE_BITS, TensorInfo

__all__ = ["Match", "PackedMatch", "match_model"]

_CACHE_SCALES = re.compile(r"\.(k|v|q|prob)_scale$")
_DENSE_DTYPES = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class PackedMatch:
    """One linear layer that the checkpoint holds packed."""

    name: str
    linear: nn.Linear
    format: Format
    infos: dict[str, TensorInfo]


@dataclass
class Match:
    """What is packed, and what is dense: name in the model → where it is stored.

    `unused` are stored tensors that the model has no place for; `kept` are those of them that a save writes back, as the
    scales of a quantized KV cache.
    """

    packed: dict[str, PackedMatch] = field(default_factory=dict)
    dense: dict[str, TensorInfo] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def hint(self, name: str, names: Iterable[str]) -> str:
        """The nearest name, for as many problems as are shown; looking for it takes time."""
        return nearest(name, names) if len(self.problems) < 20 else ""


class _Names:
    """Stored names → names in the model, by transformers' own renamings."""

    def __init__(self, model: PreTrainedModel) -> None:
        conversions = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._prefix, self._tensors = model.base_model_prefix, model.state_dict()
        ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
        self._ignored = re.compile("|".join(f"({pattern})" for pattern in ignored))

    def in_model(self, stored: str) -> tuple[str, bool]:
        """The name in the model, and whether transformers would merge or split the tensor on the way."""
        name, pattern = rename_source_key(stored, self._renamings, self._converters, self._prefix, self._tensors)
        if name not in self._tensors and stored in self._tensors:
            name, pattern = stored, None
        return name, pattern is not None

    def is_ignored(self, stored: str) -> bool:
        """Whether the model's class says that this tensor may stand in a checkpoint without a place."""
        return self._ignored.search(stored) is not None

    def is_within(self, name: str, submodules: Mapping[str, nn.Module]) -> bool:
        """Whether a name without a place lies inside a part that the model has, and not beside its parts."""
        return _owner(name, submodules) not in ("", self._prefix)


def match_model(model: PreTrainedModel, checkpoint: Checkpoint, source: Mapping) -> Match:
    """Finds the place of every stored tensor in the model, and the stored tensor of every place.

    Args:
        model: The skeleton on meta, before any module was replaced.
        checkpoint: The validated checkpoint.
        source: Its `quantization_config`.

    Raises:
        FormatError: Lists everything that is missing, extra, or of a wrong dtype or shape.
    """
    modules = tensors_by_module(checkpoint.tensors)
    formats = detect_formats(modules, source)
    match, names = Match(), _Names(model)
    submodules, parameters = dict(model.named_modules()), dict(model.state_dict())
    for module, tensors in modules.items():
        if module in formats:
            _match_packed(match, names, submodules, module, tensors, formats[module])
        else:
            _match_dense(match, names, parameters, submodules, tensors)
    _check_ties(match, model)
    _find_missing(match, model, parameters, checkpoint.config.get("architectures"))
    if match.problems:
        unused = ", ".join(match.unused[:8])
        raise FormatError(
            f"The checkpoint does not match {type(model).__name__}; nothing was loaded.", file=checkpoint.root,
            problems=match.problems, found=f"tensors without a place: {unused}" if unused else None,
            fix="download the checkpoint again, or load it with the class and config it was saved from",
        )  # fmt: skip
    return match


def _match_packed(
    match: Match, names: _Names, submodules: Mapping[str, nn.Module], module: str, tensors: Mapping, found: Format
) -> None:
    weight, merged = names.in_model(f"{module}.weight")
    name = weight.rpartition(".")[0]
    linear = submodules.get(name)
    if merged or (linear is None and names.is_within(name, submodules)):
        match.problems.append(
            f"{module}: packed {found.describe()}, but {_owner(name, submodules)} has no linear layer of its own for it "
            "(mixture-of-experts and fused layers are not supported yet)"
        )
        return
    if linear is None:
        match.unused += [info.name for info in tensors.values()]
        return
    if not isinstance(linear, nn.Linear):
        match.problems.append(f"{module}: packed {found.describe()}, but it is a {type(linear).__name__} in the model")
        return
    try:
        specs = {spec.name: spec for spec in found.tensor_specs(linear.in_features, linear.out_features)}
    except FormatError as error:
        match.problems.append(f"{module}: {error.what} Expected {error.expected}, found {error.found}")
        return
    for spec in specs.values():
        info = tensors.get(spec.name)
        if info is None and (not spec.optional or (spec.role == "bias" and linear.bias is not None)):
            match.problems.append(f"{module}.{spec.name}: missing, expected {spec}{match.hint(spec.name, tensors)}")
        elif info is not None and (info.dtype not in spec.dtypes or info.shape != spec.shape):
            match.problems.append(f"{info.name}: expected {spec}, found {info}")
    for local, info in tensors.items():
        if _CACHE_SCALES.search(info.name):
            match.kept.append(info.name)
        elif local not in specs:
            match.problems.append(f"{info.name}: unexpected beside a {found.describe()} layer{match.hint(local, specs)}")
    match.packed[name] = PackedMatch(name, linear, found, {local: tensors[local] for local in specs if local in tensors})


def _match_dense(
    match: Match, names: _Names, parameters: Mapping[str, torch.Tensor], submodules: Mapping, tensors: Mapping
) -> None:
    for info in tensors.values():
        name, merged = names.in_model(info.name)
        place = parameters.get(name)
        if place is None and _CACHE_SCALES.search(name):
            match.kept.append(info.name)
            continue
        if place is None:
            match.unused.append(info.name)
            if names.is_within(name, submodules) and not names.is_ignored(info.name):
                match.problems.append(f"{info.name}: unexpected{match.hint(name, parameters)}")
            continue
        match.dense[name] = info
        is_float = place.is_floating_point()
        if is_float and info.dtype not in _DENSE_DTYPES:
            match.problems.append(f"{info.name}: expected a float weight, found {info} that no dialect explains")
        elif not is_float and DTYPE_BITS[info.dtype] != place.element_size() * 8:
            match.problems.append(f"{info.name}: expected {place.dtype}, found {info}")
        elif not merged and tuple(place.shape) != info.shape:
            match.problems.append(f"{info.name}: expected {list(place.shape)}, found {info}")


def _check_ties(match: Match, model: PreTrainedModel) -> None:
    for target, source in model.all_tied_weights_keys.items():
        for name in (target, source):
            if name.rpartition(".")[0] in match.packed:
                match.problems.append(
                    f"{name}: stored packed, but the config ties {target} to {source} (set tie_word_embeddings to false)"
                )


def _find_missing(match: Match, model: PreTrainedModel, parameters: Mapping[str, torch.Tensor], architectures) -> None:
    """Every tensor of the model must be stored, but for ties, the class's own exceptions, and a head that is new."""
    ties = model.all_tied_weights_keys
    tied = {name for pair in ties.items() if pair[0] in match.dense or pair[1] in match.dense for name in pair}
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    prefix = f"{model.base_model_prefix}."
    is_other_class = type(model).__name__ not in (architectures or ())
    is_new_head = is_other_class and any(name.startswith(prefix) for name in parameters)
    stored_parts = {name.partition(".")[0] for name in (*match.dense, *match.packed)}
    for name, place in parameters.items():
        if name in match.dense or name in tied or name.rpartition(".")[0] in match.packed:
            continue
        if any(pattern.search(name) for pattern in ignored):
            continue
        part = name.partition(".")[0]
        if is_new_head and not name.startswith(prefix) and part not in stored_parts and part != "lm_head":
            continue
        match.problems.append(f"{name}: missing, expected float {list(place.shape)}")


def _owner(name: str, submodules: Mapping[str, nn.Module]) -> str:
    while name not in submodules:
        name = name.rpartition(".")[0]
    return name
