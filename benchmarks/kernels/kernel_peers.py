"""Other tools' products with quantized weights on a CPU, for all installed tools.

Each tool uses its own layout of one weight.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.kernels.ggml import GgmlLinear, find_package

__all__ = ["GGML", "GPTQMODEL", "PEER", "PEERS", "REPACKED", "make_peers", "missing_peers"]

PEER, GPTQMODEL, GGML = "torch int4pack", "gptqmodel", "ggml"
REPACKED = "Q4_K repack"
"""ggml's type with 4.5 bits per weight, rearranged for the processor.

Its products round activations to 8 bits in groups of 256.
"""

Call = Callable[[torch.Tensor], object]


def make_peers(dense: torch.Tensor) -> dict[tuple[str, str], tuple[int, Call]]:
    """Returns (tool, stored type) → (bytes of its weight, its product with bfloat16 activations).

    Only tools that run here are included.

    Args:
        dense: The weight, bfloat16 [out_features, in_features].
    """
    found = {}
    for (tool, weights), (package, make) in PEERS.items():
        if not _is_installed(package):
            continue
        try:
            nbytes, call = make(dense)
            call(torch.zeros(1, dense.shape[1], dtype=torch.bfloat16))
        except (
            AttributeError,
            ImportError,
            NotImplementedError,
            OSError,
            RuntimeError,
            TypeError,
            ValueError,
        ):
            continue  # another version, or an unsupported processor
        found[tool, weights] = nbytes, call
    return found


def missing_peers(measured: Mapping[tuple[str, str], object]) -> dict[str, str]:
    """Returns tool → "not installed" or "does not run here", for tools without measurements."""
    tools = {tool: package for (tool, _), (package, _) in PEERS.items()}
    return {
        tool: "does not run here" if _is_installed(package) else "not installed"
        for tool, package in tools.items()
        if all(tool != name for name, _ in measured)
    }


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _torch_int4(dense: torch.Tensor) -> tuple[int, Call]:
    """Returns torch's own 4-bit product, with the weight converted for it."""
    out_features, in_features = dense.shape
    codes = torch.randint(0, 16, (out_features, in_features), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.rand(in_features // 128, out_features, 2).to(torch.bfloat16)
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    return packed.nbytes + scales.nbytes, lambda activations: multiply(activations, packed, 128, scales)


def _bitsandbytes_nf4(dense: torch.Tensor) -> tuple[int, Call]:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(
        dense.shape[1],
        dense.shape[0],
        bias=False,
        compute_dtype=torch.bfloat16,
        compress_statistics=False,
        quant_type="nf4",
    )
    layer.weight = bitsandbytes.nn.Params4bit(
        dense.clone(), requires_grad=False, quant_type="nf4", compress_statistics=False
    )
    return dense.numel() // 2 + dense.numel() // 64 * 4, layer.to("cpu").eval()


def _bitsandbytes_int8(dense: torch.Tensor) -> tuple[int, Call]:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear8bitLt(
        dense.shape[1], dense.shape[0], bias=False, has_fp16_weights=False, threshold=6.0
    )
    layer.weight = bitsandbytes.nn.Int8Params(dense.clone(), requires_grad=False, has_fp16_weights=False)
    return dense.numel() + 4 * dense.shape[0], layer.to("cpu").eval()


def _gptqmodel(dense: torch.Tensor) -> tuple[int, Call]:
    """Returns the layer that gptqmodel uses for a symmetric GPTQ checkpoint on this processor."""
    from gptqmodel.utils.importer import hf_select_quant_linear_v2

    from hfq.formats.gptq import Gptq

    out_features, in_features = dense.shape
    kind = hf_select_quant_linear_v2(
        bits=4,
        group_size=128,
        desc_act=False,
        sym=True,
        format="gptq_v2",
        quant_method="gptq",
        dtype=torch.bfloat16,
        pack=False,
        device_map="cpu",
    )
    layer = kind(
        bits=4,
        group_size=128,
        sym=True,
        desc_act=False,
        in_features=in_features,
        out_features=out_features,
        bias=False,
    )
    tensors = Gptq(4, 128, True, "stored").quantize(dense.to(torch.float32))
    for name, tensor in tensors.items():
        layer.register_buffer(name, tensor)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    layer = layer.eval().to(torch.bfloat16)
    layer.post_init()
    return nbytes, layer


def _quanto(name: str, bits: int) -> Callable[[torch.Tensor], tuple[int, Call]]:
    def make(dense: torch.Tensor) -> tuple[int, Call]:
        from optimum import quanto

        model = torch.nn.Sequential(_plain(dense))
        quanto.quantize(model, weights=getattr(quanto, name))
        quanto.freeze(model)
        groups = dense.numel() // 128 * 4 if bits < 8 else 2 * dense.shape[0]
        return dense.numel() * bits // 8 + groups, model.requires_grad_(False)

    return make


def _torchao_int8(dense: torch.Tensor) -> tuple[int, Call]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = torch.nn.Sequential(_plain(dense))
    quantize_(model, Int8WeightOnlyConfig())
    return dense.numel() + 2 * dense.shape[0], model.requires_grad_(False)


def _ggml(name: str, repack: bool) -> Callable[[torch.Tensor], tuple[int, Call]]:
    def make(dense: torch.Tensor) -> tuple[int, Call]:
        layer = GgmlLinear(dense, name, repack)
        return layer.nbytes, layer

    return make


def _plain(dense: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(dense.shape[1], dense.shape[0], bias=False, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(dense.clone(), requires_grad=False)
    return layer


PEERS: dict[tuple[str, str], tuple[str, Callable[[torch.Tensor], tuple[int, Any]]]] = {
    (PEER, "int4 g128"): ("torch", _torch_int4),
    (GPTQMODEL, "gptq4 g128"): ("gptqmodel", _gptqmodel),
    ("bitsandbytes", "nf4"): ("bitsandbytes", _bitsandbytes_nf4),
    ("bitsandbytes", "LLM.int8()"): ("bitsandbytes", _bitsandbytes_int8),
    ("optimum-quanto", "qint4"): ("optimum.quanto", _quanto("qint4", 4)),
    ("optimum-quanto", "qint8"): ("optimum.quanto", _quanto("qint8", 8)),
    ("optimum-quanto", "qfloat8"): ("optimum.quanto", _quanto("qfloat8", 8)),
    ("torchao", "int8 weight-only, eager"): ("torchao", _torchao_int8),
    (GGML, REPACKED): (find_package(), _ggml("Q4_K", True)),
    (GGML, "Q4_0 repack"): (find_package(), _ggml("Q4_0", True)),
    (GGML, "Q8_0"): (find_package(), _ggml("Q8_0", False)),
}
"""(tool, stored type) → (package, function that makes its layer from a weight)."""
