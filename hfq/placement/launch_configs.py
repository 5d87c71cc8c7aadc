"""Code and config files for a placement.

Pure data: the `from_pretrained` call, the DeepSpeed config, and the accelerate config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["LIVE_ELEMENTS", "accelerate_yaml", "deepspeed_config", "loading_code"]

_PREFETCHED, _LIVE = 50_000_000, 500_000_000
LIVE_ELEMENTS = _PREFETCHED + _LIVE
"""Most elements, live and prefetched, that ZeRO-3 gathers on a device.

They follow from `deepspeed_config`.
"""

_AIO = {
    "block_size": 1048576,
    "queue_depth": 32,
    "intra_op_parallelism": 8,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}


def deepspeed_config(
    offload: str = "none", nvme_path: str | None = None, dtype: str = "bfloat16", batch: int = 1
) -> dict:
    """Returns a DeepSpeed config for inference under ZeRO-3.

    configs/deepspeed/README.md explains each value.

    Args:
        offload: Device of the shards: `none`, `cpu`, or `nvme`.
        nvme_path: Folder for swap files, for `nvme`; None for `.nvme`.
        dtype: Dtype that the model is loaded in.
        batch: Sequences per rank.
    """
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_prefetch_bucket_size": _PREFETCHED,
        "stage3_param_persistence_threshold": 16384,
        "stage3_max_live_parameters": _LIVE,
        "stage3_max_reuse_distance": 0,
        "stage3_gather_16bit_weights_on_model_save": False,
        "stage3_use_all_reduce_for_fetch_params": False,
        "zero_quantized_weights": False,
        "zero_quantized_nontrainable_weights": False,
    }
    if offload == "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if offload == "nvme":
        path = nvme_path or ".nvme"
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": path,
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 100_000_000,
        }
    sections = {"bfloat16": "bf16", "float16": "fp16"}
    config: dict[str, Any] = {sections[dtype]: {"enabled": True}} if dtype in sections else {}
    config["zero_optimization"] = zero
    if offload == "nvme":
        config["aio"] = dict(_AIO)
    return config | {"train_micro_batch_size_per_gpu": batch}


def accelerate_yaml(
    ranks: int, deepspeed_file: str | None = None, nodes: int = 1, on_cpu: bool = False
) -> str:
    """Returns an accelerate config, for `accelerate launch --config_file`.

    Args:
        ranks: Number of all processes.
        deepspeed_file: DeepSpeed config, for ZeRO-3; None for one process and a device map.
        nodes: Number of machines.
        on_cpu: True to use no accelerator.
    """
    kind = "DEEPSPEED" if deepspeed_file else '"NO" # quoted: YAML reads a bare NO as false'
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {kind}",
        f"num_machines: {nodes}",
        "machine_rank: 0",
        f"num_processes: {ranks}",
    ]
    if deepspeed_file:
        lines += [
            "deepspeed_config:",
            f"  deepspeed_config_file: {json.dumps(deepspeed_file)}",
            "  zero3_init_flag: true",
        ]
    else:
        lines += ['mixed_precision: "no"']
    lines += [f"use_cpu: {'true' if on_cpu else 'false'}"]
    return "\n".join(lines) + "\n"


def loading_code(
    path: str,
    dtype: str,
    max_memory: Mapping[str, int] | None,
    kv_dtype: str = "auto",
    revision: str | None = None,
    kv_device: str | None = None,
    quantize_output_head: str | None = None,
) -> str:
    """Returns the Python code that loads the model as planned.

    Args:
        path: Checkpoint.
        dtype: Dtype that the model computes in.
        max_memory: Bytes of weights and offload buffer that each device may hold; None for a load without a
            device map.
        kv_dtype: Dtype of the KV cache.
        revision: Branch, tag, or commit of the checkpoint on the Hub; None for a folder, or for the branch
            `main`.
        kv_device: `"cpu"` or `"disk"` for an offloaded KV cache; None if it is where the model computes.
        quantize_output_head: Option of `HfqConfig`; None for no rounding.
    """
    head = "" if quantize_output_head is None else f'quantize_output_head="{quantize_output_head}"'
    limits = ""
    if max_memory is not None:
        keys = {
            device: device.partition(":")[2] or json.dumps(device)
            for device in max_memory
            if device != "disk"
        }
        limits = (
            ', device_map="auto", max_memory={'
            + ", ".join(f"{key}: {max_memory[device]}" for device, key in keys.items())
            + "}"
        )
    source = json.dumps(path) + ("" if revision is None else f", revision={json.dumps(revision)}")
    lines = [
        "from hfq import HfqConfig",
        "from transformers import AutoModelForCausalLM",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({source}, dtype={json.dumps(dtype)},",
        f"    quantization_config=HfqConfig({head}){limits})",
    ]
    if kv_device is not None:
        folder = ', "kv_cache"' if kv_device == "disk" else ""
        dtype_of_cache = "" if kv_dtype == "auto" else f", kv_cache_dtype={json.dumps(kv_dtype)}"
        lines[0] = "from hfq import HfqConfig, OffloadedCache"
        lines.append(f"cache = OffloadedCache(model{folder}{dtype_of_cache})")
        lines.append("# model.generate(..., past_key_values=cache)")
    elif kv_dtype != "auto":
        options = {
            "fp8": '{"backend": "fp8"}',
            "int4": '{"backend": "quanto", "nbits": 4}',
            "int2": '{"backend": "quanto", "nbits": 2}',
        }
        lines.append(
            f'# model.generate(..., cache_implementation="quantized", cache_config={options[kv_dtype]})'
        )
    return "\n".join(lines)
