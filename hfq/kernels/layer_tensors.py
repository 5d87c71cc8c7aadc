"""Tensors of a layer that a module holds from call to call, and a check of their device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hfq.errors import SetupError
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.tensor_spec import TensorInfo

__all__ = ["LayerPlaces", "LayerTensors", "PlacedTensors", "check_on_cpu"]


def check_on_cpu(tensors: Mapping[str, torch.Tensor], values: torch.Tensor | None = None) -> None:
    """Checks that a kernel of the CPU may take the addresses of a layer's tensors.

    Args:
        tensors: Tensors of the layer.
        values: Activations, or their gradient; None if they are checked elsewhere.

    Raises:
        SetupError: A tensor is on another device.
    """
    if values is not None and not values.is_cpu:
        raise _elsewhere("activations", values)
    for name, tensor in tensors.items():
        if not tensor.is_cpu:
            raise _elsewhere(name, tensor)


def _elsewhere(name: str, found: torch.Tensor) -> SetupError:
    return SetupError(
        "A kernel of the CPU received a tensor on another device.",
        tensor=name,
        expected=f"{found.nbytes:,} B in CPU memory",
        found=str(found.device),
        fix="Move the layer and its activations to one device.",
    )


class LayerTensors(dict[str, torch.Tensor]):
    """Tensors of a layer, keyed by name in the checkpoint, whose addresses never change.

    Asking torch for a tensor's address and layout takes longer than multiplying by a small layer. Kernels
    therefore cache the answers here.

    Attributes:
        answers: The cached addresses and layouts, by kernel. Values of the tensors are never cached. Neither
            copied nor pickled.
    """

    __slots__ = ("answers",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.answers: dict[str, object] = {}

    def __reduce__(self) -> tuple:
        return LayerTensors, (dict(self),)


class LayerPlaces:
    """Offsets of a layer's tensors in a buffer, the same for every buffer that holds them.

    Args:
        infos: The stored tensors, by local name.
        places: The offset of each stored tensor in a buffer, a multiple of its element size.

    Attributes:
        infos: As above.
        offsets: The offset of each tensor, by local name.
        kinds: The name, dtype, and shape of each tensor.
        answers: What kernels cache for the layer in any buffer.
    """

    __slots__ = ("answers", "infos", "kinds", "offsets")

    def __init__(self, infos: Mapping[str, TensorInfo], places: Mapping[TensorInfo, int]) -> None:
        self.infos, self.offsets = infos, {local: places[info] for local, info in infos.items()}
        self.kinds = tuple([(local, info.dtype, info.shape) for local, info in infos.items()])
        self.answers: dict[str, object] = {}


class PlacedTensors(Mapping[str, torch.Tensor]):
    """Tensors of a layer in one buffer, keyed by name in the checkpoint.

    Views of the buffer are made when they are used. A kernel that needs addresses alone asks for none.

    Args:
        buffer: uint8 [nbytes] in CPU memory, which contains all tensors.
        places: The offsets of the tensors in the buffer.

    Attributes:
        address: The address of the buffer.
        places: As above.
        answers: As in `LayerTensors`.
    """

    __slots__ = ("_buffer", "_views", "address", "answers", "places")

    def __init__(self, buffer: torch.Tensor, places: LayerPlaces) -> None:
        self._buffer, self.places = buffer, places
        self.address = buffer.data_ptr()
        self._views = dict[str, torch.Tensor]()
        self.answers: dict[str, object] = {}

    def __getitem__(self, local: str) -> torch.Tensor:
        view = self._views.get(local)
        if view is None:
            info = self.places.infos[local]
            first = self.places.offsets[local]
            with torch.inference_mode(False):  # also used outside of inference mode
                part = self._buffer[first : first + info.nbytes]
                view = self._views[local] = part.view(torch_dtype(info.dtype)).view(info.shape)
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(self.places.infos)

    def __len__(self) -> int:
        return len(self.places.infos)

    def __contains__(self, local: object) -> bool:
        return local in self.places.infos
