"""What brings a model's layers from disk for each forward: hfq, accelerate's offload, accelerate's hooks on
packed bytes.

`standing_in` replaces the arithmetic of a decoder layer, for all of them alike, by what a forward does at
least: every weight is read (one byte of each page), and the processor then sleeps as it would while an
accelerator computes.
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
from hfq.modules.quantized_module import QuantizedModule

__all__ = ["IN_MEMORY", "MOVERS", "ON_DISK", "Compute", "Mover", "layer_nbytes", "standing_in"]

LAYERS = "model.layers"
ON_DISK = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu") | {
    LAYERS: "disk"
}
IN_MEMORY = {"": "cpu"}


class Compute:
    """How long each layer's stand-in sleeps, in s, set between forwards."""

    seconds = 0.0


class Mover:
    """A model whose layers are brought from disk.

    Args:
        model: Takes `input_ids` as transformers' models do.
        bytes_read: Counts what has been read for it so far; None where nobody counts.
        waited: For how many seconds its forwards have waited for their layers so far; None where nobody
            counts.
        scratch: A folder of files that were written to offload the model; removed with it.

    Attributes:
        shares_reads: Whether `forward_all` reads each layer once for all micro-batches.
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
        """What has to leave the page cache beside the checkpoint's own files."""
        return list(Path(self._scratch.name).iterdir()) if self._scratch else []

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor) -> None:
        """One pass over all layers."""
        self.model(input_ids=tokens, use_cache=False)

    def forward_all(self, batches: list[torch.Tensor]) -> None:
        """One pass for all micro-batches, for a mover that `shares_reads`."""
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
    """accelerate's hooks over modules that hold a checkpoint's stored tensors and compute nothing: movement
    of the same bytes."""
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
    """The number of decoder layers of a checkpoint, and the bytes of all of them."""
    infos = [info for name, info in Checkpoint.open(path).tensors.items() if name.startswith(f"{LAYERS}.")]
    return len({info.name.split(".")[2] for info in infos}), sum(info.nbytes for info in infos)


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """During this, a Llama that is loaded or run reads its weights and sleeps in place of computing."""
    classes = (LlamaDecoderLayer, LlamaRMSNorm, nn.Linear, QuantizedLinear)
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
            part(hidden_states)  # through the part's own hooks, which is where accelerate reads
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
