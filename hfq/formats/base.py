"""Base class of all formats, and the registry of formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from hfq.errors import FormatError
from hfq.tensor_spec import Cut, LayerSlice, TensorInfo, TensorSpec

__all__ = ["ActivationScheme", "FormatVariant", "FORMATS", "FLOATS", "Format", "bounded_int"]

FORMATS: dict[str, type[Format]] = {}
"""Every readable format family by name. The definition of a `Format` subclass adds it."""

FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """Quantization of the activations of a module, as the checkpoint requests it.

    Attributes:
        strategy: One scale for the whole tensor, one for each token, or one for each `group_size` channels of
            a token.
        scale_name: The tensor that holds the static scale; None if the scale is computed from the activation.
        group_size: Channels that share a scale, for `strategy="group"`; None otherwise.
        dtype: `e4m3` or `int8`, which hfq can round to. Any other text describes an unsupported type.
        upper_bound: The largest amplitude that a dynamic scale is computed from (fbgemm's
            `activation_scale_ub`); None for no limit.
        outlier_threshold: LLM.int8(): channels with an amplitude of at least this value are not rounded; 0
            rounds all channels. None for other schemes.
    """

    strategy: Literal["tensor", "token", "group"]
    scale_name: str | None = None
    group_size: int | None = None
    upper_bound: float | None = None
    dtype: str = "e4m3"
    outlier_threshold: float | None = None


@dataclass(frozen=True, slots=True)
class FormatVariant:
    """A format variant: one row of `docs/reference/formats.md`.

    Attributes:
        name: The name that users know.
        writers: The tools that write the variant.
        tensors: The names of its tensors on disk.
        cases: The cases of the contract tests that it passes (tests/contract/cases.py).
        goldens: The files of tests/data/goldens that another project's tool wrote; empty if no tool writes
            the variant on a CPU.
        is_emitted: True if hfq writes the variant for other tools to read. (Tests can write every variant.)
    """

    name: str
    writers: str
    tensors: str
    cases: tuple[str, ...]
    goldens: tuple[str, ...] = ()
    is_emitted: bool = False


class Format(ABC):
    """A format of quantized linear weights, with the parameters of one module.

    Instances are frozen dataclasses. Their methods are pure functions of the module's tensors, named by their
    local names on disk. A format knows no model, no file, and no placement.
    """

    name: ClassVar[str]
    variants: ClassVar[tuple[FormatVariant, ...]] = ()
    resolves_each_value: ClassVar[bool] = False
    """True if `resolve` checks each value by itself, so that it takes a stack of layers as well."""
    has_fixed_size: ClassVar[bool] = True
    """True if the size of a layer alone decides the shapes of its tensors, and not the weights."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            return  # a shared base class, and no format itself
        if cls.name in FORMATS:
            raise TypeError(f"two formats are named {cls.name!r}")
        FORMATS[cls.name] = cls

    @classmethod
    @abstractmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Format | None:
        """Recognizes this format by the tensors of a module.

        Args:
            module: The full name of the module on disk.
            tensors: The tensors of the module by local name.
            config: The checkpoint's `quantization_config`, for hints; may be empty.

        Returns:
            The format with its parameters, or None if the tensors are not in this format.

        Raises:
            FormatError: The tensors are in this format, but the config contradicts them or is out of range.
        """

    def sized(self, in_features: int, out_features: int) -> Format:
        """Returns this format with the layer's size, for formats whose tensors do not store it.

        Raises:
            FormatError: The tensors cannot belong to a layer of this size.
        """
        return self

    @abstractmethod
    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        """Returns the requirements on each tensor of a linear layer of this size."""

    @abstractmethod
    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        """Writes output rows `[start, start + len(panel))` of the weight into a panel.

        Args:
            panel: float32 [rows, in_features], contiguous, on the tensors' device; completely overwritten.
            tensors: The module's tensors by local name.
            start: The first output row, a multiple of `row_multiple`.
        """

    def dequantize(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Returns the whole weight [out_features, in_features].

        The weight is computed in float32 and rounded once to `dtype`.
        """
        out_features, in_features = self.shape(tensors)
        device = next(iter(tensors.values())).device
        panel = torch.empty(out_features, in_features, dtype=torch.float32, device=device)
        self.dequantize_into(panel, tensors, 0)
        return panel.to(dtype)

    @abstractmethod
    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """Returns (out_features, in_features) of the weight that these tensors describe."""

    @abstractmethod
    def describe(self) -> str:
        """Returns a short description of the format and its parameters."""

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantizes a float weight [out_features, in_features] by rounding to nearest.

        The result meets `tensor_specs`.

        Raises:
            FormatError: The format cannot hold a weight of this shape.
        """

    @property
    @abstractmethod
    def codes_name(self) -> str:
        """The local name of the tensor that holds the codes."""

    @property
    def bits_per_code(self) -> float:
        """The number of bits of one code in the file, with those of scales in the same tensor.

        It is 0 if it depends on the weights.
        """
        return getattr(self, "num_bits", 8)

    @property
    def row_multiple(self) -> int:
        """The number of rows that the first row of every panel is a multiple of."""
        return 1

    @property
    def activation_scheme(self) -> ActivationScheme | None:
        """The activation quantization that the checkpoint requests, or None for weight-only formats.

        The value is the attribute `scheme` of formats that have one.
        """
        return getattr(self, "scheme", None)

    def shard(
        self, part: LayerSlice, infos: Mapping[str, TensorInfo], index: Mapping[str, torch.Tensor]
    ) -> tuple[Format, dict[str, Cut | None]]:
        """Returns the part of a layer that one rank of a tensor-parallel run holds.

        Ranks add the results of slices along the input. So only the slice that starts at 0 holds a bias.

        Args:
            part: The rank's slice of the layer.
            infos: The layer's stored tensors, by local name.
            index: The complete values of the tensors whose role is `index`; needed only for `part.axis ==
                "in"`.

        Returns:
            The format of the slice, and the cut of each tensor that the rank holds; None for the whole
            tensor. The slice omits tensors that have no entry.

        Raises:
            FormatError: The format cannot be cut, or not at this position.
        """
        raise FormatError(
            f"hfq does not support tensor parallelism for {self.describe()} layers. Nothing was loaded.",
            found=f"{part}",
            expected="a format that supports tensor parallelism (docs/how_to/use_tensor_parallelism.md)",
            fix="Use device_map instead of tp_plan.",
        )

    def reorder(
        self, tensors: Mapping[str, torch.Tensor], order: torch.Tensor
    ) -> tuple[Format, dict[str, torch.Tensor]]:
        """Returns the layer with its output rows in another order, with every weight bit-identical.

        Args:
            tensors: The module's tensors by local name.
            order: int64 [out_features], a permutation: row `i` of the result is row `order[i]` of the layer.

        Returns:
            The format of the result, and its tensors. Unchanged tensors are the given objects.

        Raises:
            FormatError: The format cannot be reordered without changing codes.
        """
        raise FormatError(
            f"hfq does not support reordering the rows of {self.describe()} layers. Nothing was loaded.",
            found=self.describe(),
            expected="a format whose rows can be reordered (docs/how_to/use_ibm_fms.md)",
            fix="Load the checkpoint with transformers.",
        )

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Format:
        """Checks the values of all tensors except the codes.

        Returns the format with the parameters that depend on these values.

        Raises:
            FormatError: A scale is not finite, or an index is out of range.
        """
        return self

    def resolve_stack(self, tensors: Mapping[str, torch.Tensor]) -> Format | None:
        """Checks the values of several layers with equal tensor specs at once.

        Args:
            tensors: The tensors of all layers except the codes, stacked along a new first dimension.

        Returns:
            What `resolve` returns for each layer. None if that may differ between the layers, or be a warning
            or an error: then the caller resolves each layer by itself.
        """
        if not self.resolves_each_value:
            return None
        try:
            return self.resolve("", tensors)
        except FormatError:
            return None


def bounded_int(
    config: Mapping,
    key: str,
    allowed: Callable[[int], bool],
    what: str,
    module: str,
    default: int | None = None,
) -> int | None:
    """Returns `config[key]` as an int for which `allowed` holds.

    Returns `default` if the value is None or absent.

    Raises:
        FormatError: The value has another type or is out of range.
    """
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not int or not allowed(value):
        raise FormatError(
            f"{key}={value!r} in config.json is not valid for {module or 'the model'}. Nothing was loaded.",
            file="config.json",
            expected=what,
            found=repr(value),
            fix=f"Set {key} in config.json to a valid value ({what}).",
        )
    return value
