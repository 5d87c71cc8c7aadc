"""FP8 weights in the orientation of nn.Linear with one tensor of scales, of every writer.

    weight                         F8_E4M3 or F8_E5M2 [out, in]
    weight_scale_inv               the scale in files of transformers, DeepSeek, Qwen; a multiplier in
                                   spite of its name (but see `reciprocal`)
    scale                          the scale in files of DeepSeek-V4
    weight_scale                   the scale in files of compressed-tensors, AutoFP8 and vLLM, fbgemm_fp8,
                                   ModelOpt
    activation_scale, input_scale  the static scale of the activations, optional

    W[n, k] = weight[n, k] * scale[…]

The shape of the scale determines its strategy:

- [] or [1]: one scale for the tensor.
- [out] or [out, 1]: one scale for each row.
- A grid of ceil(out / b0) × ceil(in / b1) blocks (also as ModelOpt's [n, 1, k, 1]). Only a grid requires the
  block size from the config.
- [out, in / group_size]: one scale for each group.

A scale is F32, BF16 or F16, or a power of two as F8_E8M0 or U8 (OCP MX: 2**(u - 127)).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, ActivationScheme, Format, FormatVariant
from hfq.formats.codecs.fp8_codes import scale_as_float, widen_into
from hfq.formats.codecs.groups import block_amax
from hfq.formats.codecs.value_checks import check_finite, check_positive
from hfq.formats.configs.fp8_config import Hints, guess_block, read_hints
from hfq.formats.configs.quark_config import is_quark, read_dtype
from hfq.formats.layouts.row_order import Fp8Order
from hfq.formats.layouts.scaled import Others, other_specs, other_tensors
from hfq.formats.layouts.slicing import Fp8Shards
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["Fp8"]

logger = logging.getLogger(__name__)

Strategy = Literal["tensor", "channel", "group", "block"]
_CODES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale")
_INPUT_SCALE_NAMES = ("activation_scale", "input_scale")
_POWERS = ("F8_E8M0", "U8")
_SCALES = (*FLOATS, *_POWERS)


@dataclass(frozen=True)
class Fp8(Fp8Shards, Fp8Order):
    """FP8 with the parameters of one module; see the module docstring for the layout.

    Attributes:
        codes_dtype: `F8_E4M3` or `F8_E5M2`.
        strategy: The weights that share a scale.
        block_structure: (out, in) of a block, for `strategy="block"`.
        block_offset: The number of (rows, columns) of its first block that a slice of a layer omits.
        group_size: Channels of a group, for `strategy="group"`.
        scale_name: The scale's name on disk.
        scale_shape: The scale's shape on disk; None for the strategy's usual one.
        scale_dtype: F8_E8M0 or U8 for powers of two, and F32 for any float. BF16 is used only to quantize.
        reciprocal: True if the stored scale divides (gptqmodel's `weight_scale_semantics="inverse"`).
        input_scale_name: The static activation scale's name on disk; None if there is none.
        input_scale_shape: The static activation scale's shape.
        scheme: The activation quantization that the checkpoint requests.
        is_declared: True if the config states whether the scale multiplies or divides.
        is_power: True if the config says that all scales are powers of two.
        others: Tensors that are saved unchanged and that no weight depends on: (name, dtype, shape).
    """

    name = "fp8"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "FP8 fine-grained (fp32, bf16 or ue8m0 scales)",
            "transformers, DeepSeek, Qwen, auto-round",
            "weight, weight_scale_inv",
            ("fp8-block", "fp8-block-ragged", "fp8-block-ue8m0"),
            ("hf-fp8-block128", "transformers-fp8-ragged"),
            is_emitted=True,
        ),
        FormatVariant(
            "compressed-tensors float-quantized, mxfp8-quantized",
            "llmcompressor, compressed-tensors, auto-round",
            "weight, weight_scale, input_scale",
            ("fp8-tensor", "fp8-channel", "fp8-group", "fp8-mxfp8"),
            (
                "ct-fp8-static-tensor",
                "ct-fp8-dynamic-channel",
                "llmcompressor-fp8-block-ragged",
                "llmcompressor-mxfp8",
                "autoround-fp8-static",
            ),
            is_emitted=True,
        ),
        FormatVariant(
            "AutoFP8, vLLM", "AutoFP8", "weight, weight_scale, input_scale", ("fp8-autofp8-static",)
        ),
        FormatVariant("fbgemm_fp8", "transformers (on CUDA)", "weight, weight_scale", ("fp8-fbgemm",)),
        FormatVariant(
            "ModelOpt FP8 (tensor, channel, 2-D blocks), MXFP8",
            "nvidia-modelopt",
            "weight, weight_scale, input_scale",
            ("fp8-modelopt-tensor",),
            ("modelopt-fp8-2d-blockwise",),
        ),
        FormatVariant(
            "gptqmodel FP8 (reciprocal scales)",
            "gptqmodel",
            "weight, weight_scale_inv",
            ("fp8-gptqmodel-reciprocal",),
            ("gptqmodel-fp8-row",),
        ),
        FormatVariant("FP8 of DeepSeek-V4", "DeepSeek", "weight, scale F8_E8M0", ("fp8-block-deepseek",)),
        FormatVariant(
            "Quark fp8, ptpc_fp8",
            "amd-quark",
            "weight, weight_scale, input_scale",
            ("fp8-quark-tensor", "fp8-quark-channel"),
            ("quark-fp8", "quark-ptpc-fp8"),
        ),
        FormatVariant(
            "MXFP8 with weight_scale_inv", "several", "weight, weight_scale_inv U8", ("fp8-mxfp8-blocks",)
        ),
        FormatVariant("FP8 e5m2", "several", "weight, weight_scale", ("fp8-e5m2",)),
    )
    codes_dtype: str = "F8_E4M3"
    strategy: Strategy = "channel"
    block_structure: tuple[int, int] | None = None
    block_offset: tuple[int, int] = (0, 0)
    group_size: int | None = None
    scale_name: str = "weight_scale"
    scale_shape: tuple[int, ...] | None = None
    scale_dtype: str = "F32"
    reciprocal: bool = False
    input_scale_name: str | None = None
    input_scale_shape: tuple[int, ...] = ()
    scheme: ActivationScheme | None = None
    is_declared: bool = False
    is_power: bool = False
    others: Others = ()

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Fp8 | None:
        weight = tensors.get("weight")
        if weight is None or weight.dtype not in _CODES or len(weight.shape) != 2:
            return None
        if is_quark(config):
            read_dtype(module, weight, config, ("fp8_e4m3" if weight.dtype == "F8_E4M3" else "fp8_e5m2",))
        hints = read_hints(module, config)
        usual = "weight_scale_inv" if hints.block or hints.reciprocal else "weight_scale"
        scale_name = next(
            (name for name in _SCALE_NAMES if name in tensors),
            usual if config.get("expert_dtype") is None else "scale",
        )
        scale = tensors.get(scale_name)
        input_scale_name = next((name for name in _INPUT_SCALE_NAMES if name in tensors), None)
        detected = cls(
            codes_dtype=weight.dtype,
            scale_name=scale_name,
            scale_dtype=scale.dtype if scale is not None and scale.dtype in _POWERS else "F32",
            reciprocal=hints.reciprocal and scale_name == "weight_scale_inv",
            input_scale_name=input_scale_name or ("input_scale" if hints.is_static else None),
            input_scale_shape=tensors[input_scale_name].shape if input_scale_name else (),
            scheme=ActivationScheme("tensor", scale_name=input_scale_name)
            if input_scale_name
            else hints.scheme,
            is_declared=hints.is_declared,
            is_power=hints.is_power,
            others=other_tensors(tensors, ("input_scale_ub", "output_scale")),
        )
        return detected if scale is None else detected._with_scale(module, weight, scale, hints)

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        specs = [
            TensorSpec("weight", (self.codes_dtype,), (out_features, in_features), "codes"),
            TensorSpec(self.scale_name, _SCALES, self._scale_shape(in_features, out_features), "scale"),
        ]
        if self.input_scale_name:
            shape = self.input_scale_shape if self.input_scale_shape in ((), (1,)) else (1,)
            specs.append(TensorSpec(self.input_scale_name, FLOATS, shape, "scale"))
        return (
            *specs,
            *other_specs(self.others),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "weight"

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        out_features, in_features = tensors["weight"].shape
        return out_features, in_features

    def describe(self) -> str:
        sizes = {"block": f" {self.block_structure}", "group": f" g{self.group_size}"}.get(self.strategy, "")
        reading = " reciprocal" if self.reciprocal else ""
        codes = self.codes_dtype.removeprefix("F8_").lower()
        return (
            f"fp8 {codes} "
            f"{self.strategy}{sizes.replace(', ', 'x').replace('(', '').replace(')', '')}{reading}"
        )

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Fp8:
        scale = scale_as_float(tensors[self.scale_name])
        check_finite(module, self.scale_name, scale.reciprocal() if self.reciprocal else scale)
        check_finite(module, self.scale_name, scale)
        if self.input_scale_name:
            check_finite(module, self.input_scale_name, tensors[self.input_scale_name])
            check_positive(module, self.input_scale_name, tensors[self.input_scale_name])
        if (
            self.is_power
            and self.scale_dtype not in _POWERS
            and not bool((torch.frexp(scale)[0].abs() == 0.5).all())
        ):
            raise FormatError(
                "A scale is not a power of two, but the config requires it. Nothing was loaded.",
                tensor=f"{module}.{self.scale_name}",
                found=scale.flatten()[:4].tolist(),
                expected="powers of two, as U8 or F8_E8M0 or the same values as floats",
                fix="Download the original checkpoint. A tool may have cast the exponents of this copy.",
            )
        is_reciprocal = self._is_undeclared and float(scale.median()) > 1
        if is_reciprocal and self.strategy != "channel":
            raise FormatError(
                "The scales of a layer are ambiguous: they can multiply or divide. Nothing was loaded.",
                tensor=f"{module}.{self.scale_name}",
                expected="scales below 1, or weight_scale_semantics in quantization_config",
                found=f"a median of {float(scale.median()):g}",
                fix="Restore the original weight_scale_semantics in config.json.",
            )
        if is_reciprocal:
            logger.warning(
                "%s: its scales are above 1, like reciprocal scales of gptqmodel; hfq reads them as such.",
                module,
            )
            return dataclasses.replace(self, reciprocal=True)
        return self

    def resolve_stack(self, tensors: Mapping[str, torch.Tensor]) -> Format | None:
        if self._is_undeclared:
            scale = scale_as_float(tensors[self.scale_name])
            if bool((scale.reshape(scale.shape[0], -1).median(1).values > 1).any()):
                return None
        return super().resolve_stack(tensors)

    @property
    def _is_undeclared(self) -> bool:
        """True if nothing but the scales tells whether they multiply or divide."""
        return self.scale_name == "weight_scale_inv" and not self.reciprocal and not self.is_declared

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        stop = start + panel.shape[0]
        widen_into(panel, tensors["weight"][start:stop])
        scale = tensors[self.scale_name]
        apply = torch.Tensor.div_ if self.reciprocal else torch.Tensor.mul_
        if self.strategy == "tensor":
            apply(panel, scale_as_float(scale.reshape(1, 1)))
        elif self.strategy == "channel":
            apply(panel, scale_as_float(scale.reshape(-1, 1)[start:stop]))
        elif self.strategy == "group":
            groups = scale_as_float(scale[start:stop])
            apply(panel.unflatten(1, (groups.shape[1], -1)), groups[:, :, None])
        else:
            self._apply_blocks(apply, panel, scale, start)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        dtype = _CODES[self.codes_dtype]
        weight = weight.detach().to(torch.float32)
        top = torch.finfo(dtype).max
        out_features, in_features = weight.shape
        shape = self._scale_shape(in_features, out_features)
        if self.strategy == "group" and in_features % (self.group_size or 1):
            raise FormatError(
                "The group size does not divide the input.",
                found=f"{in_features} input channels",
                expected=f"a multiple of group_size={self.group_size}",
                fix="Choose a group_size that divides the input.",
            )
        scale = self._amax(weight).reshape(shape) / top
        scale = torch.where(scale == 0, 1, scale)
        if self.scale_dtype in _POWERS:
            exponents = (torch.ceil(torch.log2(scale)) + 127).clamp(0, 254).to(torch.uint8)
            scale = exponents if self.scale_dtype == "U8" else exponents.view(torch.float8_e8m0fnu)
        scale = scale.to(torch.bfloat16) if self.scale_dtype == "BF16" else scale
        stored = {"weight": weight, self.scale_name: 1 / scale if self.reciprocal else scale}
        ones = self.dequantize({**stored, "weight": torch.ones_like(weight)})
        stored["weight"] = (weight / ones).clamp(-top, top).to(dtype)
        if self.input_scale_name:
            stored[self.input_scale_name] = torch.ones(self.input_scale_shape)
        return stored

    def _with_scale(self, module: str, weight: TensorInfo, scale: TensorInfo, hints: Hints) -> Fp8:
        """Returns the format with the strategy that the scale's shape implies.

        For a grid, the config states the block or group size.
        """
        out_features, in_features = weight.shape
        grid = scale.shape if len(scale.shape) == 2 else ()
        is_grid_of_4 = len(scale.shape) == 4 and scale.shape[1] == scale.shape[3] == 1
        if is_grid_of_4:
            grid = (scale.shape[0], scale.shape[2])
        is_blocked = hints.block is not None and _grid(out_features, in_features, hints.block) != (1, 1)
        if scale.numel == 1 and not is_blocked and not (hints.block and len(grid) == 2):
            return dataclasses.replace(self, strategy="tensor", scale_shape=scale.shape)
        if scale.shape in ((out_features,), (out_features, 1)) and not hints.group_size:
            return dataclasses.replace(self, strategy="channel", scale_shape=scale.shape)
        # with transformers' tensor name, a grid always has blocks
        may_be_grouped = self.scale_name == "weight_scale" or scale.dtype in ("U8", "F8_E8M0")
        is_grouped = hints.group_size is not None or (not hints.block and may_be_grouped)
        if grid and grid[0] == out_features and is_grouped and grid[1] and not is_grid_of_4:
            group_size = hints.group_size or -(-in_features // grid[1])
            if in_features != group_size * grid[1] and -(-in_features // group_size) == grid[1]:
                raise FormatError(
                    f"The groups of {module} do not divide its input. Nothing was loaded.",
                    file=scale.range.file,
                    tensor=scale.name,
                    expected=f"groups of {group_size} in {in_features} channels",
                    found=str(scale),
                    fix="Restore group_size in config.json, or export with one that divides the input.",
                )
            return dataclasses.replace(self, strategy="group", group_size=group_size, scale_shape=None)
        block = hints.block or guess_block(module, weight, scale, is_grid_of_4)
        shape = scale.shape if is_grid_of_4 else None
        if is_grid_of_4 and grid != _grid(out_features, in_features, block):
            raise FormatError(
                f"The scale grid of {module} does not match its weight. Nothing was loaded.",
                file=scale.range.file,
                tensor=f"{module}.{scale.name.rpartition('.')[2]}",
                found=str(scale),
                expected=f"{_grid(out_features, in_features, block)} blocks of {block}",
                fix="Restore the original block size in config.json.",
            )
        return dataclasses.replace(self, strategy="block", block_structure=block, scale_shape=shape)

    def _scale_shape(self, in_features: int, out_features: int) -> tuple[int, ...]:
        if self.scale_shape is not None and self.strategy in ("tensor", "block"):
            return self.scale_shape
        if self.strategy == "tensor":
            return (1,)
        if self.strategy == "channel":
            return (out_features,) if self.scale_shape and len(self.scale_shape) == 1 else (out_features, 1)
        if self.strategy == "group":
            return (out_features, -(-in_features // (self.group_size or 1)))
        return _grid(out_features, in_features, self.block_structure or (128, 128))

    def _apply_blocks(
        self, apply: Callable[..., object], panel: torch.Tensor, scale: torch.Tensor, start: int
    ) -> None:
        """Applies the scales to each row of blocks in the panel.

        The last block of a row or column may be smaller.
        """
        block_out, block_in = self.block_structure or (128, 128)
        if scale.dim() == 4:
            scale = scale.reshape(scale.shape[0], scale.shape[2])
        start, before = start + self.block_offset[0], self.block_offset[1]
        stop, after = start + panel.shape[0], before + panel.shape[1]
        for first in range(start // block_out, -(-stop // block_out)):
            columns = scale_as_float(scale[first]).repeat_interleave(block_in)[before:after]
            apply(panel[max(first * block_out - start, 0) : (first + 1) * block_out - start], columns)

    def _amax(self, weight: torch.Tensor) -> torch.Tensor:
        if self.strategy == "tensor":
            return weight.abs().amax().reshape(1)
        if self.strategy == "channel":
            return weight.abs().amax(1)
        block = self.block_structure or (128, 128)
        if self.strategy == "group":
            block = (1, self.group_size or weight.shape[1])
        return block_amax(weight, block)


def _grid(out_features: int, in_features: int, block: tuple[int, int]) -> tuple[int, int]:
    return -(-out_features // block[0]), -(-in_features // block[1])
