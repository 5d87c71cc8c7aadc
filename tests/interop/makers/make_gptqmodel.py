"""Maker of GPTQ, AWQ, FP8, and GGUF checkpoints, with the logits of their weights.

gptqmodel quantizes and dequantizes the weights. Run it with tests/interop/requirements*.txt installed:

    python make_gptqmodel.py OUTPUT_DIR [PART_OF_A_NAME ...]
"""

import os
import re
import sys
import tempfile
from itertools import product
from pathlib import Path

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import common
import torch
from common import write_reference
from gptqmodel import GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear.gguf import GGUFTorchLinear
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.quantization.config import FP8Config, GGUFConfig
from gptqmodel.quantization.dtype import dequantize_fp8
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module
from transformers import AutoConfig, AutoModelForCausalLM

LAYOUTS = {"v1": "gptq", "v2": "gptq_v2"}
MOE_LAYOUTS = {"sym": {}, "asym-v2": {"sym": False, "format": "gptq_v2"}}


def dequantize_gptq(tensors: dict[str, torch.Tensor], config: dict) -> torch.Tensor:
    """Returns the weight [out, in] in float32, from gptqmodel's own module."""
    rows, out_features = tensors["qweight"].shape
    in_features = tensors["g_idx"].numel()
    linear = TorchLinear(
        bits=rows * 32 // in_features,
        group_size=-1,
        sym=config["sym"],
        desc_act=config["desc_act"],
        in_features=in_features,
        out_features=out_features,
        bias=False,
        register_buffers=True,
        format=config["format"],
    )
    for name in ("qweight", "qzeros", "g_idx", "scales"):
        setattr(linear, name, tensors[name].clone().float() if name == "scales" else tensors[name].clone())
    if config["checkpoint_format"] == "gptq":
        convert_gptq_v1_to_v2_format_module(linear, bits=linear.bits, pack_dtype=torch.int32)
    return TorchLinear.dequantize_weight(linear.eval()).t()


def dequantize_awq(tensors: dict[str, torch.Tensor], config: dict) -> torch.Tensor:
    group = tensors["qweight"].shape[0] // tensors["scales"].shape[0]
    weight = dequantize_gemm(
        tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), config["bits"], group
    )
    return weight.t()


def dequantize_float8(tensors: dict[str, torch.Tensor], config: dict) -> torch.Tensor:
    axis = None if config["weight_scale_method"] == "block" else 0
    return dequantize_fp8(
        tensors["weight"], scale_inv=tensors["weight_scale_inv"], axis=axis, target_dtype=torch.float32
    )


def dequantize_gguf(tensors: dict[str, torch.Tensor], config: dict) -> torch.Tensor:
    """Returns the weight [out, columns of whole blocks] in float32, from gptqmodel's own module."""
    rows, nbytes = tensors["qweight"].shape
    kind = GGUFConfig(bits=config["bits"], format=config["format"]).runtime_bits
    linear = GGUFTorchLinear(kind, -1, True, False, 32, rows, bias=False, register_buffers=False)
    columns = nbytes // linear.gguf_type_size * linear.gguf_block_size
    linear = GGUFTorchLinear(kind, -1, True, False, columns, rows, bias=False, register_buffers=True)
    linear.qweight = tensors["qweight"].clone()
    return linear.dequantize_weight(dtype=torch.float32).t()


DEQUANTIZE = {
    "gptq": dequantize_gptq,
    "awq": dequantize_awq,
    "fp8": dequantize_float8,
    "gguf": dequantize_gguf,
}


def overrides(module: str, config: dict) -> dict:
    """Returns the options that the first matching rule of `dynamic` changes for a module."""
    rules = config.get("dynamic") or {}
    return next((rule for pattern, rule in rules.items() if re.match(pattern, module)), {})


