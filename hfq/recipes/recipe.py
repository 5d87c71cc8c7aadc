"""Recipes for quantizing a float model, and the `quantization_config` of the result."""

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
from hfq.recipes.schemes import SCHEMES, Scheme

__all__ = ["METHODS", "RECIPE_OPTIONS", "Recipe"]

METHODS = {
    "gptq": "GPTQ: codes chosen by the activations' second moments, written as GPTQ",
    "awq": "AWQ: input channels scaled by the activations' magnitudes before rounding, written as AWQ gemm",
    "rtn": "round to nearest, written as GPTQ",
    "fp8": "FP8 e4m3 by blocks of 128 x 128 (transformers' fp8) or, if those do not tile, by channel "
    "(compressed-tensors)",
    **{name: scheme.description for name, scheme in SCHEMES.items()},
}
"""The values of `Recipe.method`, with a description of each."""

_BLOCK = 128
_OPTIONS = {
    "awq": ("bits", "group_size", "sym", "clip_search", "distill_steps"),
    "rtn": ("bits", "group_size", "sym", "distill_steps"),
    "fp8": (),
    **{name: scheme.options for name, scheme in SCHEMES.items()},
}
"""The options of methods other than GPTQ."""

_UNSET: Any = None
"""The default of an option whose value depends on the method."""

_DEFAULTS = {
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "static_groups": False,
    "act_group_aware": True,
    "damp_percent": 0.05,
    "distill_steps": 0,
}


