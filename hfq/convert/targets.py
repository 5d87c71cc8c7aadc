"""Target formats of conversions, with a plan for each layer and the new config.json."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping
from typing import ClassVar

from hfq.checkpoint import Checkpoint, Reader
from hfq.convert.fp8_codes import FineGrainedOptions, FloatOptions, plan_fine_grained, plan_float
from hfq.convert.gpt_oss_experts import fuse_experts
from hfq.convert.integer_codes import GptqOptions, PackOptions, plan_blocks, plan_gptq, plan_pack
from hfq.convert.layer_plan import LayerPlan, NewTensor, SourceLayer, refusal
from hfq.convert.mxfp4_codes import plan_mxfp4, plan_mxfp4_blocks
from hfq.formats import Format
from hfq.formats.base import ActivationScheme
from hfq.formats.compressed_tensors import PackQuantized
from hfq.formats.configs.compressed_tensors_config import is_embedding
from hfq.formats.fp8 import Fp8
from hfq.formats.gguf.block_rows import Gguf
from hfq.formats.gptq import Gptq
from hfq.formats.mxfp4 import Mxfp4
from hfq.version import __version__

__all__ = ["TARGET_FORMATS", "GgufTarget", "Target"]

_NUMBERED = re.compile(r"(^|\.)\d+\.")


class Target(ABC):
    """A target format of a conversion.

    Attributes:
        name: Its name in `hfq convert --to`.
        sources: The formats that can be converted to it.
    """

    name: ClassVar[str]
    sources: ClassVar[tuple[type[Format], ...]]

    @abstractmethod
    def is_source(self, found: Format, method: str) -> bool:
        """Returns True if a layer of the source is already in this format.

        Args:
            found: The layer's format.
            method: The `quant_method` of the source's config.
        """

    @abstractmethod
    def plan(self, layer: SourceLayer) -> LayerPlan:
        """Plans a layer in this format.

        Raises:
            FormatError: The format cannot hold the layer without loss.
        """

    @abstractmethod
    def config(self, layers: Mapping[str, object], dense: Collection[str], source: Mapping) -> dict:
        """Returns the new `quantization_config`.

        Args:
            layers: The options of each quantized layer, from `plan`.
            dense: The modules that hold a float matrix.
            source: The source's `quantization_config`.

        Raises:
            FormatError: One config cannot describe all layers.
        """

    def arrange(
        self, tensors: dict[str, NewTensor], source: Checkpoint, reader: Reader
    ) -> dict[str, NewTensor]:
        """Returns all tensors as the format names and fuses them.

        Raises:
            FormatError: The format has no place for a tensor.
        """
        return tensors

    def side_files(self, config: dict) -> dict[str, dict]:
        """Returns the files that other tools require in addition to config.json."""
        return {}


class _GptqTarget(Target):
    sources = (Gptq, PackQuantized, Gguf)

    def __init__(self, is_v1: bool) -> None:
        self.is_v1 = is_v1
        self.name = "gptq" if is_v1 else "gptq_v2"  # type: ignore[misc]

    def is_source(self, found: Format, method: str) -> bool:
        is_stream = method == "gptq" and isinstance(found, Gptq) and not found.is_planar
        return is_stream and (found.zero_reading != "stored") == self.is_v1  # type: ignore[attr-defined]

    def plan(self, layer: SourceLayer) -> LayerPlan:
        if is_embedding(layer.module):
            raise refusal(
                layer.module,
                "an unquantized embedding, because readers of GPTQ support quantized linear layers only",
                layer.weight_format.describe(),
                "Convert to pack-quantized.",
            )
        return plan_gptq(layer, self.is_v1)

    def config(self, layers: Mapping[str, object], dense: Collection[str], source: Mapping) -> dict:
        options = {name: each for name, each in layers.items() if isinstance(each, GptqOptions)}
        label = {"checkpoint_format": self.name, "format": self.name}
        if source.get("quant_method") == "gptq":
            kept = {key: value for key, value in source.items() if key not in label}
            return {**kept, "sym": all(each.sym for each in options.values()), **label}
        most = Counter(options.values()).most_common(1)[0][0]
        rules: dict[str, dict] = {
            f"-:^{re.escape(name)}$": {} for name in sorted(dense) if _NUMBERED.search(name)
        }
        for name, each in options.items():
            if each != most:
                rules[f"+:^{re.escape(name)}$"] = dataclasses.asdict(each)
        config = {
            "quant_method": "gptq",
            **dataclasses.asdict(most),
            **label,
            "lm_head": "lm_head" in layers,
            "pack_dtype": "int32",
            "meta": {"quantizer": [f"hfq:{__version__}"]},
        }
        return config | ({"dynamic": rules} if rules else {})

    def side_files(self, config: dict) -> dict[str, dict]:
        return {"quantize_config.json": config}


class _CompressedTensors(Target):
    """Base of the formats of compressed-tensors.

    A config group contains all layers with equal options.
    """

    def is_source(self, found: Format, method: str) -> bool:
        return method == "compressed-tensors"

    def config(self, layers: Mapping[str, object], dense: Collection[str], source: Mapping) -> dict:
        grouped: dict[object, list[str]] = {}
        for name, options in layers.items():
            grouped.setdefault(options, []).append(name)
        is_uniform = len(grouped) == 1 and not any(map(is_embedding, layers))
        groups = {}
        for number, (options, names) in enumerate(grouped.items()):
            weights, activations = self._arguments(options)
            groups[f"group_{number}"] = {
                "targets": ["Linear"] if is_uniform else sorted(names),
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
                "format": self.name,
            }
        ignored = sorted({*dense, *(() if "lm_head" in layers else ("lm_head",))})
        return {
            "quant_method": "compressed-tensors",
            "format": self.name,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ignored,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    @abstractmethod
    def _arguments(self, options: object) -> tuple[dict, dict | None]:
        """Returns the arguments of a group for weights and for activations."""


class _PackTarget(_CompressedTensors):
    name = "pack-quantized"
    sources = (Gptq, PackQuantized, Gguf)

    def plan(self, layer: SourceLayer) -> LayerPlan:
        return plan_pack(layer)

    def _arguments(self, options: object) -> tuple[dict, dict | None]:
        if not isinstance(options, PackOptions):
            raise TypeError(type(options).__name__)
        strategy = "channel" if options.group_size is None else "group"
        weights = _arguments(
            options.num_bits, "int", strategy, options.symmetric, group_size=options.group_size
        )
        return weights, None


class _Mxfp4Target(_CompressedTensors):
    name = "mxfp4-pack-quantized"
    sources = (Gguf,)

    def plan(self, layer: SourceLayer) -> LayerPlan:
        return plan_mxfp4(layer)

    def _arguments(self, options: object) -> tuple[dict, dict | None]:
        weights = _arguments(4, "float", "group", True, group_size=32)
        return weights | {"scale_dtype": "torch.uint8"}, None


class _GptOssTarget(Target):
    """MXFP4 of gpt-oss, which fuses the experts of a layer; see `gpt_oss_experts`."""

    name = "mxfp4"
    sources = (Gguf,)

    def is_source(self, found: Format, method: str) -> bool:
        return method == "mxfp4"

    def plan(self, layer: SourceLayer) -> LayerPlan:
        return plan_mxfp4(layer)

    def config(self, layers: Mapping[str, object], dense: Collection[str], source: Mapping) -> dict:
        names = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
        return {"quant_method": "mxfp4", "modules_to_not_convert": [*names]}

    def arrange(
        self, tensors: dict[str, NewTensor], source: Checkpoint, reader: Reader
    ) -> dict[str, NewTensor]:
        if source.config.get("model_type") != "gpt_oss":
            raise refusal(
                "config.json",
                "model_type gpt_oss, because no other model has its experts",
                str(source.config.get("model_type")),
                "Convert to mxfp4-pack-quantized.",
            )
        return fuse_experts(tensors, reader)


class GgufTarget(Target):
    """Blocks of a GGUF file, which names no quantization in config.json."""

    name = "gguf"
    sources = (Gptq, PackQuantized, Mxfp4)

    def is_source(self, found: Format, method: str) -> bool:
        return isinstance(found, Gguf)

    def plan(self, layer: SourceLayer) -> LayerPlan:
        is_mxfp4 = isinstance(layer.weight_format, Mxfp4)
        return plan_mxfp4_blocks(layer) if is_mxfp4 else plan_blocks(layer)

    def config(self, layers: Mapping[str, object], dense: Collection[str], source: Mapping) -> dict:
        return {}


class _FloatTarget(_CompressedTensors):
    name = "float-quantized"
    sources = (Fp8,)

    def plan(self, layer: SourceLayer) -> LayerPlan:
        return plan_float(layer)

    def _arguments(self, options: object) -> tuple[dict, dict | None]:
        if not isinstance(options, FloatOptions):
            raise TypeError(type(options).__name__)
        block = list(options.block) if options.block else None
        weights = _arguments(
            8, "float", options.strategy, True, group_size=options.group_size, block_structure=block
        )
        return weights, _activations(options.activations)


class _FineGrainedTarget(Target):
    name = "fp8"
    sources = (Fp8,)

    def is_source(self, found: Format, method: str) -> bool:
        return (
            method == "fp8"
            and isinstance(found, Fp8)
            and found.scale_name == "weight_scale_inv"
            and not found.reciprocal
        )

    def plan(self, layer: SourceLayer) -> LayerPlan:
        return plan_fine_grained(layer)

    def config(self, layers: Mapping[str, object], dense: Collection[str], source: Mapping) -> dict:
        found = {each: name for name, each in layers.items() if isinstance(each, FineGrainedOptions)}
        if len(found) > 1:
            (one, first), (other, second) = list(found.items())[:2]
            raise refusal(
                second,
                f"the blocks and activations of {first}, because fine-grained FP8 has one setting for all "
                f"layers ({one})",
                str(other),
                "Keep the checkpoint in compressed-tensors format.",
            )
        (options,) = found
        return {
            "quant_method": "fp8",
            "activation_scheme": "static" if options.is_static else "dynamic",
            "weight_block_size": list(options.block) if options.block else None,
            "modules_to_not_convert": sorted({*dense, *(() if "lm_head" in layers else ("lm_head",))}),
        }


def _arguments(
    num_bits: int,
    kind: str,
    strategy: str,
    symmetric: bool,
    dynamic: bool = False,
    *,
    group_size: int | None = None,
    block_structure: list[int] | None = None,
) -> dict:
    """Returns compressed-tensors' QuantizationArgs."""
    return {
        "num_bits": num_bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": symmetric,
        "dynamic": dynamic,
        "group_size": group_size,
        "block_structure": block_structure,
        "actorder": None,
    }


def _activations(scheme: ActivationScheme | None) -> dict | None:
    if scheme is None:
        return None
    is_dynamic = scheme.scale_name is None
    return _arguments(8, "float", scheme.strategy, True, is_dynamic, group_size=scheme.group_size)


TARGET_FORMATS: dict[str, Target] = {
    target.name: target
    for target in (
        _GptqTarget(True),
        _GptqTarget(False),
        _PackTarget(),
        _Mxfp4Target(),
        _GptOssTarget(),
        _FineGrainedTarget(),
        _FloatTarget(),
        GgufTarget(),
    )
}
"""The target formats of `hfq convert --to`, by name."""
