"""Maker of AWQ checkpoints in autoawq's three layouts, with the logits of their weights.

autoawq's own packers write them. autoawq's package cannot be imported with current transformers, so its
modules are imported without its `__init__`. Run it with requirements-autoawq*.txt installed:

    python make_autoawq.py OUTPUT_DIR [PART_OF_A_NAME ...]
"""

import importlib.util
import json
import re
import sys
import types
from functools import partial
from pathlib import Path

import common
import torch
from safetensors.torch import save_file


def import_autoawq() -> None:
    """Registers packages without running their `__init__`. Their submodules import normally."""
    root = Path(next(iter(importlib.util.find_spec("awq").submodule_search_locations)))
    for name in ("awq", "awq.modules", "awq.modules.linear"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


import_autoawq()
from awq.modules.linear.gemm import WQLinear_GEMM  # noqa: E402
from awq.modules.linear.gemv import WQLinear_GEMV  # noqa: E402
from awq.modules.linear.gemv_fast import WQLinear_GEMVFast  # noqa: E402
from awq.utils.packing_utils import dequantize_gemm  # noqa: E402

PACKERS = {"gemm": WQLinear_GEMM, "gemv": WQLinear_GEMV, "gemv_fast": WQLinear_GEMVFast}
NO_UNPACKER = (
    "none: autoawq has no CPU code that unpacks this layout, so the weights are what its packer was given, "
    "in float32: "
    "(code - zero) * scale (gemv), code * scale + the stored qzeros (gemv_fast)"
)


def quantize(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes [out, in], scales, and zeros [out, groups], as `pseudo_quantize_tensor` does."""
    grouped = weight.float().reshape(weight.shape[0], -1, group)
    low, high = grouped.amin(dim=2), grouped.amax(dim=2)
    scales = ((high - low).clamp(min=1e-5) / 15).half().float()
    zeros = (-torch.round(low / scales)).clamp(0, 15)
    codes = (torch.round(grouped / scales[..., None]) + zeros[..., None]).clamp(0, 15)
    return codes.reshape(weight.shape), scales, zeros


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, version: str, group: int
) -> tuple[dict, torch.Tensor]:
    """Returns the tensors from autoawq's packer, and the exact weight that they represent."""
    group = weight.shape[1] if group == -1 else group
    codes, scales, zeros = quantize(weight, group)
    exact = ((codes.reshape(*scales.shape, group) - zeros[..., None]) * scales[..., None]).reshape(
        weight.shape
    )
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight.data = exact.clone()
    if bias is not None:
        linear.bias.data = bias.float()
    if version == "gemm":
        scales, zeros = scales.t().contiguous(), zeros.t().contiguous()
    packed = PACKERS[version].from_linear(linear, 4, group, scales=scales, zeros=zeros)
    tensors = {name: tensor.contiguous() for name, tensor in packed.state_dict().items()}
    if version == "gemv_fast":  # the file holds zero * scale rounded to float16
        shifts = tensors["qzeros"][: scales.shape[1]].t().float()[..., None]
        exact = (codes.reshape(*scales.shape, group) * scales[..., None] + shifts).reshape(weight.shape)
    check_codes(tensors, exact, version, group)
    return tensors, exact


def check_codes(tensors: dict[str, torch.Tensor], exact: torch.Tensor, version: str, group: int) -> None:
    """Checks that autoawq unpacks the exact weight, for its only layout that works on a CPU."""
    if version == "gemm":
        found = dequantize_gemm(
            tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), 4, group
        ).t()
        assert torch.equal(found, exact)


def is_quantized(name: str, router: bool = False) -> bool:
    """True if autoawq quantizes this weight. It quantizes all linear layers but Mixtral's routers."""
    kept = r"norm\.weight$" if router else r"norm\.weight$|\.gate\.weight$"
    return ".layers." in name and name.endswith(".weight") and not re.search(kept, name)


def make(
    folder: Path, kind: str = "llama", version: str = "gemm", group: int = 64, router: bool = False, **changes
):
    """Makes a checkpoint. Unquantized tensors are float16, since autoawq works on float16 models."""
    common.save_dense(folder, kind, **changes)
    dense = {name: tensor.half() for name, tensor in common.stored_tensors(folder).items()}
    stored, weights = dict(dense), dict(dense)
    for name in [name for name in dense if is_quantized(name, router)]:
        module = name.removesuffix(".weight")
        tensors, weights[name] = pack(dense[name], dense.get(f"{module}.bias"), version, group)
        del stored[name]
        stored.update({f"{module}.{local}": tensor for local, tensor in tensors.items()})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float16"
    kept = "gate" if not router and any(".experts." in name for name in dense) else None
    config["quantization_config"] = quantization_config(version, group, kept)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    common.write_reference(folder, weights, None if version == "gemm" else NO_UNPACKER)


def quantization_config(version: str, group: int, kept: str | None) -> dict:
    """Returns the output of autoawq's `AwqConfig.to_transformers_dict`."""
    return {
        "quant_method": "awq",
        "zero_point": True,
        "group_size": group,
        "bits": 4,
        "version": version,
        "modules_to_not_convert": [kept] if kept else None,
    }


def makers() -> dict:
    made = {f"{version}-g{group}": (version, group) for version in PACKERS for group in (32, 64, 128)}
    found = {name: partial(make, version=version, group=group) for name, (version, group) in made.items()}
    for version in PACKERS:
        # 320 = 10 groups of 32 need more than one word of zeros, and do not fill the last one.
        found[f"{version}-wide-g32"] = partial(make, version=version, group=32, intermediate_size=320)
        found[f"{version}-qwen2tied-g64"] = partial(make, kind="qwen2-tied", version=version)
        for kind in ("mixtral", "qwen3moe"):
            found[f"{version}-{kind}-g64"] = partial(make, kind=kind, version=version)
    found["gemm-gall"] = partial(make, group=-1)
    # autoawq quantizes the router of Qwen3-MoE, too.
    found["gemm-qwen3moe-router-g32"] = partial(
        make, kind="qwen3moe", group=32, router=True, num_experts=32, moe_intermediate_size=32
    )
    found["gemm-opt-g32"] = partial(make, kind="opt", group=32)
    return {f"autoawq-{name}": maker for name, maker in found.items()}


def main(output: Path, chosen: list[str]) -> None:
    found = {
        name: maker for name, maker in makers().items() if not chosen or any(part in name for part in chosen)
    }
    common.run(output, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
