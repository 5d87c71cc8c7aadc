"""Contenders that read a model's layers from disk for each forward pass.

They are hfq, accelerate's offload, and accelerate's hooks on quantized bytes. `standing_in` replaces the
arithmetic of a decoder layer for all of them. It does the least that a forward pass does: it reads one byte
of each page of every weight. Then it sleeps, because a processor is idle while an accelerator computes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from benchmarks.memory_limits import touch
from hfq.checkpoint import Checkpoint
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.loading.config import HfqConfig
from hfq.modules.linear import QuantizedLinear
from hfq.modules.output_head import OutputHead
from hfq.modules.quantized_module import QuantizedModule

__all__ = ["IN_MEMORY", "MOVERS", "ON_DISK", "Compute", "Mover", "layer_nbytes", "standing_in"]

LAYERS = "model.layers"
ON_DISK = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu") | {
    LAYERS: "disk"
}
IN_MEMORY = {"": "cpu"}


class Compute:
    """Seconds that each layer's simulated compute sleeps, set between forward passes."""

    seconds = 0.0


class Mover:
    """A model whose layers are read from disk.

    Args:
        model: Model that accepts `input_ids`, like transformers' models.
        bytes_read: Returns the bytes read so far. None if they are not counted.
        waited: Returns the seconds that forward passes waited for their layers so far. None if they are not
            counted.
        scratch: Folder of files that were written to offload the model. It is removed with the object.

    Attributes:
        shares_reads: True if `forward_all` reads each layer once for all micro-batches.
    """

    shares_reads = False

    def __init__(
        self,
        model: nn.Module,
        bytes_read: Callable[[], int] | None = None,
        waited: Callable[[], float] | None = None,
        scratch: TemporaryDirectory | None = None,
    ) -> None:
        self.model: Any = model
        self.bytes_read, self.waited, self._scratch = bytes_read, waited, scratch

    def files(self) -> list[Path]:
        """Returns files to drop from the page cache, in addition to the checkpoint's own."""
        return list(Path(self._scratch.name).iterdir()) if self._scratch else []

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor) -> None:
        """Runs one pass over all layers."""
        self.model(input_ids=tokens, use_cache=False)

    def forward_all(self, batches: list[torch.Tensor]) -> None:
        """Runs one pass for all micro-batches, if `shares_reads`."""
        for tokens in batches:
            self.forward(tokens)


class _HfqMover(Mover):
    shares_reads = True

    @torch.no_grad()
    def forward_all(self, batches: list[torch.Tensor]) -> None:
        import hfq

        hfq.run_batches(self.model, batches, self.forward)


def _hfq(path: Path, device_map: dict[str, str], stream: str = "direct") -> Mover:
    config = HfqConfig(disk_io=stream)
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, device_map=dict(device_map), dtype="auto"
    )
    loading = model.hf_quantizer.loading
    offloader, counters = loading.offloader, loading.reader.counters
    waited = None if offloader is None else lambda: offloader.stall_seconds
    return _HfqMover(model, lambda: counters.bytes_read, waited)


def _hfq_buffered(path: Path, device_map: dict[str, str]) -> Mover:
    return _hfq(path, device_map, "buffered")


def _accelerate(path: Path, device_map: dict[str, str]) -> Mover:
    scratch = TemporaryDirectory(dir=path.parent, prefix="offload-", ignore_cleanup_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        path, device_map=dict(device_map), dtype="auto", offload_folder=scratch.name
    )
    return Mover(model, scratch=scratch)


def _hooks(path: Path, device_map: dict[str, str]) -> Mover:
    """Returns accelerate's hooks over modules that hold the stored tensors and compute nothing.

    They onload the same bytes.
    """
    from accelerate import dispatch_model

    model, index = _TemporaryForward(), {}
    for name, info in Checkpoint.open(path).tensors.items():
        if name.startswith(f"{LAYERS}."):
            layer, _, rest = name.removeprefix(f"{LAYERS}.").partition(".")
            module, _, local = rest.rpartition(".")
            dtype, key = torch_dtype(info.dtype), module.replace(".", "_")
            owner = _child(_child(model.layers, layer, _LoadedLayer), key, _LoadedTensors)
            owner.register_parameter(
                local, nn.Parameter(torch.empty(info.shape, dtype=dtype, device="meta"), False)
            )
            where = {
                "safetensors_file": info.range.file,
                "weight_name": name,
                "dtype": str(dtype).removeprefix("torch."),
            }
            index[f"layers.{layer}.{key}.{local}"] = where
    return Mover(dispatch_model(model, {"layers": "disk"}, offload_index=index))


MOVERS: dict[str, Callable[[Path, dict[str, str]], Mover]] = {
    "hfq": _hfq,
    "hfq, buffered": _hfq_buffered,
    "accelerate": _accelerate,
    "accelerate's hooks": _hooks,
}


def layer_nbytes(path: Path) -> tuple[int, int]:
    """Returns the number of decoder layers of a checkpoint, and the bytes of all of them."""
    infos = [info for name, info in Checkpoint.open(path).tensors.items() if name.startswith(f"{LAYERS}.")]
    return len({info.name.split(".")[2] for info in infos}), sum(info.nbytes for info in infos)


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Makes Llama models read their weights and sleep instead of computing, within the context."""
    classes = (LlamaDecoderLayer, LlamaRMSNorm, nn.Linear, OutputHead, QuantizedLinear)
    own = {cls: cls.__dict__["forward"] for cls in classes}
    try:
        for cls in classes:
            cls.forward = _layer if cls is LlamaDecoderLayer else _part  # type: ignore[method-assign]
        yield
    finally:
        for cls, forward in own.items():
            cls.forward = forward  # type: ignore[method-assign]


def _layer(self: nn.Module, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    for part in self.modules():
        if part._parameters:
            part(hidden_states)  # accelerate reads in the hooks of this module
    time.sleep(Compute.seconds)
    return hidden_states


def _part(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    tensors = self.onloaded_tensors() if isinstance(self, QuantizedModule) else self._parameters
    touch(tensor for tensor in tensors.values() if tensor is not None)
    return hidden_states


class _LoadedTensors(nn.Module):
    forward = _part


class _LoadedLayer(nn.Module):
    forward = _layer


class _TemporaryForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()

    def forward(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
        hidden_states = input_ids
        for layer in self.layers.values():
            hidden_states = layer(hidden_states)
        return hidden_states


def _child(parent: nn.Module, name: str, cls: type[nn.Module]) -> nn.Module:
    if name not in parent._modules:
        parent.add_module(name, cls())
    return parent.get_submodule(name)
