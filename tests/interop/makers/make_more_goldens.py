"""Writer of further tests/data/goldens/<peer>-<variant>.safetensors.

The makers next to this file make a checkpoint of one layer for each. A file holds the stored tensors of one
module, and every fourth row of the maker's dequantized weight. The rows are float32, or are rounded once to
bfloat16 if the file would exceed 5 KiB. Run it in each environment in turn, with the peers that it has:

    python make_more_goldens.py bitsandbytes torchao quanto hqq transformers
    python make_more_goldens.py modelopt
    python make_more_goldens.py autoround
    python make_more_goldens.py mlx
    python make_more_goldens.py quark
    python make_more_goldens.py gptqmodel
"""

import argparse
import contextlib
import importlib
import io
import json
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from writing import stored

OUTPUT = Path(__file__).parents[2] / "data" / "goldens"
QUERY, KEY, OUTPUT_PROJECTION, EXPERTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "mlp.experts",
)
EMBEDDING = "model.embed_tokens"
LIMIT = 5 * 1024
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
NARROW = TINY | {"hidden_size": 32, "head_dim": 32}  # its o_proj is [32, 64]
ODD = TINY | {"hidden_size": 62}  # its rows end within a byte
FEW = {"hidden_size": 32, "intermediate_size": 64, "num_local_experts": 2, "num_hidden_layers": 1}
GROUPED = TINY | {"hidden_size": 160, "head_dim": 8}  # quanto forms no groups in rows of 128 or less


def bitsandbytes(m) -> dict[str, tuple]:
    return {
        "nf4-dq": (m.make(sizes=TINY, **m.DOUBLE), QUERY),
        "fp4-storage-bf16": (
            m.make(
                sizes=TINY,
                load_in_4bit=True,
                bnb_4bit_quant_type="fp4",
                bnb_4bit_quant_storage=torch.bfloat16,
            ),
            QUERY,
        ),
        "int8": (m.make(sizes=TINY, **m.INT8), QUERY),
    }


def torchao(m) -> dict[str, tuple]:
    return {
        "float8wo-e4m3-row": (m.make(m.E4M3, sizes=TINY), QUERY),
        "int8wo": (m.make(m.Int8WeightOnlyConfig(), sizes=TINY), QUERY),
        "intx3-g32-asym": (m.make(m.intx(3, 32, mapping_type=m.MappingType.ASYMMETRIC), sizes=TINY), QUERY),
    }


def quanto(m) -> dict[str, tuple]:
    return {
        "qfloat8-e5m2": (m.make(m.qfloat8_e5m2, sizes=TINY), QUERY),
        "qint4": (m.make(m.qint4, sizes=TINY), QUERY),
        "qint2-g32": (m.make(m.qint2, sizes=GROUPED), QUERY),
    }


def hqq(m) -> dict[str, tuple]:
    return {
        "4bit-g64": (m.make(4, 64, sizes=TINY), QUERY),
        "3bit-g64": (m.make(3, 64, sizes=TINY), QUERY),
        "2bit-g64-axis0": (m.make(2, 64, axis=0, sizes=TINY), QUERY),
    }


def modelopt(m) -> dict[str, tuple]:
    return {
        "fp8-2d-blockwise": (
            m.make(m.with_blocks(m.mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, 32), sizes=TINY),
            QUERY,
        ),
        "int4-awq": (m.make(m.with_blocks(m.mtq.INT4_AWQ_CFG, 32), sizes=NARROW), OUTPUT_PROJECTION),
        "w8a8-sq": (m.make(m.mtq.INT8_SMOOTHQUANT_CFG, sizes=TINY), QUERY),
        "w8a8": (m.make(m.mtq.INT8_DEFAULT_CFG, sizes=TINY), QUERY),
        "w8a16": (m.make(m.mtq.INT8_WEIGHT_ONLY_CFG, sizes=TINY), QUERY),
        "nvfp4": (m.make(m.mtq.NVFP4_DEFAULT_CFG, sizes=TINY), QUERY),
        "fp8-gptoss": (m.make(m.mtq.FP8_DEFAULT_CFG, "gpt_oss", sizes=FEW), EXPERTS),
        "nvfp4-gptoss": (m.make(m.mtq.NVFP4_DEFAULT_CFG, "gpt_oss", sizes=FEW), EXPERTS),
    }


