"""The folder of a saved KV cache: a description, and one file per offloaded layer."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfq.checkpoint import Reader
from hfq.errors import CheckpointError, SetupError
from hfq.loading.loaded_model import loader_of
from hfq.output_file import replace_file
from hfq.runtime.kv_cache.kv_codec import KvCodec
from hfq.runtime.kv_cache.kv_rows import FileRows
from hfq.runtime.kv_cache.offloaded_layer import OffloadedLayer

__all__ = ["CacheFolder", "identity_of", "send"]

_DESCRIPTION = "kv_cache.json"
_CHECKSUM = "checksum"
"""Field of the description: the CRC-32 of the others."""

_OTHER_LAYERS = "other_layers_{}.pt"
"""File of the layers that are not offloaded, by its CRC-32: a description names the one of its save."""

_LOCK = "lock"
_VERSION = 1
_SAMPLES = 16
_SAMPLE_NBYTES = 4096
_VOLATILE = ("_name_or_path", "transformers_version", "quantization_config", "use_cache")
_DAMAGES = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    OSError,
    EOFError,
    RuntimeError,
    pickle.UnpicklingError,
)
_NEW_FOLDER = "Pass a new folder, or delete this one."


class CacheFolder:
    """A folder that one `OffloadedCache` uses at a time.

    Args:
        root: The folder, which is made if it does not exist.
        identity: Identity of the model, from `identity_of`.
        kind: One of `KV_CACHE_DTYPES`.

    Attributes:
        saved_length: Tokens of the last save; 0 if there is none.

    Raises:
        SetupError: The folder cannot be written, or another cache uses it.
    """

    def __init__(self, root: Path, identity: str, kind: str) -> None:
        self._root, self._identity, self._kind = root, identity, kind
        self.saved_length = 0
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._lock = open(root / _LOCK, "wb")  # noqa: SIM115  # it is held until `close`
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(
                "Another KV cache uses this folder.",
                file=root,
                expected="one cache at a time",
                found="a locked folder",
                fix="Close the other cache, or pass another folder.",
            ) from None
        except OSError as error:
            raise SetupError(
                "The folder of the KV cache cannot be used.",
                file=root,
                expected="a folder that can be written",
                found=error.strerror,
                fix="Pass a folder that you may write to.",
            ) from error

    def close(self) -> None:
        """Releases the folder."""
        self._lock.close()

    def file_of(self, index: int) -> Path:
        """Returns the file of a layer's rows."""
        return self._root / f"layer_{index:05}.kv"

    def invalidate(self) -> None:
        """Forgets the saved state, whose rows are about to change."""
        (self._root / _DESCRIPTION).unlink(missing_ok=True)
        self.saved_length = 0

    def save(self, layers: Sequence[Any], tokens: torch.Tensor | None, length: int) -> None:
        """Saves all layers; a crash before its end leaves the earlier state.

        Args:
            layers: The layers.
            tokens: Token ids of the conversation, or None.
            length: Number of tokens in the cache.

        Raises:
            SetupError: The disk is full, or tokens are missing; then no new file is left.
        """
        description: dict[str, Any] = {"version": _VERSION, "model": self._identity, "kind": self._kind}
        description["layers"], description["checksums"], others = {}, {}, {}
        try:
            for index, layer in enumerate(layers):
                if not isinstance(layer, OffloadedLayer):
                    others[index] = _state_of(layer)
                elif layer.is_initialized:
                    layer.flush()
                    if isinstance(layer.rows, FileRows):
                        layer.rows.synchronize()
                        description["checksums"][index] = layer.rows.checksum()
                    description["layers"][index] = {**asdict(layer.codec), "tokens": layer.rows.count}
            description["tokens"], description["length"] = _as_lists(tokens, length), length
            self._write(description, others)
        except OSError as error:
            raise SetupError(
                "The KV cache could not be saved. The earlier save is kept, if there is one.",
                file=self._root,
                expected="a disk with room for the description and the layers that are not offloaded",
                found=error.strerror,
                fix="Free disk space, and save again.",
            ) from error
        self.saved_length = length

    def _write(self, description: dict[str, Any], others: dict[int, Any]) -> None:
        states = io.BytesIO()
        torch.save(others, states)  # torch would report a full disk as an error of its own stream
        description["others_checksum"] = zlib.crc32(states.getbuffer())
        description["others"] = _OTHER_LAYERS.format(f"{description['others_checksum']:08x}")
        description[_CHECKSUM] = _checksum(description)
        path = self._root / description["others"]
        is_of_earlier_save = path.exists()
        try:
            replace_file(path, states.getbuffer(), is_durable=True)
            replace_file(self._root / _DESCRIPTION, json.dumps(description).encode(), is_durable=True)
        except OSError:
            if not is_of_earlier_save:
                path.unlink(missing_ok=True)
            raise
        for former in self._root.glob(_OTHER_LAYERS.format("*")):
            if former.name != description["others"]:
                former.unlink()

    def restore(self, layers: Sequence[Any]) -> torch.Tensor | None:
        """Restores the saved state of all layers, if there is one.

        Returns:
            The saved token ids: [batch, tokens].
        """
        path = self._root / _DESCRIPTION
        if not path.exists():
            return None
        description = self._read_description(path)
        try:
            found = {int(index): dict(fields) for index, fields in description["layers"].items()}
            checksums = dict(description.get("checksums", {}))  # of 0.2.0 there are none
            length = 0
            for index, fields in found.items():
                length = int(fields.pop("tokens"))
                codec = KvCodec(**fields)
                rows = FileRows(codec.row_nbytes, self.file_of(index), length)
                if str(index) in checksums:
                    what = f"of {length} tokens of layer {index}"
                    _check(self.file_of(index), int(checksums[str(index)]), rows.checksum(), what)
                layers[index].restore(codec, rows)
            path = self._root / Path(description["others"]).name
            states = path.read_bytes()
            if "others_checksum" in description:
                _check(path, int(description["others_checksum"]), zlib.crc32(states), "of the other layers")
            others = torch.load(io.BytesIO(states), map_location="cpu", weights_only=True)
            for index, state in others.items():
                vars(layers[index]).update(state)
            self.saved_length = int(description.get("length", length))
            tokens = description["tokens"]
            return None if tokens is None else torch.tensor(tokens)
        except _DAMAGES as error:
            raise _damaged(self._root, error) from error

    def _read_description(self, path: Path) -> dict[str, Any]:
        try:
            description = json.loads(path.read_text())
            found = tuple(description[key] for key in ("version", "model", "kind"))
            checksum = int(description.pop(_CHECKSUM, -1))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise _damaged(path, error) from error
        expected = (_VERSION, self._identity, self._kind)
        names = ("version", "model", "kv_cache_dtype")
        for name, one, other in zip(names, expected, found, strict=True):
            if one != other:
                raise SetupError(
                    "The folder holds a KV cache of another model or kind.",
                    file=path,
                    expected=f"{name} {one}",
                    found=f"{name} {other}",
                    fix=_NEW_FOLDER,
                )
        if checksum >= 0:  # of 0.2.0 there is none
            _check(path, checksum, _checksum(description), "of the description")
        return description


