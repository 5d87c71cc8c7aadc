"""What a dialect is (`Format`) and which dialects there are (the registry)."""

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
"""Every readable dialect family by name; a subclass of `Format` registers itself when its file is
imported.
"""

FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """How a checkpoint wants the activations of a module quantized.

    Attributes:
        strategy: One scale for the whole tensor, one for each token, or one for each `group_size` channels of
            a token.
        scale_name: The tensor that holds the static scale; None where scales are taken from the activation
            itself.
        group_size: Channels that share a scale, for `strategy="group"`.
        dtype: `e4m3` or `int8`, which hfq rounds to; any other text says what it cannot.
        upper_bound: A dynamic scale is computed from amplitudes of at most this (fbgemm's
            `activation_scale_ub`).
        outlier_threshold: LLM.int8(): channels in which an amplitude reaches this are not rounded; 0 rounds
            all. None for other schemes.
    """

    strategy: Literal["tensor", "token", "group"]
    scale_name: str | None = None
    group_size: int | None = None
    upper_bound: float | None = None
    dtype: str = "e4m3"
    outlier_threshold: float | None = None


@dataclass(frozen=True, slots=True)
class FormatVariant:
    """One row of `docs/reference/formats.md`: a dialect that a format reads.

    Attributes:
        name: What its users call it.
        writers: The tools that write it.
        tensors: Its tensors, as they are named on disk.
        cases: The rows of the contract suite that it passes (tests/contract/cases.py).
        goldens: The files of tests/data/goldens that another project's tool wrote; empty for what no tool
            writes on a CPU.
        is_emitted: Whether hfq writes it for others to read (every dialect can be packed, for tests).
    """

    name: str
    writers: str
    tensors: str
    cases: tuple[str, ...]
    goldens: tuple[str, ...] = ()
    is_emitted: bool = False


class Format(ABC):
    """One dialect of packed linear weights, with the parameters of one module.

    Instances are frozen dataclasses: pure functions on the module's tensors under their local on-disk names.
    A format knows no model, no file and no placement.
    """

    name: ClassVar[str]
    variants: ClassVar[tuple[FormatVariant, ...]] = ()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            return  # what several dialects have in common, and no dialect itself
        if cls.name in FORMATS:
            raise TypeError(f"two formats are named {cls.name!r}")
        FORMATS[cls.name] = cls

    @classmethod
    @abstractmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Format | None:
        """Recognises this dialect by the tensors beside a module.

        Args:
            module: The module's full name on disk.
            tensors: Its tensors by local name.
            config: The checkpoint's `quantization_config`, for hints; may be empty.

        Returns:
            The format with its parameters, or None where the tensors are not of this dialect.

        Raises:
            FormatError: The tensors are of this dialect, and the config contradicts them or is out of range.
        """

    def sized(self, in_features: int, out_features: int) -> Format:
        """This format with the size of its layer, for dialects whose tensors do not tell it.

        Raises:
            FormatError: The tensors cannot be those of a layer of this size.
        """
        return self

    @abstractmethod
    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        """What each tensor of a linear layer of this size must be."""

    @abstractmethod
    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        """Writes output rows `[start, start + len(panel))` of the weight into a panel.

        Args:
            panel: float32 [rows, in_features], contiguous, on the tensors' device; wholly overwritten.
            tensors: The module's tensors by local name.
            start: The first output row, a multiple of `row_multiple`.
        """

    def dequantize(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The whole weight [out_features, in_features]: computed in float32, rounded once to `dtype`."""
        out_features, in_features = self.shape(tensors)
        device = next(iter(tensors.values())).device
        panel = torch.empty(out_features, in_features, dtype=torch.float32, device=device)
        self.dequantize_into(panel, tensors, 0)
        return panel.to(dtype)

    @abstractmethod
    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """(out_features, in_features) of the weight that these tensors describe."""

    @abstractmethod
    def describe(self) -> str:
        """The dialect and its parameters in a few words, for people."""

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Packs a float weight [out_features, in_features] by rounding to nearest; the result passes
        `tensor_specs`.

        Raises:
            FormatError: The dialect cannot hold a weight of this shape.
        """

    @property
    @abstractmethod
    def codes_name(self) -> str:
        """The local name of the tensor that holds the codes."""

    @property
    def bits_per_code(self) -> int:
        """The bits that one code takes in the file."""
        return getattr(self, "num_bits", 8)

    @property
    def row_multiple(self) -> int:
        """Panels of output rows start at multiples of this."""
        return 1

    @property
    def activation_scheme(self) -> ActivationScheme | None:
        """How the checkpoint wants activations quantized (a format's `scheme`, where it has one), or None for
        weight-only.
        """
        return getattr(self, "scheme", None)

    def shard(
        self, part: LayerSlice, infos: Mapping[str, TensorInfo], index: Mapping[str, torch.Tensor]
    ) -> tuple[Format, dict[str, Cut | None]]:
        """What one rank of a tensor parallel run holds of a layer.

        A slice along the input is added to those of the other ranks, so that only the one that starts at 0
        holds a bias.

        Args:
            part: The rank's slice of the layer.
            infos: The layer's stored tensors, by local name.
            index: The values of those of them whose role is `index`, whole; needed for `part.axis == "in"`
                alone.

        Returns:
            The format of the slice, and what it holds of each tensor; None for all of it. A tensor that is
            not named it goes without.

        Raises:
            FormatError: The dialect cannot be cut, or not there.
        """
        raise FormatError(
            f"hfq does not cut {self.describe()} layers for tensor parallelism. Nothing was loaded.",
            found=f"{part}",
            expected="a dialect whose layers can be cut (docs/how_to/use_tensor_parallelism.md)",
            fix="use device_map in place of tp_plan",
        )

    def reorder(
        self, tensors: Mapping[str, torch.Tensor], order: torch.Tensor
    ) -> tuple[Format, dict[str, torch.Tensor]]:
        """The layer with its output rows in another order; every weight stays the same bit for bit.

        Args:
            tensors: The module's tensors by local name.
            order: int64 [out_features], a permutation: row `i` of the result is row `order[i]` of the layer.

        Returns:
            The format of the result, and its tensors. What does not change is the tensor that was given.

        Raises:
            FormatError: The dialect cannot be reordered without other codes.
        """
        raise FormatError(
            f"hfq does not reorder the rows of {self.describe()} layers. Nothing was loaded.",
            found=self.describe(),
            expected="a dialect whose rows can be reordered (docs/how_to/use_ibm_fms.md)",
            fix="load the checkpoint with transformers",
        )

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Format:
        """Checks the values of the module's small tensors (all but its codes), and settles what only values
        can tell.

        Raises:
            FormatError: A scale is not finite, or an index is out of range.
        """
        return self


def bounded_int(
    config: Mapping,
    key: str,
    allowed: Callable[[int], bool],
    what: str,
    module: str,
    default: int | None = None,
) -> int | None:
    """`config[key]` as an int for which `allowed` holds; None or absent gives `default`.

    Raises:
        FormatError: The value is of another type or out of range.
    """
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not int or not allowed(value):
        raise FormatError(
            f"quantization_config says {key}={value!r} for {module or 'the model'}. Nothing was loaded.",
            file="config.json",
            expected=what,
            found=repr(value),
            fix=f"correct {key} in config.json",
        )
    return value
