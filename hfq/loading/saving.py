"""Tensors and files that `save_pretrained` writes, with the checkpoint's names and bytes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from hfq.checkpoint import Checkpoint, Reader
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.formats.configs.source_config import SIDE_FILES, is_declared
from hfq.loading.matching.match import CheckpointMatch
from hfq.loading.whole_save import least_nbytes, whole_save
from hfq.modules.flat_buffer import map_tensor
from hfq.modules.quantized_module import QuantizedModule
from hfq.tensor_spec import TensorInfo

__all__ = ["SIDE_FILES", "declared_like", "like_source", "stored_state"]


def stored_state(
    model: nn.Module,
    match: CheckpointMatch,
    quantized: Mapping[str, QuantizedModule],
    checkpoint: Checkpoint,
    reader: Reader,
    conversions: list[Any] | None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Returns every tensor of a loaded model by its name in the checkpoint.

    Tensors on disk, and quantized tensors that ranks share, are views of the mapped checkpoint. Unquantized
    tensors among them are cast to the dtype of the model. Tensors that the checkpoint does not store get the
    names of transformers' own conversions.

    Args:
        model: The loaded model.
        match: Places of its tensors in the checkpoint.
        quantized: Its quantized modules, keyed by module name.
        checkpoint: The checkpoint.
        reader: Reader of the checkpoint.
        conversions: transformers' conversions of this model.
        state: Its tensors by their names in the model; None to read them from the model.
    """
    state, stored = dict(model.state_dict() if state is None else state), {}
    for name, module in quantized.items():
        for local, info in module.infos.items():
            tensor = state.pop(f"{name}.{local}", None)
            if info.part_of is not None and info.part_of in stored:
                continue
            if info.part_of is not None:
                stored[info.part_of] = map_tensor(reader, checkpoint.tensors[info.part_of])
            elif tensor is not None:
                stored[info.name] = map_tensor(reader, info) if tensor.is_meta else tensor
    others: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        place = match.unquantized.get(name)
        if tensor.is_meta and place is not None:
            tensor = map_tensor(reader, place).to(tensor.dtype)
        # both names of a tie are written if both are stored
        if place is not None and name not in match.merged:
            tensor = _narrowed(tensor, place, getattr(model, "dtype", torch.float32))
            stored[place.name] = (
                tensor.clone() if name in getattr(model, "all_tied_weights_keys", {}) else tensor
            )
        elif not tensor.is_meta and not _is_tied(name, model, match):
            others[name] = tensor
    stored |= _reverted(model, others, conversions)
    return stored | {name: map_tensor(reader, checkpoint.tensors[name]) for name in match.kept}


@contextlib.contextmanager
def like_source(
    model: Any,
    checkpoint: Checkpoint,
    folder: Any,
    is_main_process: bool = True,
    unused: Collection[str] = (),
) -> Iterator[bool]:
    """Prepares the folder and the config for a save that matches the source checkpoint.

    Copies the side files. Keeps `quantization_config` out of config.json if the source had none there. A save
    that the disk has no space for leaves nothing new.

    Args:
        model: The model.
        checkpoint: The checkpoint that the model was loaded from.
        folder: Destination of the save.
        is_main_process: True if this process writes the files that all processes share.
        unused: Names of stored tensors that the model does not have.

    Yields:
        True, since this process writes the model.
    """
    if not is_main_process or os.path.isfile(folder):
        with declared_like(model, checkpoint):
            yield True
        return
    is_adapter = getattr(model, "_hf_peft_config_loaded", False)
    names = () if is_adapter else checkpoint.tensors.keys() - set(unused)
    nbytes = least_nbytes((checkpoint.tensors[name] for name in names), model.dtype.itemsize)
    with whole_save(Path(folder), nbytes), declared_like(model, checkpoint):
        if not is_adapter:
            _copy_side_files(checkpoint, Path(folder))
        yield True


@contextlib.contextmanager
def declared_like(model: Any, checkpoint: Checkpoint) -> Iterator[None]:
    """Removes `quantization_config` from the model's config meanwhile, if the source has none."""
    named = getattr(model.config, "quantization_config", None)
    if named is None or is_declared(checkpoint):
        yield
        return
    del model.config.quantization_config
    try:
        yield
    finally:
        model.config.quantization_config = named


def _copy_side_files(checkpoint: Checkpoint, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in SIDE_FILES:
        source = Path(checkpoint.root, name)
        if (
            source.is_file()
            and checkpoint.side_file(name) is not None
            and not _is_same(source, folder / name)
        ):
            shutil.copyfile(source, folder / name)


def _is_same(source: Path, target: Path) -> bool:
    return target.exists() and target.samefile(source)


def _narrowed(tensor: torch.Tensor, place: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor that transformers keeps in float32 as it was stored, if nothing is lost.

    Args:
        tensor: The tensor.
        place: The tensor in the checkpoint.
        dtype: The dtype of the model; a model in float32 is saved in float32.
    """
    if torch.float32 in (dtype, torch_dtype(place.dtype)) or tensor.dtype != torch.float32:
        return tensor
    narrow = tensor.to(torch_dtype(place.dtype))
    return narrow if torch.equal(narrow.to(torch.float32), tensor) else tensor


def _is_tied(name: str, model: nn.Module, match: CheckpointMatch) -> bool:
    """Returns True if a tensor is not stored itself, but tied to a stored tensor."""
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    others = {
        ties.get(name, name),
        *(target for target, source in ties.items() if source == ties.get(name, name)),
    }
    return any(other in match.unquantized for other in others - {name})


def _reverted(
    model: Any, state: dict[str, torch.Tensor], conversions: list[Any] | None
) -> dict[str, torch.Tensor]:
    if not state or not conversions:
        return state
    kept = model._weight_conversions
    try:
        model._weight_conversions = conversions
        return revert_weight_conversion(model, state)
    finally:
        model._weight_conversions = kept
