"""Maker of compressed-tensors checkpoints, with the logits of their weights.

llmcompressor quantizes the weights, and compressed-tensors dequantizes them. Run it with
requirements-llmcompressor.txt installed:

    python make_llmcompressor.py OUTPUT_DIR [PART_OF_A_NAME ...]
"""

import sys
import tempfile
from pathlib import Path

import common
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.utils import load_context
from transformers import AutoModelForCausalLM

IGNORE = [
    "lm_head",
    r"re:.*mlp\.(gate|router)$",
    r"re:.*block_sparse_moe\.gate$",
    r"re:.*shared_expert_gate$",
]
KEY_VALUE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
PACKED_FLOAT4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")


def dequantize_module(tensors: dict[str, torch.Tensor], scheme: QuantizationScheme) -> torch.Tensor:
    """Returns the weight [out, in] in float32, by the peer's functions on float32 scales."""
    scale = tensors["weight_scale"]
    scale = (decompress_mx_scale(scale) if scale.dtype == torch.uint8 else scale).float()
    layout = scheme.format if isinstance(scheme.format, str) else scheme.format.value
    if layout in PACKED_FLOAT4:
        rows, half = tensors["weight_packed"].shape
        codes = unpack_fp4_from_uint8(tensors["weight_packed"], rows, 2 * half, dtype=torch.float32)
        divisor = tensors.get("weight_global_scale")
        return dequantize(codes, scale, args=scheme.weights, dtype=torch.float32, global_scale=divisor)
    if layout == "mxfp8-quantized":
        return dequantize(tensors["weight"], scale, args=scheme.weights, dtype=torch.float32)
    compressor = BaseCompressor.get_value_from_registry(layout)
    return compressor.decompress({**tensors, "weight_scale": scale}, scheme)["weight"]


def dequantized(folder: Path, schemes: dict[str, QuantizationScheme]) -> dict[str, torch.Tensor]:
    """Returns every weight of the checkpoint under its name in the unquantized model."""
    weights = {}
    for module, tensors in common.by_module(common.stored_tensors(folder)).items():
        if "weight_scale" in tensors:
            scheme = schemes.get(module) or schemes[module.replace("block_sparse_moe", "mlp")]
            weights[f"{module}.weight"] = dequantize_module(tensors, scheme)
            tensors = {key: value for key, value in tensors.items() if key == "bias"}
        tensors = {key: value for key, value in tensors.items() if key not in ("k_scale", "v_scale")}
        weights.update({f"{module}.{local}": tensor for local, tensor in tensors.items()})
    return weights


def forget_image_processors() -> None:
    """Unloads the image processors of transformers.

    transformers 5.17 imports all of them (torchvision) when llmcompressor replaces an expert class.
    """
    for name in [
        name for name in sys.modules if name.startswith("transformers.models.") and name.endswith("_fast")
    ]:
        del sys.modules[name]


class Maker:
    """One checkpoint to make. `prepare` saves the unquantized model, and a call quantizes it."""

    def __init__(self, recipe, kind: str = "llama", shard: str | None = None, data: bool = False, **changes):
        self.recipe, self.kind, self.data, self.changes = recipe, kind, data, changes
        self.save_options = {"max_shard_size": shard} if shard else {}

    def prepare(self, parent: Path) -> None:
        """Saves the unquantized model before quantization changes how transformers saves experts."""
        words = (self.kind, *(f"{key}={value}" for key, value in self.changes.items()))
        self.dense = parent / "-".join(words)
        if not self.dense.exists():
            common.save_dense(self.dense, self.kind, **self.changes)

    def __call__(self, folder: Path) -> None:
        forget_image_processors()
        torch.manual_seed(7)
        with load_context():
            model = AutoModelForCausalLM.from_pretrained(self.dense, dtype=torch.bfloat16)
        samples = {
            "dataset": Dataset.from_list(common.calibration()),
            "num_calibration_samples": 8,
            "max_seq_length": 48,
        }
        oneshot(model=model, recipe=self.recipe(), **(samples if self.data else {}))
        model.save_pretrained(folder, **self.save_options)
        common.save_tokenizer(folder)
        (folder / "recipe.yaml").unlink(missing_ok=True)
        self.schemes = {
            name: getattr(module, "quantization_scheme", None) for name, module in model.named_modules()
        }
        common.write_reference(folder, dequantized(folder, self.schemes))


def preset(name: str, targets=("Linear",), ignore=(), **options):
    return lambda: QuantizationModifier(
        scheme=name, targets=list(targets), ignore=[*IGNORE, *ignore], **options
    )


