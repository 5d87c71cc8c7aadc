"""GGUF files that `save_pretrained` writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hfq.checkpoint import Checkpoint, Reader
from hfq.errors import CheckpointError
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.formats.gguf.stored_values import stored_values
from hfq.loading.saving import declared_like
from hfq.loading.whole_save import target_of, whole_save
from hfq.modules.flat_buffer import read_tensor
from hfq.tensor_spec import ByteRange, TensorInfo

if TYPE_CHECKING:
    from hfq.loading.state import LoadState

__all__ = ["gguf_saved"]

_CHUNK = 16 << 20


@contextlib.contextmanager
def gguf_saved(
    loading: LoadState, model: Any, state: Mapping[str, torch.Tensor], folder: Path
) -> Iterator[bool]:
    """A context manager that writes the GGUF files of a model into the folder of a save.

    transformers then adds the config. Quantized bytes are those of the source. So are unquantized tensors
    whose values the model has not changed.

    Args:
        loading: The load of the model.
        model: The model.
        state: Its tensors by checkpoint name.
        folder: The folder.

    Yields:
        True, since this process writes the model.

    Raises:
        CheckpointError: The folder holds another checkpoint, or the disk is full.
    """
    checkpoint = loading.checkpoint
    files = {file: folder / Path(file).name for file in _sources(checkpoint)}
    is_adapter = getattr(model, "_hf_peft_config_loaded", False)
    nbytes = 0 if is_adapter else sum(map(os.path.getsize, files))
    with whole_save(folder, nbytes), declared_like(model, checkpoint):
        if not is_adapter:
            _check_free(target_of(folder), {target.name for target in files.values()})
            folder.mkdir(parents=True, exist_ok=True)
            changed = dict(_changed(loading, state))
            for file, target in files.items():
                _copy(loading.reader, file, target)
                for info, value in changed.items():
                    if info.range.file == file:
                        _overwrite(target, info, value)
        yield True


def _sources(checkpoint: Checkpoint) -> list[str]:
    """Returns the GGUF files of a checkpoint, without files in memory."""
    return [file for file in checkpoint.headers if file.endswith(".gguf")]


def _check_free(folder: Path, names: set[str]) -> None:
    """Raises an error for a folder with other weights, which a load would find, too."""
    entries = os.listdir(folder) if folder.is_dir() else []
    others = [
        name
        for name in entries
        if name not in names
        and (name.endswith(".gguf") or (name.startswith("model") and "safetensors" in name))
    ]
    if others:
        raise CheckpointError(
            "The model cannot be saved here, since the folder holds another checkpoint. Nothing was written.",
            file=folder,
            expected="an empty folder",
            found=", ".join(sorted(others)[:8]),
            fix="Choose another folder.",
        )


def _copy(reader: Reader, file: str, target: Path) -> None:
    """Copies a file of the checkpoint, by the descriptor that was validated."""
    size = reader.identity(file)[1]
    memory = memoryview(bytearray(min(size, _CHUNK)))
    with open(target, "wb") as stream:
        for start in range(0, size, _CHUNK):
            part = memory[: min(_CHUNK, size - start)]
            reader.read_into(ByteRange(file, start, part.nbytes), part)
            stream.write(part)


def _overwrite(target: Path, info: TensorInfo, value: torch.Tensor) -> None:
    with open(target, "r+b") as stream:
        stream.seek(info.range.offset)
        # numpy arrays have the buffer protocol
        stream.write(memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


def _changed(
    loading: LoadState, state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
    """Yields each stored tensor whose values the model has changed, with the values to store."""
    model, match = loading.checkpoint.gguf, loading.match
    biases = (found.infos["bias"] for found in match.quantized.values() if "bias" in found.infos)
    for info in (*match.unquantized.values(), *biases):
        value = state.get(info.name)
        if value is None or model is None or value.is_meta or info.part_of is not None:
            continue
        value = value.detach().cpu()
        # a mapped value is the model's own
        if torch.equal(value, read_tensor(loading.reader, info).to(value.dtype)):
            continue
        stored = model.tensors[info.name]
        yield stored, stored_values(value, stored.blocks).to(torch_dtype(stored.dtype))