def send(layer: Any, device: torch.device) -> None:
    """Sends all tensors of a restored layer to the device that computes with it."""
    for name, value in vars(layer).items():
        setattr(layer, name, _mapped(value, lambda tensor: tensor.to(device)))
    if hasattr(layer, "device"):
        layer.device = device


def identity_of(model: nn.Module) -> str:
    """Returns a digest of what keys and values depend on.

    That is the config, the weights, rounded activations, and adapters.

    The weights are sampled at 16 places of each file.

    Raises:
        SetupError: hfq did not load the model.
    """
    loading = loader_of(model)
    fields = model.config.to_dict()  # type: ignore[operator, union-attr]
    for name in _VOLATILE:
        fields.pop(name, None)
    digest = hashlib.sha256(json.dumps([fields, str(model.dtype)], sort_keys=True, default=str).encode())
    if loading.config.quantize_activations:
        digest.update(f"rounded activations, threshold {loading.config.llm_int8_threshold}".encode())
    for file in sorted(loading.checkpoint.headers):
        _sample(digest, loading.reader, file)
    for name, module in model.named_modules():
        for part in getattr(module, "adapter_layer_names", ()):  # of PEFT
            state = [getattr(module, key, None) for key in ("active_adapters", "disable_adapters", "scaling")]
            digest.update(repr((name, part, state)).encode())
            for parameter in getattr(module, part).parameters():
                digest.update(_bytes_of(parameter))
    return digest.hexdigest()[:32]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _sample(digest: Any, reader: Reader, file: str) -> None:
    size = os.fstat(reader.descriptor(file)).st_size
    digest.update(f"{Path(file).name} {size}".encode())
    for place in range(_SAMPLES):
        offset = max(size - _SAMPLE_NBYTES, 0) * place // (_SAMPLES - 1)
        digest.update(os.pread(reader.descriptor(file), _SAMPLE_NBYTES, offset))


def _state_of(layer: Any) -> dict[str, Any]:
    return {name: _mapped(value, torch.Tensor.cpu) for name, value in vars(layer).items()}


def _mapped(value: Any, change: Any) -> Any:
    """Returns a value whose tensors are changed, also in lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(each, change) for each in value)
    return value


def _as_lists(tokens: torch.Tensor | None, length: int) -> list | None:
    if tokens is None:
        return None
    if tokens.dim() != 2 or tokens.shape[1] < length:
        raise SetupError(
            "save() needs all token ids of the cache.",
            expected=f"[batch, {length} or more]",
            found=list(tokens.shape),
            fix="Pass the token ids of the whole conversation, as generate returns them.",
        )
    return tokens.tolist()


def _checksum(description: Mapping[str, Any]) -> int:
    content = json.loads(json.dumps(description))  # as it is read again
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _check(path: Path, expected: int, found: int, what: str) -> None:
    """Checks that a file is the one that was saved.

    Raises:
        CheckpointError: It is not.
    """
    if found != expected:
        raise CheckpointError(
            "A file of the saved KV cache does not match its checksum.",
            file=path,
            expected=f"CRC-32 {expected:08x}, {what}",
            found=f"CRC-32 {found:08x}",
            fix="Delete the folder, and compute the conversation again.",
        )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        "The saved KV cache is damaged.",
        file=path,
        expected="the files that save() wrote",
        found=f"{type(error).__name__}: {error}",
        fix="Delete the folder, and compute the conversation again.",
    )
