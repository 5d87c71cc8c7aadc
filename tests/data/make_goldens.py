"""Cuts `tests/data/goldens` out of other projects' checkpoints: 64 output rows of one module, and those rows as the peer's own
code dequantizes them. Run where the peers are installed (tests/interop/requirements.txt):

    PYTHONPATH=. python tests/data/make_goldens.py
"""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support import tiny_models

MODULE = "model.layers.0.self_attn.k_proj"
ROWS = 64
OUTPUT = tiny_models.DATA / "goldens"


def by_gptqmodel(path) -> torch.Tensor:
    from gptqmodel import BACKEND, GPTQModel

    peer = GPTQModel.load(
        str(path), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16
    )  # else it casts the F16 scales
    return peer.model.get_submodule(MODULE).dequantize_weight().t()


def by_compressed_tensors(path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model(torch.arange(1, 9)[None])  # compressed-tensors decompresses at the first forward
    return model.get_submodule(MODULE).weight


def by_transformers(path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(path).get_submodule(MODULE).weight


PEERS = {"gptqmodel-gptq": by_gptqmodel, "ct-fp8": by_compressed_tensors, "hf-fp8-block": by_transformers}


def cut(tensors: dict[str, torch.Tensor], bits: int) -> dict[str, torch.Tensor]:
    """The tensors of the first `ROWS` output rows."""
    packed = {"qweight": ROWS, "scales": ROWS, "qzeros": ROWS * bits // 32}
    result = {}
    for name, tensor in tensors.items():
        if name in packed:
            result[name] = tensor[:, : packed[name]]
        elif name == "weight" or (tensor.dim() == 2 and tensor.shape[1] == 1):
            result[name] = tensor[:ROWS]
        else:
            result[name] = tensor[:1] if name == "weight_scale_inv" else tensor
    return {name: tensor.contiguous().clone() for name, tensor in result.items()}


def main() -> None:
    OUTPUT.mkdir(exist_ok=True)
    for path in sorted(tiny_models.SHARED.iterdir()):
        dequantize = next((peer for prefix, peer in PEERS.items() if path.name.startswith(prefix)), None)
        if dequantize is None or "mixtral" in path.name or "sharded" in path.name:
            continue
        config = json.loads((path / "config.json").read_text())["quantization_config"]
        stored = load_file(path / "model.safetensors")
        tensors = {name.rpartition(".")[2]: t for name, t in stored.items() if name.startswith(f"{MODULE}.")}
        expected = dequantize(path)[:ROWS:8].detach().contiguous().clone()
        kept = {f"{MODULE}.{name}": tensor for name, tensor in cut(tensors, config.get("bits", 8)).items()}
        metadata = {"quantization_config": json.dumps(config), "rows": "every eighth"}
        save_file({**kept, "expected": expected}, OUTPUT / f"{path.name}.safetensors", metadata)
        print(path.name, expected.dtype)


if __name__ == "__main__":
    main()
