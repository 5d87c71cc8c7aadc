"""Recipes: how a float model is to be quantized, and what the dialect that it is written in says of it in config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hfq.errors import FormatError, SetupError, nearest
from hfq.formats.awq import Awq
from hfq.formats.base import ActivationScheme, Format
from hfq.formats.configs.gptq_config import BITS
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.recipes.scheme import group_config
from hfq.recipes.schemes import OUTPUTS, Output

__all__ = ["METHODS", "RECIPE_OPTIONS", "Recipe"]

METHODS = {
    "gptq": "GPTQ: codes chosen by the activations' second moments, written as GPTQ",
    "awq": "AWQ: input channels scaled by the activations' magnitudes before rounding, written as AWQ gemm",
    "rtn": "round to nearest, written as GPTQ",
    "fp8": "FP8 e4m3 by blocks of 128 x 128 (transformers' fp8) or, where those do not tile, by channel (compressed-tensors)",
    **{name: output.description for name, output in OUTPUTS.items()},
}
"""What `Recipe.method` may be."""

_BLOCK = 128
_OPTIONS = {
    "awq": ("num_bits", "group_size", "symmetric", "clip_search", "recovery"),
    "rtn": ("num_bits", "group_size", "symmetric", "recovery"),
    "fp8": (),
    **{name: output.options for name, output in OUTPUTS.items()},
}
"""The options that methods other than GPTQ take."""

_RECOVERABLE = ("gptq", "awq", "rtn")


@dataclass(frozen=True)
class Recipe:
    """How the linear layers of a float model are quantized.

    Attributes:
        method: One of `METHODS`.
        num_bits: 2, 3, 4 or 8; of integer codes.
        group_size: Input channels that share a scale; -1 for all.
        symmetric: Whether the zero point is the middle of the codes; written as GPTQ v1, else as v2. None for yes, but for AWQ, which
            stores zero points.
        act_order: GPTQ quantizes channels by decreasing activation, and groups follow that order (`desc_act`).
        static_groups: With `act_order`: groups stay those of neighbouring channels, with scales from the float weight.
        group_order: Without `act_order`: groups are quantized by decreasing activation, and so are the channels of each; the file
            is as without. gptqmodel's `act_group_aware`.
        damping: What is added to the Hessian's diagonal, as a share of its mean; grows where a factorization fails.
        clip_search: Whether GPTQ and AWQ narrow each range where that lowers the weighted squared error; None for AWQ, and for 2 and
            3 bits of GPTQ alone, where it helps most.
        recovery: Steps of block-wise distillation against the float model after each block of integer codes; 0 for none.

    Raises:
        SetupError: A value is unusable, or values contradict each other.
    """

    method: str = "gptq"
    num_bits: int = 4
    group_size: int = 128
    symmetric: bool | None = None
    act_order: bool = False
    static_groups: bool = False
    group_order: bool = True
    damping: float = 0.05
    clip_search: bool | None = None
    recovery: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise _unusable("method", self.method, " or ".join(METHODS), nearest(str(self.method), METHODS))
        bits = self.output.bits if self.output is not None and self.output.has_bits else BITS
        if type(self.num_bits) is not int or self.num_bits not in bits:
            raise _unusable("num_bits", self.num_bits, " or ".join(map(str, bits)))
        if type(self.group_size) is not int or not (self.group_size == -1 or 8 <= self.group_size < 1 << 24):
            raise _unusable("group_size", self.group_size, "-1, or at least 8 channels")
        if isinstance(self.damping, bool) or not isinstance(self.damping, (int, float)) or not 0 < self.damping < 1:
            raise _unusable("damping", self.damping, "a number between 0 and 1")
        if type(self.recovery) is not int or self.recovery < 0:
            raise _unusable("recovery", self.recovery, "a number of steps, 0 or more")
        if self.recovery and self.method not in _RECOVERABLE:
            raise _unusable("recovery", self.recovery, f"0 with method={self.method!r}: it trains the scales of integer codes")
        if self.symmetric is None:
            object.__setattr__(self, "symmetric", self.method != "awq")
        for option in fields(self):
            is_given = option.name == "symmetric" or (option.name == "clip_search" and self.clip_search is not None)
            is_choice = is_given or isinstance(option.default, bool)
            if is_choice and not isinstance(getattr(self, option.name), bool):
                raise _unusable(option.name, getattr(self, option.name), "True or False")
        if self.static_groups and not self.act_order:
            raise _unusable("static_groups", True, "act_order=True beside it: groups are static without act_order")
        if self.method == "awq" and (self.symmetric or self.act_order):
            wrong = "symmetric" if self.symmetric else "act_order"
            raise _unusable(wrong, True, "False with method='awq': its files store zero points, and groups of neighbours")

    @property
    def output(self) -> Output | None:
        """What the method writes, for those that have a file in `hfq.recipes.schemes`."""
        return OUTPUTS.get(self.method)

    @property
    def width(self) -> int:
        """The bits of a code where `output` says them."""
        return self.num_bits if self.output is None or self.output.has_bits else self.output.bits[0]

    @property
    def narrows(self) -> bool:
        """Whether ranges are narrowed."""
        return (self.method == "awq" or self.num_bits < 4) if self.clip_search is None else self.clip_search

    @property
    def measures(self) -> bool:
        """Whether the method chooses codes by activations."""
        return self.method in ("gptq", "awq")

    @property
    def needs_calibration(self) -> bool:
        """Whether the method, or recovery, looks at activations."""
        return self.measures or self.recovery > 0

    @property
    def moves_floats(self) -> bool:
        """Whether a block's float weights change before they are rounded, or with what is trained, and lie in float32 for that."""
        return self.method == "awq" or self.recovery > 0

    def weight_format(self, sizes: Iterable[tuple[int, int]]) -> Format:
        """The dialect that layers of these sizes (out, in) are written in: one for all of them."""
        if self.output is not None:
            return self.output.make(self.width)
        if self.method == "awq":
            return Awq(group_size=self.group_size, num_bits=self.num_bits)
        if self.method != "fp8":
            reading = "field_plus_one" if self.symmetric else "stored"
            return Gptq(self.num_bits, self.group_size, self.symmetric, reading, g_idx_length=2)  # type: ignore[arg-type]
        if all(size % _BLOCK == 0 for pair in sizes for size in pair):
            return Fp8(strategy="block", block_structure=(_BLOCK, _BLOCK), scale_name="weight_scale_inv")
        return Fp8(strategy="channel", scale_dtype="BF16", scheme=ActivationScheme("token"))

    def quantization_config(self, weight_format: Format, dense: Iterable[str], version: str) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint written by this recipe.

        Args:
            weight_format: As `weight_format` gave it.
            dense: The names of linear layers that stay floats.
            version: hfq's version, which a GPTQ config names as its writer.
        """
        dense = sorted(dense)
        if self.output is not None:
            return self.output.quantization_config(self.width, dense)
        if isinstance(weight_format, Gptq):
            return self._gptq_config(dense, version)
        if isinstance(weight_format, Awq):
            config = {
                "quant_method": "awq", "bits": self.num_bits, "group_size": self.group_size, "zero_point": True, "version": "gemm",
                "modules_to_not_convert": dense or None, "meta": {"quantizer": [f"hfq:{version}"]},
            }  # fmt: skip
            return config | _dynamic(dense)
        if isinstance(weight_format, Fp8) and weight_format.strategy == "block":
            return {
                "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK],
                "modules_to_not_convert": dense,
            }  # fmt: skip
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        activations = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
        return group_config({"weights": weights, "input_activations": activations, "format": "float-quantized"}, dense)

    def check_size(self, name: str, out_features: int, in_features: int) -> None:
        """Refuses a layer that the dialect cannot hold.

        Raises:
            FormatError: Names the layer and what must divide it.
        """
        span = 1
        if self.output is not None:
            multiple = self.output.multiple
        elif self.method == "fp8":
            multiple = (1, 1)
        else:
            multiple, span = (32, 32), self.group_size if self.group_size != -1 else 1
        if out_features % multiple[0] or in_features % multiple[1] or in_features % span:
            raise FormatError(
                f"method={self.method!r} cannot hold a layer of this size; nothing was done.", tensor=name,
                expected=f"an output divisible by {multiple[0]} and an input by {multiple[1]}"
                + (f" and the group size {span}" if span > 1 else ""), found=f"[{out_features}, {in_features}]",
                fix="choose another group size or method, or leave this layer dense with modules_to_not_convert",
            )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """All options by name."""
        return asdict(self)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Recipe:
        """The recipe of the options that are given, that is, not None.

        Raises:
            SetupError: An option means nothing to the method, or as of the class.
        """
        given = {name: options[name] for name in RECIPE_OPTIONS if options.get(name) is not None}
        recipe = cls(**given)
        taken = _OPTIONS.get(recipe.method, RECIPE_OPTIONS)
        for name in given.keys() - {"method", *taken}:
            raise SetupError(
                f"method={recipe.method!r} has no {name}; nothing was done.", expected=", ".join(taken) or "no further options",
                found=f"{name}={given[name]!r}", fix=f"leave {name} out, or choose another method",
            )  # fmt: skip
        return recipe

    def chosen(self) -> dict[str, Any]:
        """The method, and those of its options that mean something to it."""
        taken = _OPTIONS.get(self.method, RECIPE_OPTIONS)
        return {name: value for name, value in self.to_dict().items() if name == "method" or name in taken}

    def _gptq_config(self, dense: list[str], version: str) -> dict[str, Any]:
        label = "gptq" if self.symmetric else "gptq_v2"
        config = {
            "quant_method": "gptq", "bits": self.num_bits, "group_size": self.group_size, "sym": self.symmetric,
            "desc_act": self.act_order and not self.static_groups, "checkpoint_format": label, "format": label,
            "lm_head": False, "pack_dtype": "int32",
            "meta": {"quantizer": [f"hfq:{version}"], "damp_percent": self.damping, "static_groups": self.static_groups},
        }  # fmt: skip
        return config | _dynamic(dense)


RECIPE_OPTIONS = tuple(option.name for option in fields(Recipe))
"""The names of a recipe's options, which are options of `HfqConfig` too."""


def _dynamic(dense: list[str]) -> dict[str, Any]:
    """gptqmodel's rules for layers of blocks that stay floats; the head it knows."""
    inside = [name for name in dense if name != "lm_head" and not name.endswith(".lm_head")]
    return {"dynamic": {f"-:^{re.escape(name)}$": {} for name in inside}} if inside else {}


def _unusable(option: str, found: object, expected: str, hint: str = "") -> SetupError:
    return SetupError(
        f"A model cannot be quantized with {option}={found!r}{hint}.", expected=expected, found=repr(found),
        fix=f"correct {option}",
    )  # fmt: skip
