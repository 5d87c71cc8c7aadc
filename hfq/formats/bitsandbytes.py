"""bitsandbytes: LLM.int8(), and 4-bit blocks (nf4, fp4).

Scales of 4-bit blocks are floats, or double-quantized. LLM.int8() has one scale per row.

int8:
    weight I8 [out, in], SCB F32 [out] (the amax of a row), weight_format U8 [] = 0
    W[n, k] = weight[n, k] * SCB[n] / 127
4-bit:
    weight [ceil(out * in / 2) bytes, 1], U8 or another storage dtype
                                                 codes of the flattened weight, high nibble first
    weight.quant_map F32 [16]                    the value of each code
    weight.absmax F32 [out * in / blocksize]     the scale of each block of the flattened weight
    weight.quant_state.bitsandbytes__nf4 U8      JSON: quant_type, blocksize, dtype, shape,
                                                 nested_blocksize, nested_offset
    W.flat[i] = quant_map[code[i]] * absmax[i // blocksize]
4-bit with double-quantized scales:
    weight.absmax U8, weight.nested_absmax F32 [n / 256], weight.nested_quant_map F32 [256]
    absmax[j] = nested_quant_map[stored[j]] * nested_absmax[j // nested_blocksize] + nested_offset

Format: bitsandbytes' `Int8Params`, `QuantState.as_dict(packed=True)`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, ActivationScheme, Format, FormatVariant
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.formats.codecs.nibbles import look_up_nibbles
from hfq.formats.codecs.value_checks import check_finite, with_common
from hfq.formats.layouts.fp4 import E2M1
from hfq.formats.layouts.scaled import ScaledCodes, other_tensors
from hfq.tensor_spec import DTYPE_BITS, TensorInfo, TensorSpec

__all__ = ["NF4_VALUES", "Bnb4Bit", "BnbInt8"]

_STATE = "weight.quant_state.bitsandbytes__"
_BLOCKSIZES = (64, 128, 32, 256, 512, 1024, 2048, 4096)
_STORAGES = ("U8", "BF16", "F16", "F32")
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_FP4 = tuple(value / 6 for value in E2M1)


@dataclass(frozen=True)
class BnbInt8(ScaledCodes):
    """LLM.int8(); see the module docstring.

    `scheme` is the activation quantization of bitsandbytes.
    """

    name = "bitsandbytes-int8"
    codes, scale = "weight", "SCB"
    multiplier = 1 / 127
    variants = (
        FormatVariant(
            "bitsandbytes int8",
            "bitsandbytes, transformers",
            "weight I8, SCB, weight_format",
            ("bitsandbytes-int8",),
            ("bitsandbytes-int8",),
        ),
    )
    scheme: ActivationScheme | None = None

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> BnbInt8 | None:
        weight = tensors.get("weight")
        says_int8 = config.get("quant_method") == "bitsandbytes" and config.get(
            "load_in_8bit", config.get("_load_in_8bit")
        )
        if (
            weight is None
            or weight.dtype != "I8"
            or len(weight.shape) != 2
            or not ("SCB" in tensors or says_int8)
        ):
            return None
        scale = tensors.get("SCB")
        shape = (
            scale.shape if scale is not None and scale.shape == (weight.shape[0], 1) else (weight.shape[0],)
        )
        return cls(
            scale_shape=shape, others=other_tensors(tensors, ("weight_format",)), scheme=_read_scheme(config)
        )

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> BnbInt8:
        check_finite(module, "SCB", tensors["SCB"])
        layout = int(tensors["weight_format"].reshape(-1)[0]) if "weight_format" in tensors else 0
        if layout != 0:
            raise FormatError(
                "An int8 weight of bitsandbytes is stored in unsupported tiles. Nothing was loaded.",
                tensor=f"{module}.weight_format",
                expected="0 (row)",
                found=f"{layout} (col32, turing or ampere tiles)",
                fix="Load it with the bitsandbytes that wrote it, and save it with a current one.",
            )
        return self

    def resolve_stack(self, tensors: Mapping[str, torch.Tensor]) -> Format | None:
        common = with_common(tensors, "weight_format")
        return None if common is None else super().resolve_stack(common)


def _read_scheme(config: Mapping) -> ActivationScheme:
    """Returns LLM.int8() with the threshold of the config, 6 by default as in bitsandbytes.

    Raises:
        FormatError: The threshold is not a finite number of at least 0.
    """
    threshold = config.get("llm_int8_threshold", 6.0)
    if (
        isinstance(threshold, bool)
        or not isinstance(threshold, (int, float))
        or not 0 <= threshold < float("inf")
    ):
        raise FormatError(
            f"llm_int8_threshold={threshold!r} in config.json is not valid. Nothing was loaded.",
            file="config.json",
            expected="a number, 0 or more",
            found=repr(threshold),
            fix="Set llm_int8_threshold in config.json to a finite number, 0 or more.",
        )
    return ActivationScheme("token", dtype="int8", outlier_threshold=float(threshold))


@dataclass(frozen=True)
class Bnb4Bit(Format):
    """nf4 and fp4 with the parameters of one module; see the module docstring.

    Attributes:
        quant_type: `nf4` or `fp4`.
        storage: The dtype that the bytes of the codes are stored in.
        is_nested: True if the scales are quantized, too.
        blocksize: Weights that share a scale.
        blocks: The number of scales.
        nested_blocksize: Scales that share a scale.
        nested_offset: The number that is added to a double-quantized scale.
        state_nbytes: The length of the JSON in bytes.
        size: (out, in) of the layer.
    """

    name = "bitsandbytes-4bit"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "bitsandbytes nf4",
            "bitsandbytes, transformers",
            "weight, weight.absmax, weight.quant_map, weight.quant_state…",
            ("bitsandbytes-nf4", "bitsandbytes-nf4-bf16"),
        ),
        FormatVariant(
            "bitsandbytes nf4, double-quantized",
            "bitsandbytes, transformers",
            "also weight.nested_absmax, weight.nested_quant_map",
            ("bitsandbytes-nf4-nested",),
            ("bitsandbytes-nf4-dq",),
        ),
        FormatVariant(
            "bitsandbytes fp4",
            "bitsandbytes, transformers",
            "as nf4",
            ("bitsandbytes-fp4",),
            ("bitsandbytes-fp4-storage-bf16",),
        ),
    )
    quant_type: str = "nf4"
    storage: str = "U8"
    is_nested: bool = False
    blocksize: int = 64
    blocks: int = 0
    nested_blocksize: int = 256
    nested_offset: float = 0.0
    state_nbytes: int = 0
    size: tuple[int, int] = (0, 0)
    num_bits = 4

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Bnb4Bit | None:
        state = next((name for name in tensors if name.startswith(_STATE)), None)
        weight, absmax = tensors.get("weight"), tensors.get("weight.absmax")
        if weight is None or (state is None and absmax is None and "weight.quant_map" not in tensors):
            return None
        if weight.dtype not in _STORAGES:
            return None
        quant_type = state.removeprefix(_STATE) if state else str(config.get("bnb_4bit_quant_type") or "nf4")
        hinted = config.get("bnb_4bit_quant_type")
        is_named = config.get("load_in_4bit", config.get("_load_in_4bit")) is True
        if quant_type not in ("nf4", "fp4") or (
            is_named and hinted in ("nf4", "fp4") and hinted != quant_type
        ):
            raise FormatError(
                f"quantization_config contradicts the tensors of {module}. Nothing was loaded.",
                file=weight.range.file,
                tensor=f"{module}.{state}",
                expected="nf4 or fp4, as config.json says",
                found=f"{quant_type}; config: {hinted!r}",
                fix="Restore the original bnb_4bit_quant_type in config.json.",
            )
        return cls(
            quant_type=quant_type,
            storage=weight.dtype,
            blocks=absmax.numel if absmax is not None else 0,
            is_nested=absmax is not None and absmax.dtype == "U8",
            state_nbytes=tensors[state].numel if state else 0,
        )

    def sized(self, in_features: int, out_features: int) -> Bnb4Bit:
        numel = in_features * out_features
        fitting = [size for size in _BLOCKSIZES if self.blocks == -(-numel // size)]
        return dataclasses.replace(
            self, size=(out_features, in_features), blocksize=fitting[0] if fitting else 64
        )

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        nbytes = -(-in_features * out_features // 2)
        blocks = -(-in_features * out_features // self.blocksize)
        words = -(-nbytes * 8 // DTYPE_BITS[self.storage])
        specs = [
            TensorSpec("weight", (self.storage,), (words, 1), "codes"),
            TensorSpec(
                "weight.absmax",
                ("U8",) if self.is_nested else ("F32",),
                (blocks,),
                "codes" if self.is_nested else "scale",
            ),
            TensorSpec("weight.quant_map", ("F32",), (16,), "scale"),
            TensorSpec(_STATE + self.quant_type, ("U8",), (self.state_nbytes,), "meta"),
        ]
        if self.is_nested:
            specs.append(
                TensorSpec("weight.nested_absmax", ("F32",), (-(-blocks // self.nested_blocksize),), "scale")
            )
            specs.append(TensorSpec("weight.nested_quant_map", ("F32",), (256,), "scale"))
        return (*specs, TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True))

    @property
    def codes_name(self) -> str:
        return "weight"

    @property
    def row_multiple(self) -> int:
        return 1 if self.size[1] % 2 == 0 else 2

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        return self.size

    def describe(self) -> str:
        return f"bitsandbytes {self.quant_type}{' double-quantized' if self.is_nested else ''}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Bnb4Bit:
        for name in ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"):
            if name in tensors:
                check_finite(module, name, tensors[name])
        state = self._read_state(module, tensors)
        expected = {"quant_type": self.quant_type, "blocksize": self.blocksize, "shape": list(self.size)}
        if self.is_nested:
            expected["nested_blocksize"] = self.nested_blocksize
        wrong = [
            f"{key}: expected {value}, found {state.get(key)!r}"
            for key, value in expected.items()
            if state.get(key) != value
        ]
        offset = state.get("nested_offset")
        is_number = isinstance(offset, (int, float)) and not isinstance(offset, bool)
        if self.is_nested and not (is_number and abs(offset) < 1e6):  # type: ignore[arg-type]
            wrong.append(f"nested_offset: expected a number, found {offset!r}")
        if wrong:
            raise FormatError(
                "The quantization state of a layer contradicts its tensors. Nothing was loaded.",
                problems=wrong,
                tensor=f"{module}.{_STATE}{self.quant_type}",
                fix="Download the checkpoint again.",
            )
        return dataclasses.replace(self, nested_offset=float(offset) if self.is_nested else 0.0)  # type: ignore[arg-type]

    def resolve_stack(self, tensors: Mapping[str, torch.Tensor]) -> Format | None:
        common = with_common(tensors, _STATE + self.quant_type)
        return None if common is None else super().resolve_stack(common)

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        first, count = start * panel.shape[1], panel.numel()
        packed = tensors["weight"].reshape(-1).view(torch.uint8)[first // 2 : -(-(first + count) // 2)]
        flat = panel.view(-1)
        look_up_nibbles(flat, packed, tensors["weight.quant_map"].to(torch.float32), high_first=True)
        blocks = slice(first // self.blocksize, -(-(first + count) // self.blocksize))
        absmax = self._absmax(tensors, blocks)
        if first % self.blocksize == 0 and count % self.blocksize == 0:
            flat.view(-1, self.blocksize).mul_(absmax[:, None])
        else:
            skipped = first - blocks.start * self.blocksize
            flat.mul_(absmax.repeat_interleave(self.blocksize)[skipped : skipped + count])

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out_features, in_features = weight.shape
        flat = torch.nn.functional.pad(
            weight.detach().to(torch.float32).flatten(), (0, -weight.numel() % self.blocksize)
        )
        blocks = flat.view(-1, self.blocksize)
        values = torch.tensor(NF4_VALUES if self.quant_type == "nf4" else _FP4)
        absmax = blocks.abs().amax(1)
        absmax = torch.where(absmax == 0, 1, absmax)
        state: dict[str, object] = {
            "quant_type": self.quant_type,
            "blocksize": self.blocksize,
            "dtype": "bfloat16",
        }
        state["shape"] = [out_features, in_features]
        stored = {"weight.quant_map": values, "weight.absmax": absmax}
        if self.is_nested:
            offset = float(absmax.mean())
            table = torch.linspace(-1, 1, 256)
            padded = torch.nn.functional.pad(absmax - offset, (0, -absmax.numel() % self.nested_blocksize))
            nested = padded.view(-1, self.nested_blocksize).abs().amax(1).clamp(min=1e-8)
            codes = ((padded.view(-1, self.nested_blocksize) / nested[:, None] + 1) * 127.5).round()
            stored["weight.absmax"] = codes.flatten()[: absmax.numel()].to(torch.uint8)
            stored |= {"weight.nested_absmax": nested, "weight.nested_quant_map": table}
            state |= {
                "nested_blocksize": self.nested_blocksize,
                "nested_dtype": "float32",
                "nested_offset": offset,
            }
            absmax = dataclasses.replace(self, nested_offset=offset)._absmax(stored, slice(None))
        codes = (blocks / absmax[:, None]).flatten()[: weight.numel()]
        nearest = _nearest(codes, values)
        nearest = torch.nn.functional.pad(nearest, (0, nearest.numel() % 2))
        packed = ((nearest[::2] << 4) | nearest[1::2]).to(torch.uint8)
        item = DTYPE_BITS[self.storage] // 8
        packed = torch.nn.functional.pad(packed, (0, -packed.numel() % item))
        stored["weight"] = packed.view(torch_dtype(self.storage)).view(-1, 1)
        stored[_STATE + self.quant_type] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return stored

    def _absmax(self, tensors: Mapping[str, torch.Tensor], blocks: slice) -> torch.Tensor:
        """Returns the scales of these blocks in float32."""
        absmax = tensors["weight.absmax"][blocks]
        if not self.is_nested:
            return absmax.to(torch.float32)
        first = blocks.start or 0
        group = torch.arange(first, first + absmax.numel(), device=absmax.device) // self.nested_blocksize
        values = tensors["weight.nested_quant_map"][absmax.to(torch.int32)]
        return values * tensors["weight.nested_absmax"][group] + self.nested_offset

    def _read_state(self, module: str, tensors: Mapping[str, torch.Tensor]) -> dict:
        name = _STATE + self.quant_type
        try:
            state = json.loads(bytes(tensors[name].tolist()).decode("utf-8"), object_pairs_hook=_unique)
            if not isinstance(state, dict):
                raise ValueError(f"a {type(state).__name__}")
        except (ValueError, RecursionError) as error:
            raise FormatError(
                "The quantization state of a layer cannot be read. Nothing was loaded.",
                tensor=f"{module}.{name}",
                expected="a JSON object",
                found=error,
                fix="Download the checkpoint again.",
            ) from None
        return state


def _unique(pairs: list[tuple[str, object]]) -> dict:
    """Returns the pairs as a dict, and raises an error if a key occurs twice."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a duplicate key")
    return dict(pairs)


def _nearest(codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    ordered, order = values.sort()
    return order[torch.bucketize(codes, (ordered[1:] + ordered[:-1]) / 2)]