def groups(*schemes, modifier=QuantizationModifier, **options):
    """Returns a function that makes recipes with these groups."""

    def recipe():
        found = {f"group_{index}": scheme() for index, scheme in enumerate(schemes)}
        return modifier(**{"config_groups": found, "ignore": IGNORE, **options})

    return recipe


def scheme(weights: dict, activations: dict | None = None, targets=("Linear",), layout: str | None = None):
    arguments = {"weights": QuantizationArgs(**weights)}
    if activations:
        arguments["input_activations"] = QuantizationArgs(**activations)
    return lambda: QuantizationScheme(targets=list(targets), format=layout, **arguments)


def named(name: str, targets):
    return lambda: preset_name_to_scheme(name, list(targets))


def integer(bits: int, group: int | None = 32, symmetric: bool = True, **options) -> dict:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy, **options}


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
PER_TOKEN = {"strategy": "token", "dynamic": True}
TOKEN_INTEGER = {"num_bits": 8, "type": "int", "symmetric": True, **PER_TOKEN}
BLOCKS = {**FLOAT8, "strategy": "block", "block_structure": [64, 64]}


def integer_makers() -> dict:
    made = {}
    for bits in (2, 3, 4, 8):
        for layout, options in {
            "g32": {},
            "g32-asym": {"symmetric": False},
            "channel": {"group": None},
        }.items():
            made[f"w{bits}a16-{layout}"] = Maker(groups(scheme(integer(bits, **options))))
    made["w4a16-channel-asym"] = Maker(groups(scheme(integer(4, None, False))))
    made["w4a16-g64"] = Maker(groups(scheme(integer(4, 64))))
    for bits in (5, 6, 7):
        made[f"w{bits}a16-g32"] = Maker(groups(scheme(integer(bits))))
    ordered = groups(scheme(integer(4, 32, actorder="weight")), modifier=GPTQModifier)
    made["w4a16-actorder-weight"] = Maker(ordered, data=True)
    made["w8a8-int"] = Maker(preset("W8A8"))
    made["w8a8-int-asym"] = Maker(groups(scheme(integer(8, None, False), TOKEN_INTEGER)))
    made["w4afp8"] = Maker(groups(scheme(integer(4, 32), FLOAT8 | PER_TOKEN)))
    made["naive-w4"] = Maker(groups(scheme(integer(4, 32), layout="naive-quantized")))
    made["naive-w4-asym"] = Maker(groups(scheme(integer(4, 32, False), layout="naive-quantized")))
    made["w8a8-int-tensor"] = Maker(
        groups(scheme(integer(8) | {"strategy": "tensor", "group_size": None}, TOKEN_INTEGER))
    )
    made["w8a8-int-block64"] = Maker(groups(scheme({**BLOCKS, "type": "int"}, TOKEN_INTEGER)))
    made["w4a16-tensor"] = Maker(groups(scheme(integer(4) | {"strategy": "tensor", "group_size": None})))
    made["opt-w8a8-int"] = Maker(preset("W8A8"), kind="opt")
    made["opt-w4a16-asym"] = Maker(groups(scheme(integer(4, 32, False))), kind="opt")
    made["qwen2tied-w4a16"] = Maker(groups(scheme(integer(4, 32))), kind="qwen2-tied")
    made["w4a16-sharded"] = Maker(groups(scheme(integer(4, 32))), shard="64KB")
    odd = {"hidden_size": 136, "intermediate_size": 200}  # 3-bit rows of either length end within a word
    made["w3a16-channel-ragged"] = Maker(groups(scheme(integer(3, None))), **odd)
    made["w3a16-channel-asym-ragged"] = Maker(groups(scheme(integer(3, None, False))), **odd)
    made["w4a16-g32-ragged"] = Maker(groups(scheme(integer(4, 32)), bypass_divisibility_checks=True), **odd)
    made["w4a16-lmhead"] = Maker(groups(scheme(integer(4, 32)), ignore=[]))
    embedding = scheme(integer(8, None), targets=["Embedding"])
    made["w4a16-embedding"] = Maker(groups(scheme(integer(4, 32)), embedding))
    return made


