"""What every packed module shares: it holds a packed row, in one of its backings, and never a float copy of
its weight.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfq.errors import PlacementError
from hfq.formats import Format
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.modules.flat_buffer import FlatBuffer
from hfq.modules.offloaded_parameter import OffloadedParameter, check_stays
from hfq.modules.tensor_cache import TensorCache
from hfq.tensor_spec import Segment, TensorInfo

if TYPE_CHECKING:
    from typing import Self

    from hfq.modules.cpu_execution import CpuExecution

__all__ = ["QuantizedModule"]

_FLAT = "flat_buffer"
_RESERVED = (
    _FLAT,
    "kernel",
    "accelerated",
    "scheme",
    "outliers",
    "local_in_features",
    "num_embeddings",
    "embedding_dim",
)
"""Attributes that subclasses set, which no stored tensor may take the name of."""


class QuantizedModule(nn.Module):
    """Holds the tensors of one packed module.

    They are frozen parameters under their on-disk names (`hold`; a dot becomes `__`, a taken name gets
    `stored_` before it), or one flat frozen uint8 parameter `flat_buffer` (`hold_buffer`), or that parameter
    cut into shards by ZeRO-3 (`hold_shard`); `state_dict` speaks on-disk names in every case. Before they are
    held they are on `meta`, as they are for a module that rests on disk: then `onload` lends it a row for one
    forward and `offload` takes it back. Casting the module (`half()`, `to(dtype)`) leaves every packed tensor
    as it is. Model code that reads `weight` is given it dequantized, anew each time.

    Args:
        name: The module's name in the model, for messages.
        in_features: The size of an input.
        out_features: The size of an output.
        weight_format: The format of its tensors.
        infos: Where each tensor is stored, by local on-disk name.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        weight_format: Format,
        infos: Mapping[str, TensorInfo],
    ) -> None:
        super().__init__()
        self.name = name
        self.in_features = in_features
        self.out_features = out_features
        self.weight_format, self.infos = weight_format, dict(infos)
        self._segments: Mapping[str, Segment] | None = None
        self._is_gathered: Callable[[], bool] | None = None
        self._onloaded: tuple[int, Mapping[str, torch.Tensor]] | None = None
        self._cache: TensorCache | None = None
        self.fetch: Callable[[], Mapping[str, torch.Tensor]] | None = None
        self.dtype, self.is_transposed = torch.float32, False
        self.is_offloaded = False  # whether it is fetched for every forward, wherever it rests
        self.onload_device: torch.device | None = (
            None  # where a streamer brings it; None where it computes where it rests
        )
        self.on_cpu: CpuExecution | None = (
            None  # decides whether it computes where it rests, beside an accelerator
        )
        self._attributes: dict[str, str] = {}
        for local in self.infos:
            taken = {*vars(self), *self._attributes.values()}
            self._attributes[local] = _attribute(local, taken, _names_of(type(self)))  # type: ignore[arg-type]
        self.hold({local: _on_meta(info) for local, info in self.infos.items()})

    def hold(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keeps these tensors, zero-copy, as frozen parameters under their on-disk names."""
        self._parameters.clear()
        self._segments = self._is_gathered = self._cache = None
        self._kinds = {local: (tensor.dtype, tensor.shape) for local, tensor in tensors.items()}
        for local, tensor in tensors.items():
            self._parameters[self._attributes[local]] = _frozen(tensor)

    def hold_buffer(self, row: FlatBuffer) -> None:
        """Keeps one arena as the frozen parameter `flat_buffer`."""
        self._parameters.clear()
        self._segments = row.segments
        self._is_gathered = None
        self._cache = None
        self._parameters[_FLAT] = _frozen(row.buffer)

    def hold_shard(
        self, parameter: nn.Parameter, segments: Mapping[str, Segment], is_gathered: Callable[[], bool]
    ) -> None:
        """Keeps a row that others gather and let go of again: a flat parameter of the row's bytes, viewed as
        some dtype.

        Args:
            parameter: Frozen; its `data` is the whole row while it is gathered, and anything else while it is
                not.
            segments: Where each tensor lies in the row.
            is_gathered: Whether it is gathered.
        """
        self._parameters.clear()
        self._segments = segments
        self._is_gathered = is_gathered
        self._cache = None
        self._parameters[_FLAT] = parameter

    def onload(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Lends the module tensors to compute with until `offload`, in this thread alone."""
        self._onloaded = threading.get_ident(), tensors

    def offload(self) -> None:
        """Takes back what `onload` lent."""
        self._onloaded = None

    def onloaded_tensors(self) -> Mapping[str, torch.Tensor]:
        """The module's tensors by local on-disk name, where they can be computed with.

        Raises:
            PlacementError: The module rests elsewhere and was not onloaded.
        """
        loaned = self._onloaded
        if loaned is not None and loaned[0] == threading.get_ident():
            return loaned[1]
        cache = self._cache
        found = None if cache is None else cache.find(self._parameters)
        tensors, is_meta = found or self._find_stored()
        if self.fetch is not None and (self.is_offloaded or is_meta):
            return self.fetch()
        if is_meta:
            raise PlacementError(
                f"{self.name} was used before its weights were loaded.",
                expected="loaded or onloaded weights",
                found="weights on meta",
                fix="load the model with from_pretrained(..., quantization_config=HfqConfig())",
            )
        return tensors

    def _find_stored(self) -> tuple[Mapping[str, torch.Tensor], bool]:
        """The module's tensors where they rest, and whether any is on `meta`.

        They are kept until one is replaced or moves; those of a shard are for this call alone.
        """
        cache = (
            None if self._is_gathered is not None else TensorCache(self._parameters)
        )  # before the tensors: see there
        with torch.inference_mode(False):  # what is kept is used outside of it, too
            tensors = self.stored_tensors()
        if self.storage_kind == "tensors":
            self._check_kinds(tensors)
        self._cache, is_meta = cache, any(tensor.is_meta for tensor in tensors.values())
        return (tensors, is_meta) if cache is None else cache.keep(tensors, is_meta)

    def _check_kinds(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises an error if other code has replaced a stored tensor by one of another dtype or shape.

        accelerate does so where it dispatches a loaded model: `set_module_tensor_to_device` casts each value
        to the dtype of the attribute of that name, which is the dequantized weight (accelerate 1.15).

        Raises:
            PlacementError: A tensor has another dtype or shape than it was loaded with.
        """
        for local, tensor in tensors.items():
            dtype, shape = self._kinds[local]
            if local == "bias":  # of any float dtype
                continue
            if tensor.dtype != dtype or tensor.shape != shape:
                raise PlacementError(
                    f"{self.name}.{local} was replaced after the model was loaded.",
                    tensor=f"{self.name}.{local}",
                    expected=f"{dtype} {list(shape)}",
                    found=f"{tensor.dtype} {list(tensor.shape)}",
                    fix="Load the model again with the device_map that you need. Do not dispatch or offload "
                    "a loaded model with accelerate.",
                )

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """The module's tensors by local on-disk name, where they rest; on meta where that is on disk or in
        the shards of ranks.
        """
        if self._is_gathered is not None and not self._is_gathered():
            return {local: _on_meta(info) for local, info in self.infos.items()}
        if self._is_gathered is not None and self._segments is not None:
            row = self._parameters[_FLAT].data.view(torch.uint8)  # type: ignore[union-attr]
            return FlatBuffer(row, self._segments).tensors()
        if self._segments is not None:
            return FlatBuffer(self._parameters[_FLAT].data, self._segments).tensors()  # type: ignore[union-attr]
        held = {local: self._parameters.get(attribute) for local, attribute in self._attributes.items()}
        return {local: parameter.data for local, parameter in held.items() if parameter is not None}

    @property
    def storage_kind(self) -> str:
        """How its tensors are held: `tensors` one by one, or a `row`, or a row's `shard`."""
        if self._is_gathered is not None:
            return "shard"
        return "flat_buffer" if self._segments is not None else "tensors"

    @property
    def compute_device(self) -> torch.device:
        """Where the module computes, wherever it rests."""
        return self.onload_device or next(
            parameter.device for parameter in self._parameters.values() if parameter is not None
        )

    def dequantize(self) -> torch.Tensor:
        """The weight in the model's dtype, as `weight` gives it; PEFT calls this of a layer that holds HQQ's
        `W_q`.
        """
        return self._dequantized()

    def __getattr__(self, name: str) -> Any:
        """Gives model code a copy of the `weight` or the `bias` that it reads; the stored tensors are among
        the parameters.
        """
        if name == "weight":
            return self._dequantized()
        return self._copied_bias() if name == "bias" else super().__getattr__(name)

    def _copied_bias(self) -> torch.Tensor | None:
        """The bias in the model's dtype, if any: a copy, since transformers' initialisation may write to it
        (SigLIP's does).
        """
        stored = self.stored_tensors().get("bias")
        if stored is None:
            return None
        if self.fetch is not None:
            stored = self.onloaded_tensors()["bias"]
        bias = stored.to(self.dtype, copy=True)
        bias._is_hf_initialized = True  # type: ignore[attr-defined]
        return bias

    def _dequantized(self) -> torch.Tensor:
        """The weight in the model's dtype, as the module that was replaced held it; on meta as long as
        nothing is loaded.
        """
        is_offloaded = any(tensor.is_meta for tensor in self.stored_tensors().values())
        if is_offloaded and self.fetch is None and self._is_gathered is None:
            weight = self._blank_weight()
        else:
            try:
                weight = self.weight_format.dequantize(self.onloaded_tensors(), self.dtype)
            except PlacementError:
                if self._is_gathered is None:
                    raise
                weight = OffloadedParameter(
                    self._blank_weight(), requires_grad=False
                )  # for code that asks for its shape or dtype
        weight = weight.t() if self.is_transposed else weight
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
        return weight

    def _blank_weight(self) -> torch.Tensor:
        return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"format={self.weight_format.describe()}"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves packed tensors and never casts them: `fn` sees bytes, which no cast to a float dtype
        touches.
        """
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.onload_device))
        self.dtype = probe.dtype if probe.is_floating_point() else self.dtype
        if self._is_gathered is not None:
            return self  # where a shard rests is settled by ZeRO
        if self.onload_device is not None:
            check_stays(self.name, self.onload_device, probe.device)
            return self
        for local, parameter in self._parameters.items():
            if parameter is None:
                continue
            flat = parameter.data.reshape(-1).view(torch.uint8)
            moved = fn(flat).view(parameter.dtype).view(parameter.shape)
            self._parameters[local] = _frozen(moved)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Packed tensors stay frozen, whatever is asked of the layer."""
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for local, tensor in self.stored_tensors().items():
            destination[prefix + local] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        prefix: str,
        metadata: dict,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        tensors = self.stored_tensors()
        for local, tensor in tensors.items():
            found = state_dict.get(prefix + local)
            if found is None:
                missing.append(prefix + local)
            elif tensor.is_meta and found.is_meta and self._is_gathered is not None:
                continue  # a checkpoint of DeepSpeed, which holds no packed bytes
            elif tensor.is_meta:
                errors.append(f"{prefix + local}: rests on disk, where nothing is written")
            elif found.shape != tensor.shape or found.dtype != tensor.dtype:
                errors.append(
                    f"{prefix + local}: expected {tensor.dtype} {list(tensor.shape)}, found {found.dtype} "
                    f"{list(found.shape)}; packed tensors are never cast"
                )
            else:
                tensor.copy_(found)
        unexpected += [
            key for key in state_dict if key.startswith(prefix) and key.removeprefix(prefix) not in tensors
        ]


@functools.cache
def _names_of(cls: type) -> frozenset[str]:
    """The names that a class uses itself."""
    return frozenset({*dir(cls), *_RESERVED})


def _attribute(local: str, taken: set[str], reserved: frozenset[str]) -> str:
    """The name of the parameter that holds a tensor: torch allows no dots, and the module's own attributes
    are taken.
    """
    name = local.replace(".", "__")
    while name in taken or name in reserved:
        name = f"stored_{name}"
    return name


def _on_meta(info: TensorInfo) -> torch.Tensor:
    return torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(tensor, requires_grad=False)
    # transformers never initialises a packed tensor
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter
