"""Writer of tests/data/goldens/<peer>-<variant>.safetensors.

Each file holds one tiny module that a peer has quantized, and rows of its weight from the peer's own code.

Run it in each peer's environment (see the maker of that peer):

    python make_goldens.py gptqmodel|llmcompressor|autoawq [PART_OF_A_NAME ...]
"""

import contextlib
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import common
import torch
from safetensors.torch import save_file

OUTPUT = Path(__file__).resolve().parents[2] / "data" / "goldens"
MODULE = "model.layers.0.self_attn.k_proj"  # [32, 64]
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
UNTOLD = ("observer", "observer_kwargs", "zp_dtype", "lm_head", "pack_dtype", "method")
Golden = tuple[dict[str, torch.Tensor], torch.Tensor, dict]  # stored tensors, weight, quantization config


def from_maker(maker, dequantize: Callable[[Path, dict, dict], torch.Tensor]) -> Golden:
    """Extracts a golden from a peer's checkpoint of a model with one tiny layer."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        maker.prepare(Path(temporary))
        maker(Path(temporary) / "packed")
        config = common.quantization_config(Path(temporary) / "packed")
        tensors = common.by_module(common.stored_tensors(Path(temporary) / "packed"))[MODULE]
        return tensors, dequantize(maker, tensors, config), config


def of_gptqmodel() -> dict[str, Callable[[], Golden]]:
    import make_gptqmodel as peer

    def golden(config, edit=None) -> Callable[[], Golden]:
        return lambda: from_maker(peer.Maker(config, edit=edit, **TINY), dequantize)

    def dequantize(maker, tensors, config) -> torch.Tensor:
        return peer.DEQUANTIZE[config["quant_method"]](tensors, config)

    zeros = common.some_rows_positive
    made = {f"gptqp-w{bits}g32": golden(peer.gptq(bits=bits, format="gptq_p")) for bits in (3, 5, 7)}
    made["gptq-w2g32-sym"] = golden(peer.gptq(bits=2))
    made["gptq-w4g32-zero0-v2"] = golden(peer.gptq(sym=False, format="gptq_v2"), zeros)
    for bits in (3, 4):
        made[f"gptq-w{bits}g32-zero0-v1"] = golden(peer.gptq(bits=bits, sym=False), zeros)
    made["gptq-w8gall-zero0-v1"] = golden(peer.gptq(bits=8, group_size=-1, sym=False), zeros)
    made["fp8-row"] = golden(peer.float8("row"))
    return made


def of_llmcompressor() -> dict[str, Callable[[], Golden]]:
    import make_llmcompressor as peer

    def golden(recipe, data: bool = False) -> Callable[[], Golden]:
        return lambda: from_maker(peer.Maker(recipe, data=data, **TINY), dequantize)

    def dequantize(maker, tensors, config) -> torch.Tensor:
        return peer.dequantize_module(tensors, maker.schemes[MODULE])

    blocks = {**peer.BLOCKS, "block_structure": [24, 48]}  # the last block of each dimension is incomplete
    token = peer.FLOAT8 | peer.PER_TOKEN
    return {
        "w3a16-g32-asym": golden(peer.groups(peer.scheme(peer.integer(3, 32, False)))),
        "w4a16-g32-asym": golden(peer.groups(peer.scheme(peer.integer(4, 32, False)))),
        "w8a8-int-asym": golden(peer.groups(peer.scheme(peer.integer(8, None, False), peer.TOKEN_INTEGER))),
        "w4afp8": golden(peer.groups(peer.scheme(peer.integer(4, 32), token))),
        "fp8-block-ragged": golden(peer.groups(peer.scheme(blocks, token))),
        "nvfp4": golden(peer.preset("NVFP4"), data=True),
        "mxfp4a16": golden(peer.preset("MXFP4A16")),
        "mxfp8": golden(peer.preset("MXFP8")),
    }


def of_autoawq() -> dict[str, Callable[[], Golden]]:
    import make_autoawq as peer

    def golden(version: str, group: int, rows: int = 32) -> Callable[[], Golden]:
        weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(7)) * 0.06
        return lambda: (
            *peer.pack(weight, None, version, group),
            peer.quantization_config(version, group, None),
        )

    return {
        "gemm-g32": golden("gemm", 32),
        "gemv-g32": golden("gemv", 32, 16),
        "gemv-g64": golden("gemv", 64, 16),
        "gemv_fast-g64": golden("gemv_fast", 64, 16),
    }


PEERS = {"gptqmodel": of_gptqmodel, "llmcompressor": of_llmcompressor, "autoawq": of_autoawq}


def short(config):
    """Drops config values without information on tensors: empty values, gptqmodel's run settings."""
    if not isinstance(config, dict):
        return config
    kept = {
        key: short(value) for key, value in config.items() if value not in (None, {}) and key not in UNTOLD
    }
    return {key: {"quantizer": value["quantizer"]} if key == "meta" else value for key, value in kept.items()}


def write(name: str, golden: Golden) -> None:
    tensors, weight, config = golden
    config = short(config)
    peer = name.partition("-")[0]
    metadata = {
        "quantization_config": json.dumps(config, separators=(",", ":")),
        "rows": "every fourth",
        "out_features": str(weight.shape[0]),
        "in_features": str(weight.shape[1]),
        "peer": f"{peer} {importlib.metadata.version(peer)}",
    }
    kept = {f"m.{local}": tensor.contiguous() for local, tensor in tensors.items()}
    save_file(
        {**kept, "expected": weight[::4].detach().contiguous().clone()},
        OUTPUT / f"{name}.safetensors",
        metadata,
    )
    print(f"\nwrote {name}: {(OUTPUT / f'{name}.safetensors').stat().st_size} bytes", flush=True)


def main(peer: str, chosen: list[str]) -> None:
    for variant, make in PEERS[peer]().items():
        if not chosen or any(part in variant for part in chosen):
            write(f"{peer}-{variant}", make())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
