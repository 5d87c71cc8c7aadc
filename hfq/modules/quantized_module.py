"""Base of all quantized modules, which hold stored tensors and no float weight."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling

from hfq.errors import PlacementError, SetupError
from hfq.formats import Format
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.modules.attribute_names import attribute_names
from hfq.modules.changes import note_change
from hfq.modules.flat_buffer import FlatBuffer
from hfq.modules.graph_capture import check_not_captured, is_captured
from hfq.modules.graph_ops import OPS
from hfq.modules.lazy_module import LazyModule
from hfq.modules.offloaded_parameter import OffloadedParameter, check_stays
from hfq.modules.stored_parameters import StoredParameter, StoredParameters, no_parameter
from hfq.modules.tensor_cache import TensorCache
from hfq.tensor_spec import Segment, TensorInfo

if TYPE_CHECKING:
    from typing import Self

    from hfq.modules.cpu_execution import CpuExecution

__all__ = ["QuantizedModule"]

_FLAT = "flat_buffer"
_DECISIVE = frozenset(
    {
        "accelerated",
        "fetch",
        "forward",
        "is_offloaded",
        "kernel",
        "on_cpu",
        "onload_device",
        "scheme",
        "weight_format",
    }
)
"""Attributes that decide how a layer computes, see `changes`."""
_DESCRIBED = frozenset({"accelerated", "kernel", "scheme", "weight_format"})
"""Those that `QuantizedModule.layout` tells."""


class QuantizedModule(LazyModule):
    """Holds the tensors of one quantized module.

    The tensors are held in one of three ways. `hold` keeps frozen parameters under their checkpoint names; a
    dot becomes `__`, and a taken name gets the prefix `stored_`. `hold_buffer` keeps one flat frozen uint8
    parameter `flat_buffer`. `hold_shard` keeps that parameter cut into shards by ZeRO-3. `state_dict` always
    uses checkpoint names. A new module holds nothing, and reports its tensors on `meta`. So does one whose
    weights are on disk: `onload` provides the tensors for one forward pass, and `offload` removes them. A
    cast of the module (`half()`, `to(dtype)`) never changes a stored tensor. Model code that reads `weight`
    receives a new dequantized copy each time.

    Args:
        name: The module's name in the model, for messages.
        in_features: Number of input channels.
        out_features: Number of output rows.
        weight_format: The format of its tensors.
        infos: The stored tensors, by checkpoint name; kept as they are.

    Attributes:
        fetch: Returns the tensors for one forward pass; None if they are stored or onloaded.
        is_offloaded: True if the tensors are fetched for every forward pass.
        onload_device: Device to which the offloader onloads the module; None if it computes where it is
            stored.
        on_cpu: Chooses between the CPU and an accelerator for each call; None if there is no choice.
        dtype: The model's dtype.
        is_transposed: True if the replaced module's weight is [in, out].
        layout: The text of the layer's layout, for graphs; None before the module holds tensors.
    """

    name: str
    in_features: int
    out_features: int
    weight_format: Format
    infos: dict[str, TensorInfo]
    fetch: Callable[[], Mapping[str, torch.Tensor]] | None = None
    is_offloaded = False
    onload_device: torch.device | None = None
    on_cpu: CpuExecution | None = None
    dtype = torch.float32
    is_transposed = False
    layout: str | None = None
    _attributes: Mapping[str, str]
    _kinds: Mapping[str, tuple[torch.dtype, torch.Size]] | None = None
    _segments: Mapping[str, Segment] | None = None
    _is_gathered: Callable[[], bool] | None = None
    _onloaded: tuple[int, Mapping[str, torch.Tensor]] | None = None
    _cache: TensorCache | None = None

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        weight_format: Format,
        infos: dict[str, TensorInfo],
    ) -> None:
        super().__init__()
        own = vars(self)  # torch's assignment is slow, and an update at once makes a larger dict
        own["_parameters"] = StoredParameters(name)
        own["name"] = name
        own["in_features"] = in_features
        own["out_features"] = out_features
        own["weight_format"] = weight_format
        own["infos"] = infos
        own["_attributes"] = attribute_names(self)
        # Python shares the keys of such dicts only if every object gets them at its start
        own["_kinds"] = own["_cache"] = own["fetch"] = own["onload_device"] = own["_onloaded"] = None
        own["layout"] = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _DECISIVE:
            note_change()
            if name in _DESCRIBED and self.layout is not None:
                self._describe()

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        note_change()
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        note_change()
        return super().register_forward_pre_hook(*args, **kwargs)

    def hold(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keeps these tensors, without a copy, as frozen parameters under their checkpoint names."""
        kinds = tuple([(local, tensor.dtype, tensor.shape) for local, tensor in tensors.items()])
        self._hold({self._attributes[local]: StoredParameter(tensor) for local, tensor in tensors.items()})
        vars(self)["_kinds"] = _kinds(kinds)
        self._describe()

    def hold_buffer(self, row: FlatBuffer) -> None:
        """Keeps one flat buffer as the frozen parameter `flat_buffer`."""
        self._hold({_FLAT: StoredParameter(row.buffer)}, row.segments)
        self._describe()

    def hold_shard(
        self, parameter: nn.Parameter, segments: Mapping[str, Segment], is_gathered: Callable[[], bool]
    ) -> None:
        """Keeps a flat parameter that DeepSpeed gathers and partitions, viewed as some dtype.

        Args:
            parameter: Frozen. Its `data` is the whole flat buffer while it is gathered, and undefined
                otherwise.
            segments: Segments of the tensors in the flat buffer.
            is_gathered: Returns True while it is gathered.
        """
        self._hold({_FLAT: parameter}, segments, is_gathered)

    def _hold(
        self,
        parameters: Mapping[str, nn.Parameter],
        segments: Mapping[str, Segment] | None = None,
        is_gathered: Callable[[], bool] | None = None,
    ) -> None:
        self._parameters.clear()
        self._parameters.update(parameters)
        for name, value in (("_segments", segments), ("_is_gathered", is_gathered), ("_cache", None)):
            if value is not getattr(self, name):
                vars(self)[name] = value

    def _describe(self) -> None:
        """Sets `layout`."""

    def _held_names(self) -> tuple[tuple[str, ...], tuple[Segment, ...] | None]:
        """Returns the checkpoint's names of the held tensors, and their segments in a flat buffer."""
        if self._segments is None:
            return tuple(self._kinds or ()), None
        return tuple(self._segments), tuple(self._segments.values())

    def graph_inputs(self) -> list[torch.Tensor]:
        """Returns the parameters that a graph takes as inputs, in the order of `layout`."""
        return list(self._parameters.values())  # type: ignore[arg-type]

    def fits_graph(self) -> bool:
        """Returns True if a graph of torch can hold the module.

        Its tensors must be in memory, on one device and for good.
        """
        return (
            self.layout is not None
            and self.fetch is None
            and self.on_cpu is None
            and self._onloaded is None
            and self._is_gathered is None
            and all(each is not None and not each.is_meta for each in self._parameters.values())
        )

    def onload_to(self, device: torch.device) -> None:
        """Sets the device to which the module is onloaded; parameters on meta report it."""
        is_empty = self._is_empty()
        for local, attribute in self._attributes.items():
            parameter = self._parameters.get(attribute)
            if type(parameter) is OffloadedParameter:  # asking it for anything of torch is slow
                parameter.onload_device = device
            elif is_empty or (parameter is not None and parameter.is_meta):
                offloaded = OffloadedParameter(_on_meta(self.infos[local]), requires_grad=False)
                offloaded.name, offloaded.onload_device = f"{self.name}.{local}", device
                self._parameters[attribute] = offloaded
        self.onload_device = device

    def onload(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Provides the tensors to compute with, in this thread only, until `offload`."""
        self._onloaded = threading.get_ident(), tensors

    def offload(self) -> None:
        """Removes the tensors that `onload` provided."""
        self._onloaded = None

    def onloaded_tensors(self) -> Mapping[str, torch.Tensor]:
        """Returns the tensors on the execution device, keyed by checkpoint name.

        Raises:
            PlacementError: The module is offloaded and was not onloaded.
            SetupError: torch records a graph, which would keep addresses or tensors of the offload buffer.
        """
        if is_captured():
            check_not_captured(self.name)
        loaned = self._onloaded
        if loaned is not None and loaned[0] == threading.get_ident():
            return loaned[1]
        if self.fetch is not None and (self.is_offloaded or self.onload_device is not None):
            return self.fetch()
        cache = self._cache
        found = None if cache is None else cache.find(self._parameters)
        tensors, is_meta = found or self._find_stored()
        if is_meta and self.fetch is not None:
            return self.fetch()
        if is_meta:
            raise PlacementError(
                f"{self.name} was used before its weights were loaded.",
                expected="loaded or onloaded weights",
                found="weights on meta",
                fix="Load the model with from_pretrained(..., quantization_config=HfqConfig()).",
            )
        return tensors

    def _find_stored(self) -> tuple[Mapping[str, torch.Tensor], bool]:
        """Returns the tensors on the device that stores them, and True if any is on `meta`.

        They are cached until one is replaced or moves. Those of a shard are not cached.
        """
        cache = (
            None if self._is_gathered is not None else TensorCache(self._parameters)
        )  # before the tensors: see `TensorCache`
        with torch.inference_mode(False):  # cached tensors are also used outside of inference mode
            tensors = self.stored_tensors()
        if self.storage_kind == "tensors":
            self._check_kinds(tensors)
        self._cache, is_meta = cache, any(tensor.is_meta for tensor in tensors.values())
        return (tensors, is_meta) if cache is None else cache.keep(tensors, is_meta)

    def _check_kinds(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises an error if other code replaced a stored tensor by one of another dtype or shape.

        accelerate does so when it dispatches a loaded model: `set_module_tensor_to_device` casts each value
        to the
        dtype of the attribute of that name, which is the dequantized weight (accelerate 1.15).

        Raises:
            PlacementError: A tensor has another dtype or shape than it was loaded with.
            SetupError: A tensor is in shards.
        """
        kinds = self._kinds or {}
        for local, tensor in tensors.items() if kinds else ():
            dtype, shape = kinds[local]
            if hasattr(tensor, "device_mesh"):  # a DTensor
                raise SetupError(
                    f"{self.name} was sharded by another library, such as FSDP2's fully_shard.",
                    tensor=f"{self.name}.{local}",
                    expected="a tensor of one process",
                    found="a DTensor",
                    fix='Load the model with HfqConfig(cpu_memory="private"), or use DeepSpeed ZeRO-3.',
                )
            if local == "bias":  # any float dtype is fine
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
        """Returns the stored tensors, keyed by checkpoint name.

        They are on meta if they are on disk, or in shards of several ranks.
        """
        if self._is_gathered is not None and not self._is_gathered():
            return {local: _on_meta(info) for local, info in self.infos.items()}
        if self._is_gathered is not None and self._segments is not None:
            row = self._parameters[_FLAT].data.view(torch.uint8)  # type: ignore[union-attr]
            return FlatBuffer(row, self._segments).tensors()
        if self._segments is not None:
            row = self._parameters.get(_FLAT)  # hidden while accelerate dispatches the model
            return {} if row is None else FlatBuffer(row.data, self._segments).tensors()
        if self._is_empty():
            return {local: _on_meta(info) for local, info in self.infos.items()}
        held = {local: self._parameters.get(attribute) for local, attribute in self._attributes.items()}
        return {local: parameter.data for local, parameter in held.items() if parameter is not None}

    def _is_empty(self) -> bool:
        """Returns True if the module has held nothing so far."""
        return not self._parameters and self._kinds is None and self._segments is None

    @property
    def storage_kind(self) -> str:
        """Form in which the tensors are held: `tensors`, `flat_buffer`, or `shard`."""
        if self._is_gathered is not None:
            return "shard"
        return "flat_buffer" if self._segments is not None else "tensors"

    @property
    def compute_device(self) -> torch.device:
        """Execution device of the module."""
        held = (parameter.device for parameter in self._parameters.values() if parameter is not None)
        return self.onload_device or next(held, torch.device("meta"))

    def dequantize(self) -> torch.Tensor:
        """Returns the weight in the model's dtype, as `weight` does.

        PEFT calls this method of a layer that has HQQ's `W_q`.
        """
        return self._dequantized()

    def __getattr__(self, name: str) -> Any:
        """Returns a copy of `weight` or `bias` for model code.

        Other names are looked up in torch's way.
        """
        if name == "weight":
            return self._dequantized()
        return self._copied_bias() if name == "bias" else super().__getattr__(name)

    def _copied_bias(self) -> torch.Tensor | None:
        """Returns the bias in the model's dtype, or None.

        It is a copy, since transformers' initialization may write to it (SigLIP's does).
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
        """Returns the weight in the model's dtype and the shape of the replaced module's weight.

        It is on meta as long as nothing is loaded.
        """
        is_offloaded = any(tensor.is_meta for tensor in self.stored_tensors().values())
        if is_offloaded and self.fetch is None and self._is_gathered is None:
            weight = self._blank_weight()
        else:
            try:
                weight = self._whole_weight()
            except PlacementError:
                if self._is_gathered is None:
                    raise
                weight = OffloadedParameter(
                    self._blank_weight(), requires_grad=False
                )  # for code that reads its shape or dtype
        weight = weight.t() if self.is_transposed else weight
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
        return weight

    def _whole_weight(self) -> torch.Tensor:
        if is_compiling() and self.fits_graph():
            return OPS.dequantize(self.graph_inputs(), self.layout, self.dtype)
        return self.weight_format.dequantize(self.onloaded_tensors(), self.dtype)

    def _blank_weight(self) -> torch.Tensor:
        return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"format={self.weight_format.describe()}"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves the stored tensors and never casts them.

        `fn` receives bytes, which a cast to a float dtype leaves unchanged.
        """
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.onload_device))
        self.dtype = probe.dtype if probe.is_floating_point() else self.dtype
        if self._is_gathered is not None:
            return self  # ZeRO decides where a shard is stored
        if self.onload_device is not None:
            check_stays(self.name, self.onload_device, probe.device)
            return self
        for local, parameter in self._parameters.items():
            if parameter is None:
                continue
            flat = parameter.data.reshape(-1).view(torch.uint8)
            moved = fn(flat).view(parameter.dtype).view(parameter.shape)
            self._parameters[local] = StoredParameter(moved)
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Replaces a stored tensor; a quantized module takes no other parameters.

        Raises:
            SetupError: The module stores no tensor of this name.
        """
        if name not in self._attributes.values() and name != _FLAT:
            raise no_parameter(self.name, name)
        super().register_parameter(name, param)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Leaves the stored tensors frozen, regardless of the argument."""
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
                continue  # a DeepSpeed checkpoint, which holds no quantized bytes
            elif tensor.is_meta:
                errors.append(f"{prefix + local}: is on disk, where nothing is written")
            elif found.shape != tensor.shape or found.dtype != tensor.dtype:
                errors.append(
                    f"{prefix + local}: expected {tensor.dtype} {list(tensor.shape)}, found {found.dtype} "
                    f"{list(found.shape)}; quantized tensors are never cast"
                )
            else:
                tensor.copy_(found)
        unexpected += [
            key for key in state_dict if key.startswith(prefix) and key.removeprefix(prefix) not in tensors
        ]


def _on_meta(info: TensorInfo) -> torch.Tensor:
    return _meta(info.dtype, info.shape)


@functools.lru_cache(maxsize=1024)
def _meta(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=torch_dtype(dtype), device="meta")


@functools.lru_cache(maxsize=1024)
def _kinds(
    kinds: tuple[tuple[str, torch.dtype, torch.Size], ...],
) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Returns dtype and shape by checkpoint name; modules with equal tensors share one object."""
    return {local: (dtype, shape) for local, dtype, shape in kinds}