def autoround(m) -> dict[str, tuple]:
    return {
        "w2g32": (m.make("W2A16G32", "auto_round", sizes=TINY), QUERY),
        "fp8-static": (m.make("FP8_STATIC", "auto_round", sizes=TINY), QUERY),
        "mxint4": (m.make("MXINT4", "auto_round", sizes=TINY), QUERY),
        "nvfp4-e5m3": (m.make("NVFP4_E5M3", "auto_round", sizes=TINY), QUERY),
    }


def quark(m) -> dict[str, tuple]:
    return {
        "fp8": (m.make("fp8", sizes=TINY), QUERY),
        "ptpc-fp8": (m.make("ptpc_fp8", sizes=TINY), QUERY),
        "int8": (m.make("int8", sizes=TINY), QUERY),
        "uint4-g32": (m.make("uint4_wo_32", sizes=TINY), QUERY),
        "int4-g32-order": (m.make("int4_wo_32", pack_method="order", sizes=TINY), QUERY),
        "uint4-channel": (m.make("uint4_wo_per_channel", sizes=TINY), QUERY),
        "int4-channel": (m.make("int4_wo_per_channel", sizes=TINY), QUERY),
        "int4-fp8": (m.make("int4_fp8", sizes=TINY), QUERY),
        "mxfp4": (m.make("mxfp4_weight_only", sizes=TINY), QUERY),
        "mxfp6-e3m2": (m.make("mxfp6_e3m2", sizes=TINY), QUERY),
        "mxfp6-e2m3": (m.make("mxfp6_e2m3", sizes=TINY), QUERY),
        "amdfp4": (m.make("amdfp4", sizes=TINY), QUERY),
        "amdfp4-g32": (m.make("amdfp4_g32", sizes=TINY), QUERY),
        "nvfp4": (m.make("nvfp4", sizes=TINY), QUERY),
    }


def transformers(m) -> dict[str, tuple]:
    return {
        "fp8-ragged": (m.fp8("llama", block=(24, 32), **TINY | {"hidden_size": 68}), QUERY),
        "mxfp4-gptoss": (lambda folder: m.mxfp4(folder, **FEW), EXPERTS),
        "bitnet-bitlinear": (m.bitnet("bitlinear", **TINY), QUERY),
        "bitnet-autobitlinear": (m.bitnet("autobitlinear", **TINY), QUERY),
        "gemma-4bit": (m.gemma("llama", 4, **TINY), QUERY),
        "gemma-2bit": (m.gemma("llama", 2, **ODD), QUERY),
        "gemma-embedding": (m.gemma("llama", 4, 4, 4, **TINY | {"vocab_size": 48}), EMBEDDING),
    }


def gptqmodel(m) -> dict[str, tuple]:
    def make(name: str):
        def maker(folder: Path) -> None:
            found = m.Maker(config=m.gguf(name), **TINY | {"num_key_value_heads": 1})
            found.prepare(folder.parent)
            found(folder)

        return maker

    return {f"gguf-{name}": (make(name), KEY) for name in ("q4_k", "q2_0")}


def mlx(m) -> dict[str, tuple]:
    return {
        "4bit-g64": (m.make(sizes=TINY), QUERY),
        "3bit-g32": (m.make(3, group=32, sizes=TINY), QUERY),
        **{
            mode: (m.make(bits, mode, sizes=TINY), QUERY)
            for mode, bits in (("mxfp4", 4), ("mxfp8", 8), ("nvfp4", 4))
        },
    }