def plain_shape(folder: Path, module: str) -> torch.Size:
    """Returns the shape of a weight in the unquantized model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return model.get_submodule(module).weight.shape


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """Returns every weight of the checkpoint under its name in the unquantized model."""
    config = common.quantization_config(folder)
    transposed = common.is_gpt2(folder)
    weights = {}
    for module, tensors in common.by_module(common.stored_tensors(folder)).items():
        packed = "qweight" in tensors or "weight_scale_inv" in tensors
        if packed:
            weight = DEQUANTIZE[config["quant_method"]](tensors, config | overrides(module, config))
            if config["quant_method"] == "gguf":  # without the padding
                weight = weight[:, : plain_shape(folder, module)[1]]
            tensors = {key: value for key, value in tensors.items() if key == "bias"}
            weights[f"{module}.weight"] = weight.t() if transposed else weight
        weights.update({f"{module}.{local}": tensor for local, tensor in tensors.items()})
    return weights


class Maker:
    """One checkpoint to make. `prepare` saves the unquantized model, and a call quantizes it."""

    def __init__(
        self,
        config,
        kind: str = "llama",
        edit: common.Edit | None = None,
        shard: str | None = None,
        **changes,
    ):
        self.config, self.kind, self.edit, self.changes = config, kind, edit, changes
        self.save_options = {"max_shard_size": shard} if shard else {}

    def prepare(self, parent: Path) -> None:
        """Saves the unquantized model, which must happen before any quantization.

        Afterwards, transformers saves the experts fused, because gptqmodel patches it.
        """
        words = (
            self.kind,
            self.edit and self.edit.__name__,
            *(f"{key}={value}" for key, value in self.changes.items()),
        )
        self.dense = parent / "-".join(filter(None, words))
        if not self.dense.exists():
            common.save_dense(self.dense, self.kind, self.edit, **self.changes)

    def __call__(self, folder: Path) -> None:
        torch.manual_seed(7)
        model = GPTQModel.load(str(self.dense), self.config(), device="cpu")
        model.quantize(
            None if isinstance(model.quantize_config, GGUFConfig) else common.calibration(), batch_size=1
        )
        model.save(str(folder), **self.save_options)
        (folder / "quant_log.csv").unlink(missing_ok=True)
        write_reference(folder, dequantized(folder))
        if self.edit is common.some_rows_positive:
            check_zeros(folder)


def check_zeros(folder: Path) -> None:
    """Checks that a checkpoint has a zero point of 0, which is its purpose.

    It is stored as 0 (v2), or as a field of all ones (v1).
    """
    qzeros = common.stored_tensors(folder)["model.layers.0.self_attn.q_proj.qzeros"]
    config = common.quantization_config(folder)
    stream = (qzeros[..., None] >> torch.arange(32)) & 1
    fields = (stream.reshape(len(qzeros), -1, config["bits"]) << torch.arange(config["bits"])).sum(dim=2)
    wanted = 2 ** config["bits"] - 1 if config["checkpoint_format"] == "gptq" else 0
    if not (fields == wanted).any():
        raise RuntimeError(f"{folder.name} has no zero-point of 0")


def gptq(**options):
    """Returns a function that makes GPTQ configs, because gptqmodel changes its config."""
    if options.get("group_size") == -1:
        options["act_group_aware"] = False
    return lambda: QuantizeConfig(**{"bits": 4, "group_size": 32, "offload_to_disk": False, **options})


def gptq_makers() -> dict:
    made = {}
    for bits, group, sym, (version, layout) in product(
        (2, 3, 4, 8), (32, 64, -1), (True, False), LAYOUTS.items()
    ):
        name = f"gptq-w{bits}g{group if group > 0 else 'all'}-{'sym' if sym else 'asym'}-{version}"
        made[name] = Maker(config=gptq(bits=bits, group_size=group, sym=sym, format=layout))
    for bits, (version, layout) in product((2, 3, 4, 8), LAYOUTS.items()):
        options = gptq(bits=bits, sym=False, format=layout)
        made[f"gptq-w{bits}g32-zero0-{version}"] = Maker(config=options, edit=common.some_rows_positive)
    made["gptq-w4g32-descact"] = Maker(config=gptq(desc_act=True))
    made["gptq-w4gall-descact-asym-v2"] = Maker(
        config=gptq(group_size=-1, desc_act=True, sym=False, format="gptq_v2")
    )
    for bits in (3, 5, 6, 7):
        made[f"gptqp-w{bits}g32"] = Maker(config=gptq(bits=bits, format="gptq_p"))
    made["gptqp-w5g32-asym"] = Maker(config=gptq(bits=5, format="gptq_p", sym=False))
    made["gptq-opt-w4g32"] = Maker(kind="opt", config=gptq())
    made["gptq-opt-w4g32-asym-v2"] = Maker(kind="opt", config=gptq(sym=False, format="gptq_v2"))
    made["gptq-qwen2tied-w4g32"] = Maker(kind="qwen2-tied", config=gptq())
    made["gptq-gpt2-w4g32"] = Maker(kind="gpt2", config=gptq())
    made["gptq-lmhead-w4g32"] = Maker(config=gptq(lm_head=True))
    overrides = {
        r"-:.*layers\.1\.self_attn\.o_proj": {},
        r"+:.*down_proj": {"bits": 8, "group_size": 64},
        r".*k_proj": {"bits": 2},
    }
    made["gptq-dynamic-w4g32"] = Maker(config=gptq(dynamic=overrides))
    made["gptq-sharded-w4g32"] = Maker(config=gptq(), shard="64KB")
    return made


def moe_makers() -> dict:
    made = {}
    for kind in ("mixtral", "qwen3moe", "qwen2moe", "deepseek-v3", "glm4moe", "olmoe"):
        for layout, options in MOE_LAYOUTS.items():
            made[f"gptq-{kind}-w4g32-{layout}"] = Maker(kind=kind, config=gptq(**options))
    for version, layout in LAYOUTS.items():
        zeros = gptq(sym=False, format=layout)
        made[f"gptq-mixtral-w4g32-zero0-{version}"] = Maker(
            kind="mixtral", config=zeros, edit=common.some_rows_positive
        )
    for kind in ("mixtral", "qwen3moe"):
        made[f"gptq-{kind}-w3g32"] = Maker(kind=kind, config=gptq(bits=3))
        made[f"gptq-{kind}-w4g32-descact"] = Maker(kind=kind, config=gptq(desc_act=True))
        made[f"gptq-{kind}-sharded-w4g32"] = Maker(kind=kind, config=gptq(), shard="64KB")
        made[f"awq-{kind}-g32"] = Maker(kind=kind, config=awq(32))
        made[f"fp8-{kind}-row"] = Maker(kind=kind, config=float8("row"))
        made[f"gptq-{kind}-w2g32"] = Maker(kind=kind, config=gptq(bits=2))
        made[f"gptqp-{kind}-w5g32"] = Maker(kind=kind, config=gptq(bits=5, format="gptq_p"))
        made[f"fp8-{kind}-block"] = Maker(kind=kind, config=float8("block", weight_block_size=[64, 64]))
    made["awq-qwen2moe-g32"] = Maker(kind="qwen2moe", config=awq(32))
    made["gptq-qwen3moe-w8gall"] = Maker(kind="qwen3moe", config=gptq(bits=8, group_size=-1))
    overrides = {r"-:.*experts\.3\..*": {}, r"+:.*experts\.\d+\.down_proj": {"bits": 8, "group_size": 64}}
    made["gptq-qwen3moe-dynamic"] = Maker(kind="qwen3moe", config=gptq(dynamic=overrides))
    made["gptq-qwen3moe-denselayer"] = Maker(kind="qwen3moe", config=gptq(), mlp_only_layers=[0])
    return made


def awq(group: int, **options):
    fixed = {"bits": 4, "group_size": group, "method": "awq", "offload_to_disk": False}
    return lambda: QuantizeConfig(**{**fixed, "format": "gemm", **options})


def float8(method: str, **options):
    return lambda: FP8Config(weight_scale_method=method, offload_to_disk=False, **options)


def gguf(name: str, **options):
    return lambda: GGUFConfig(bits=name, offload_to_disk=False, **options)


def other_makers() -> dict:
    made = {f"awq-gemm-g{group}": Maker(config=awq(group)) for group in (32, 128)}
    made["awq-gemm-g32-asym"] = Maker(config=awq(32, sym=False))
    for bits in (2, 3, 5, 6, 7, 8):
        made[f"awq-gemm-w{bits}g32"] = Maker(config=awq(32, bits=bits, sym=False))
    made["awq-gemv-g64"] = Maker(config=awq(64, format="gemv"))
    made["awq-gemvfast-g64"] = Maker(config=awq(64, format="gemv_fast"))
    for method in ("row", "tensor"):
        made[f"fp8-{method}"] = Maker(config=float8(method))
    made["fp8-row-dynamic"] = Maker(config=float8("row", dynamic={r"-:.*down_proj": {}}))
    made["fp8-block"] = Maker(config=float8("block", weight_block_size=[64, 64]))
    for name in ("q1_0", "q2_0", "q4_0", "q8_0", "q4_k_m", "q5_k", "q6_k"):
        made[f"gguf-{name}"] = Maker(config=gguf(name))
    overrides = {r".*down_proj": {"bits": 8, "format": "q_0"}, r"-:.*o_proj": {}}
    made["gguf-dynamic"] = Maker(config=gguf("q4_k_m", dynamic=overrides))
    made["gguf-mixtral-q4_0"] = Maker(kind="mixtral", config=gguf("q4_0"))
    made["fp8-row-e5m2"] = Maker(config=float8("row", format="float8_e5m2"))
    return made


def main(output: Path, chosen: list[str]) -> None:
    found = {
        f"gptqmodel-{name}": maker
        for name, maker in {**gptq_makers(), **moe_makers(), **other_makers()}.items()
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