def float_makers() -> dict:
    made = {
        "fp8-static-tensor": Maker(preset("FP8"), data=True),
        "fp8-dynamic-channel": Maker(preset("FP8_DYNAMIC")),
        "fp8-block128": Maker(preset("FP8_BLOCK"), hidden_size=256, head_dim=64),
        "fp8-block64": Maker(groups(scheme(BLOCKS, FLOAT8 | PER_TOKEN))),
        "fp8-block64-ragged": Maker(
            groups(scheme(BLOCKS, FLOAT8 | PER_TOKEN)), hidden_size=160, intermediate_size=208
        ),
        "fp8-weightonly": Maker(groups(scheme(FLOAT8 | {"strategy": "channel"}))),
        "fp8-group32": Maker(
            groups(scheme(FLOAT8 | {"strategy": "group", "group_size": 32}, FLOAT8 | PER_TOKEN))
        ),
        "fp8-kvcache": Maker(preset("FP8", kv_cache_scheme=KEY_VALUE), data=True),
        "fp8-kvcache-head": Maker(
            preset("FP8", kv_cache_scheme={**KEY_VALUE, "strategy": "attn_head"}), data=True
        ),
        "fp8-sharded": Maker(preset("FP8_DYNAMIC"), shard="64KB"),
        "fp8-opt": Maker(preset("FP8_DYNAMIC"), kind="opt"),
        "fp8-qwen2tied": Maker(preset("FP8_DYNAMIC"), kind="qwen2-tied"),
    }
    for name in ("NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8", "MXFP8A16"):
        made[name.lower()] = Maker(preset(name), data=name == "NVFP4")
    attention, mlp = [r"re:.*self_attn\..*_proj$"], [r"re:.*mlp\..*_proj$"]
    made["regex-targets"] = Maker(
        preset("FP8_DYNAMIC", targets=mlp, ignore=[r"re:.*layers\.1\.mlp\.down_proj$"])
    )
    made["mixed-fp8-w4a16"] = Maker(
        groups(named("FP8_DYNAMIC", attention), scheme(integer(4, 32), targets=mlp))
    )
    made["mixed-w8a8-nvfp4a16"] = Maker(groups(named("W8A8", attention), named("NVFP4A16", mlp)))
    made["mixed-bits-pack"] = Maker(
        groups(scheme(integer(8, 32), targets=attention), scheme(integer(4, 32), targets=mlp))
    )
    return made


def moe_makers() -> dict:
    made = {}
    for kind in ("mixtral", "qwen3moe", "qwen2moe", "deepseek-v3", "glm4moe", "olmoe", "gptoss"):
        made[f"{kind}-w4a16"] = Maker(groups(scheme(integer(4, 32))), kind=kind)
        made[f"{kind}-fp8-dynamic"] = Maker(preset("FP8_DYNAMIC"), kind=kind)
    for kind in ("mixtral", "qwen3moe"):
        made[f"{kind}-w4a16-asym"] = Maker(groups(scheme(integer(4, 32, False))), kind=kind)
        made[f"{kind}-w8a8-int"] = Maker(preset("W8A8"), kind=kind)
        made[f"{kind}-fp8-static"] = Maker(preset("FP8"), kind=kind, data=True)
        made[f"{kind}-fp8-block64"] = Maker(groups(scheme(BLOCKS, FLOAT8 | PER_TOKEN)), kind=kind)
        made[f"{kind}-sharded-w4a16"] = Maker(groups(scheme(integer(4, 32))), kind=kind, shard="64KB")
        for name in ("NVFP4", "NVFP4A16", "MXFP4A16", "MXFP8"):
            made[f"{kind}-{name.lower()}"] = Maker(preset(name), kind=kind, data=name == "NVFP4")
    for kind in ("qwen2moe", "deepseek-v3", "glm4moe", "gptoss"):
        made[f"{kind}-w8a8-int"] = Maker(preset("W8A8"), kind=kind)
        made[f"{kind}-nvfp4a16"] = Maker(preset("NVFP4A16"), kind=kind)
    experts, attention = [r"re:.*experts\..*_proj$"], [r"re:.*self_attn\..*_proj$"]
    mixed = groups(named("FP8_DYNAMIC", attention), scheme(integer(4, 32), targets=experts))
    made["qwen3moe-mixed"] = Maker(mixed, kind="qwen3moe")
    made["qwen3moe-experts-only"] = Maker(groups(scheme(integer(4, 32), targets=experts)), kind="qwen3moe")
    made["qwen3moe-denselayer-w4a16"] = Maker(
        groups(scheme(integer(4, 32))), kind="qwen3moe", mlp_only_layers=[0]
    )
    return made


def main(output: Path, chosen: list[str]) -> None:
    found = {
        f"llmcompressor-{name}": maker
        for name, maker in {**integer_makers(), **float_makers(), **moe_makers()}.items()
    }
    found = {
        name: maker for name, maker in found.items() if not chosen or any(part in name for part in chosen)
    }
    with tempfile.TemporaryDirectory() as dense:
        for maker in found.values():
            maker.prepare(Path(dense))
        common.run(output, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