PEERS: dict[str, Callable] = {
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    "quanto": quanto,
    "hqq": hqq,
    "modelopt": modelopt,
    "autoround": autoround,
    "quark": quark,
    "transformers": transformers,
    "gptqmodel": gptqmodel,
    "mlx": mlx,
}
PACKAGES = {
    "quanto": "optimum-quanto",
    "modelopt": "nvidia-modelopt",
    "autoround": "auto-round",
    "quark": "amd-quark",
}


def run(module, maker, folder: Path) -> dict[str, torch.Tensor]:
    """Makes the checkpoint, and returns the dequantized tensors that its reference would use."""
    seen = {}

    def take(_folder, dense, _method=None):
        seen.update(dense)
        return torch.ones(1)

    stand_ins = {"write_reference": take, "stock_error": lambda *_: "", "logits": lambda _: torch.ones(1)}
    with contextlib.ExitStack() as stack:
        for name in stand_ins.keys() & vars(module).keys():
            stack.enter_context(patch.object(module, name, stand_ins[name]))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        maker(folder)
    return seen


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def compact(value) -> str:
    return json.dumps(without_nulls(value), separators=(",", ":"))


def description(folder: Path, module: str, peer: str) -> dict[str, str]:
    """Returns the file's metadata: the config, and a peer's own schema of the module."""
    config = json.loads((folder / "config.json").read_text()).get("quantization_config")
    config = (
        {"quant_method": "mlx", **config} if peer == "mlx" else config
    )  # hfq assumes this method for mlx-lm, which names none
    found = {"quantization_config": compact(config), "rows": "every fourth"}
    found["peer"] = f"{PACKAGES.get(peer, peer)} {version(PACKAGES.get(peer, peer))}"
    if (folder / "quanto_qmap.json").exists():
        found["quanto_qmap"] = compact({"m": json.loads((folder / "quanto_qmap.json").read_text())[module]})
    with safe_open(folder / "model.safetensors", "pt") as stream:
        if schema := (stream.metadata() or {}).get(f"{module}.weight"):
            found["m.weight"] = json.dumps(json.loads(schema), separators=(",", ":"))
    return found


def cut(
    stored: dict[str, torch.Tensor], dense: dict[str, torch.Tensor], prefix: str
) -> tuple[dict, torch.Tensor]:
    """Returns the stored tensors of one module, named `m`, and its weight, [out, in]."""
    tensors = {
        name.replace(prefix, "m", 1): tensor
        for name, tensor in stored.items()
        if name.startswith(f"{prefix}.")
    }
    if not prefix.endswith(".experts"):
        return tensors, dense[f"{prefix}.weight"]
    down = {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith("m.down_proj") and "bias" not in name
    }
    return down, dense[f"{prefix}.down_proj"].transpose(1, 2)  # an unquantized expert is [in, out]


def write(name: str, peer: str, module, maker, local: str, output: Path) -> None:
    prefix = local if local == EMBEDDING else f"model.layers.0.{local}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        folder.mkdir()
        dense = run(module, maker, folder)
        tensors, weight = cut(stored(folder), dense, prefix)
        metadata = description(folder, prefix, peer)
    metadata |= {"in_features": str(weight.shape[-1]), "out_features": str(weight.shape[-2])}
    file = output / f"{name}.safetensors"
    expected = weight[..., ::4, :].contiguous().clone()
    save_file({**tensors, "expected": expected}, file, metadata)
    if file.stat().st_size > LIMIT:
        save_file({**tensors, "expected": expected.bfloat16()}, file, metadata)
    print(name, file.stat().st_size, tuple(weight.shape))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peers", nargs="+", choices=PEERS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    for peer in options.peers:
        module = importlib.import_module(f"make_{peer}")
        for variant, (maker, local) in PEERS[peer](module).items():
            write(f"{peer}-{variant}", peer, module, maker, local, options.output)


if __name__ == "__main__":
    main()