@dataclass(frozen=True)
class Recipe:
    """The method and options for quantizing the linear layers of a float model.

    Args:
        method: One of `METHODS`.
        bits: 2, 3, 4 or 8 bits per code; 4 by default.
        group_size: Input channels that share a scale; 128 by default, -1 for all.
        sym: True if the zero point is the middle of the codes; the checkpoint is then GPTQ v1, else v2. The
            default is False for AWQ, which stores zero points, and True for other methods.
        desc_act: True if GPTQ quantizes channels by decreasing activation, and groups follow that order.
        static_groups: With `desc_act`: True if groups consist of neighboring channels, with scales from the
            float weight.
        act_group_aware: Without `desc_act`: True if groups, and the channels within each, are quantized by
            decreasing activation. The format of the file does not change. True by default.
        damp_percent: The fraction of the mean of the Hessian's diagonal that is added to the diagonal; 0.05
            by default. It increases if a factorization fails.
        clip_search: True if GPTQ and AWQ narrow each range where that lowers the weighted squared error. The
            default is True for AWQ and for 2 and 3 bits of GPTQ.
        distill_steps: Steps of distillation against the float model after each decoder layer; 0 by default.

    Raises:
        SetupError: A value is not supported, the method does not have an option, or options contradict each
            other.
    """

    method: str = "gptq"
    bits: int = _UNSET
    group_size: int = _UNSET
    sym: bool = _UNSET
    desc_act: bool = _UNSET
    static_groups: bool = _UNSET
    act_group_aware: bool = _UNSET
    damp_percent: float = _UNSET
    clip_search: bool | None = None
    distill_steps: int = _UNSET

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise _unusable("method", self.method, ", ".join(METHODS), nearest(str(self.method), METHODS))
        taken = _OPTIONS.get(self.method, RECIPE_OPTIONS)
        for name in self._given():
            if name not in taken:
                raise SetupError(
                    f"method={self.method!r} has no `{name}`. Nothing was done.",
                    expected=", ".join(taken) or "no further options",
                    found=f"{name}={getattr(self, name)!r}",
                    fix=f"Remove `{name}`, or choose another method.",
                )
        defaults = {**_DEFAULTS, "sym": self.method != "awq"}
        if self.scheme is not None and self.scheme.measures:  # a row is one group
            defaults["group_size"] = -1
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        self._check_values()

    def _given(self) -> list[str]:
        """Returns the names of the options that differ from None."""
        return [option.name for option in fields(self)[1:] if getattr(self, option.name) is not None]

    def _check_values(self) -> None:
        bits = self.scheme.bits if self.scheme is not None and self.scheme.has_bits else BITS
        if type(self.bits) is not int or self.bits not in bits:
            raise _unusable("bits", self.bits, ", ".join(map(str, bits)))
        if type(self.group_size) is not int or not (self.group_size == -1 or 8 <= self.group_size < 1 << 24):
            raise _unusable("group_size", self.group_size, "-1, or at least 8 channels")
        is_number = isinstance(self.damp_percent, (int, float)) and not isinstance(self.damp_percent, bool)
        if not is_number or not 0 < self.damp_percent < 1:
            raise _unusable("damp_percent", self.damp_percent, "a number between 0 and 1")
        if type(self.distill_steps) is not int or self.distill_steps < 0:
            raise _unusable("distill_steps", self.distill_steps, "a number of steps, 0 or more")
        for name in ("sym", "desc_act", "static_groups", "act_group_aware"):
            if not isinstance(getattr(self, name), bool):
                raise _unusable(name, getattr(self, name), "True or False")
        if self.clip_search is not None and not isinstance(self.clip_search, bool):
            raise _unusable("clip_search", self.clip_search, "True or False")
        if self.static_groups and not self.desc_act:
            raise _unusable("static_groups", True, "False, or True with desc_act=True")
        if self.method == "awq" and self.sym:
            raise _unusable("sym", True, "False with method='awq', whose files store zero points")

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of the method, or None if it has no entry in `hfq.recipes.schemes`."""
        return SCHEMES.get(self.method)

    @property
    def width(self) -> int:
        """The bits of a code: those of the scheme if it has a fixed number, else `bits`."""
        return self.bits if self.scheme is None or self.scheme.has_bits else self.scheme.bits[0]

    @property
    def narrows(self) -> bool:
        """True if the recipe narrows ranges (`clip_search`)."""
        return (self.method == "awq" or self.bits < 4) if self.clip_search is None else self.clip_search

    @property
    def scatters_groups(self) -> bool:
        """True if the channels of a group are not neighbors in the file."""
        return self.desc_act and not self.static_groups

    @property
    def measures(self) -> bool:
        """True if the method chooses codes by activations."""
        return self.method in ("gptq", "awq") or (self.scheme is not None and self.scheme.measures)

    @property
    def needs_calibration(self) -> bool:
        """True if the method or the distillation requires calibration data."""
        return self.measures or self.distill_steps > 0

    @property
    def is_for_decoder_layers(self) -> bool:
        """True if readers of the written format look for quantized layers in decoder layers alone."""
        return self.method in ("gptq", "awq", "rtn")

    @property
    def is_for_experts(self) -> bool:
        """True if all layers but routed experts stay unquantized."""
        return self.scheme is not None and self.scheme.is_for_experts

    @property
    def changes_floats(self) -> bool:
        """True if the recipe changes a decoder layer's float weights before they are rounded.

        AWQ and distillation change them, and therefore keep them in float32.
        """
        return self.method == "awq" or self.distill_steps > 0

    def weight_format(self, sizes: Iterable[tuple[int, int]]) -> Format:
        """Returns the one format for layers of these sizes (out, in)."""
        if self.scheme is not None:
            return self.scheme.make(self.width)
        if self.method == "awq":
            return Awq(group_size=self.group_size, num_bits=self.bits)
        if self.method != "fp8":
            reading = "field_plus_one" if self.sym else "stored"
            return Gptq(self.bits, self.group_size, self.sym, reading, g_idx_length=2)  # type: ignore[arg-type]
        if all(size % _BLOCK == 0 for pair in sizes for size in pair):
            return Fp8(strategy="block", block_structure=(_BLOCK, _BLOCK), scale_name="weight_scale_inv")
        return Fp8(strategy="channel", scale_dtype="BF16", scheme=ActivationScheme("token"))

    def quantization_config(
        self, weight_format: Format, dense: Iterable[str], version: str
    ) -> dict[str, Any]:
        """Returns the `quantization_config` of a checkpoint written by this recipe.

        Args:
            weight_format: The result of `weight_format`.
            dense: The names of linear layers that stay unquantized.
            version: The version of hfq, which a GPTQ config names as its writer.
        """
        dense = sorted(dense)
        if self.scheme is not None:
            return self.scheme.quantization_config(self.width, dense)
        if isinstance(weight_format, Gptq):
            return self._gptq_config(dense, version)
        if isinstance(weight_format, Awq):
            config = {
                "quant_method": "awq",
                "bits": self.bits,
                "group_size": self.group_size,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": dense or None,
                "meta": {"quantizer": [f"hfq:{version}"]},
            }
            return config | _dynamic(dense)
        if isinstance(weight_format, Fp8) and weight_format.strategy == "block":
            return {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [_BLOCK, _BLOCK],
                "modules_to_not_convert": dense,
            }
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        activations = {
            "num_bits": 8,
            "type": "float",
            "strategy": "token",
            "symmetric": True,
            "dynamic": True,
        }
        return group_config(
            {"weights": weights, "input_activations": activations, "format": "float-quantized"}, dense
        )

    def check_sizes(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Raises an error if the format cannot hold a layer.

        Args:
            sizes: (out, in) of each layer, by name.

        Raises:
            FormatError: Names the required divisors, and for each such size the number of layers and one of
                them.
        """
        span = 1
        if self.scheme is not None:
            multiple = self.scheme.multiple
        elif self.method == "fp8":
            multiple = (1, 1)
        else:
            multiple, span = (32, 32), self.group_size if self.group_size != -1 else 1
        odd: dict[tuple[int, int], list[str]] = {}
        for name, size in sizes.items():
            if size[0] % multiple[0] or size[1] % multiple[1] or size[1] % span:
                odd.setdefault(size, []).append(name)
        if odd:
            names = sorted({_last_names(name) for each in odd.values() for name in each})
            fix = f"Choose another {'group size or ' if span > 1 else ''}method"
            if any(_last_names(name) not in names for name in sizes):  # these would stay to be quantized
                fix += f", or pass modules_to_not_convert={names}"
            raise FormatError(
                f"method={self.method!r} cannot hold layers of these sizes. Nothing was done.",
                expected=f"an output divisible by {multiple[0]} and an input by {multiple[1]}"
                + (f" and the group size {span}" if span > 1 else ""),
                problems=[
                    f"{list(size)}: {len(each)} {'layer' if len(each) == 1 else 'layers'}, such as {each[0]}"
                    for size, each in odd.items()
                ],
                fix=f"{fix}.",
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns all options by name."""
        return asdict(self)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Recipe:
        """Returns the recipe for a dict of options; None means that an option is not set.

        Raises:
            SetupError: An option is unknown, or the class raises the error.
        """
        for name in options:
            if name not in RECIPE_OPTIONS:
                raise SetupError(
                    f"Recipe has no option {name!r}.{nearest(name, RECIPE_OPTIONS)}",
                    expected=", ".join(RECIPE_OPTIONS),
                    found=name,
                    fix="Remove this option, or use one of the options above.",
                )
        return cls(**{name: value for name, value in options.items() if value is not None})

    def chosen(self) -> dict[str, Any]:
        """Returns the method, and the options that it uses."""
        taken = _OPTIONS.get(self.method, RECIPE_OPTIONS)
        return {name: value for name, value in self.to_dict().items() if name == "method" or name in taken}

    def _gptq_config(self, dense: list[str], version: str) -> dict[str, Any]:
        label = "gptq" if self.sym else "gptq_v2"
        config = {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "sym": self.sym,
            "desc_act": self.scatters_groups,
            "checkpoint_format": label,
            "format": label,
            "lm_head": False,
            "pack_dtype": "int32",
            "meta": {
                "quantizer": [f"hfq:{version}"],
                "damp_percent": self.damp_percent,
                "static_groups": self.static_groups,
            },
        }
        return config | _dynamic(dense)


RECIPE_OPTIONS = tuple(option.name for option in fields(Recipe))
"""The names of the options of a recipe, `method` first."""


def _last_names(layer: str) -> str:
    """Returns the last name of a layer, with the names before it up to one that is no number."""
    names = layer.split(".")
    last = next((place for place in range(len(names) - 1, 0, -1) if not names[place].isdigit()), 0)
    return ".".join(names[last:])


def _dynamic(dense: list[str]) -> dict[str, Any]:
    """Returns gptqmodel's rules for linear layers of decoder layers that stay unquantized.

    gptqmodel does not quantize the head, so the head needs no rule.
    """
    inside = [name for name in dense if name != "lm_head" and not name.endswith(".lm_head")]
    return {"dynamic": {f"-:^{re.escape(name)}$": {} for name in inside}} if inside else {}


def _unusable(option: str, found: object, expected: str, hint: str = "") -> SetupError:
    return SetupError(
        f"{option}={found!r} is not supported.{hint}",
        expected=expected,
        found=repr(found),
        fix=f"Choose a supported value for `{option}`.",
    )
