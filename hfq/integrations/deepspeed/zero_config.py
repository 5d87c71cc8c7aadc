"""DeepSpeed config of a load.

It yields the dtype, the shard device, and errors for options that would corrupt quantized bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hfq.errors import SetupError

__all__ = ["ZeroConfig", "read_zero_config", "refused_options"]

_ZERO = "zero_optimization"
_KEPT = (_ZERO, "bf16", "bfloat16", "fp16", "aio", "data_types")
_PERSISTENCE = ("stage3_param_persistence_threshold", "param_persistence_threshold")
_DEFAULT_PERSISTENCE, _AUTO_PERSISTENCE = 100_000, 1 << 18
"""Persistence thresholds in elements: DeepSpeed's default, and a value for `auto`.

For `auto`, transformers fills in 10 × the hidden size, which is at most this value.
"""
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "neither bf16 nor fp16"}


@dataclass(frozen=True)
class _Refusal:
    """One DeepSpeed option that can corrupt quantized bytes.

    Attributes:
        section: Section of the config.
        names: Names of the option in that section.
        is_harmful: Function that returns True if a value is harmful.
        why: The effect of the option, as the end of a sentence.
        fix: The remedy for the error.
    """

    section: str
    names: tuple[str, ...]
    is_harmful: Callable[[Any], bool]
    why: str
    fix: str


def _is_on(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.lower() == "true")


def _is_more_than_one(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


_GATHER = (
    "stage3_gather_16bit_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)
_REFUSED = (
    _Refusal(
        _ZERO,
        ("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params"),
        _is_on,
        "gathers by adding floats, which changes quantized bytes",
        "Set it to false.",
    ),
    _Refusal(
        _ZERO,
        ("zero_quantized_weights",),
        _is_on,
        "quantizes bytes that are already quantized",
        "Set it to false.",
    ),
    _Refusal(
        _ZERO,
        ("zero_quantized_nontrainable_weights",),
        _is_on,
        "quantizes bytes that are already quantized",
        "Set it to false.",
    ),
    _Refusal(
        _ZERO,
        _GATHER,
        _is_on,
        "would save quantized bytes as if they were floats",
        "Set it to false, and call save_pretrained on all ranks to save the model.",
    ),
    _Refusal(
        _ZERO,
        ("zero_hpz_partition_size",),
        _is_more_than_one,
        "keeps a second shard of every parameter, which hfq does not support",
        "Set it to 1.",
    ),
    _Refusal(
        _ZERO,
        ("mics_shard_size",),
        _is_more_than_one,
        "shards by another rule, which hfq does not support",
        "Remove it.",
    ),
    _Refusal(
        "torch_autocast",
        ("enabled",),
        _is_on,
        "may gather parameters in another dtype, which changes quantized bytes",
        "Set torch_autocast.enabled to false, and load the model in the dtype that it computes in.",
    ),
    _Refusal(
        "tensor_parallel",
        ("autotp_size",),
        _is_more_than_one,
        "slices unquantized layers and leaves quantized layers whole",
        "Set it to 1.",
    ),
)


@dataclass(frozen=True)
class ZeroConfig:
    """Settings of an active ZeRO-3 config that a load needs.

    Attributes:
        options: The sections that concern parameters, in the form that `deepspeed.zero.Init` accepts. `auto`
            values of the dtype sections are resolved.
        dtype: The dtype that ZeRO runs in.
        shard_device: Device on which shards are stored: `device`, `cpu`, or `nvme`.
        nvme_path: The folder for swapped parameters, or None.
    """

    options: dict[str, Any]
    dtype: torch.dtype
    shard_device: str
    nvme_path: str | None

    @property
    def kept_numel(self) -> int:
        """Number of elements of the largest parameter that DeepSpeed keeps gathered after use."""
        found = next(
            (self.options[_ZERO][name] for name in _PERSISTENCE if name in self.options[_ZERO]),
            _DEFAULT_PERSISTENCE,
        )
        return _AUTO_PERSISTENCE if found == "auto" else int(found)

    def with_offload(self, **changes: Any) -> dict[str, Any]:
        """Returns a copy of the options with these values in `offload_param`."""
        options = copy.deepcopy(self.options)
        options[_ZERO]["offload_param"] = {**options[_ZERO].get("offload_param", {}), **changes}
        return options


def read_zero_config(dtype: torch.dtype) -> ZeroConfig:
    """Returns the settings of the active ZeRO-3 config.

    Args:
        dtype: The dtype that the model is loaded in.

    Raises:
        SetupError: An option would corrupt quantized bytes, or ZeRO runs in another dtype than `dtype`.
    """
    from transformers.integrations.deepspeed import deepspeed_config

    config = deepspeed_config()
    _check_options(config)
    options = {key: copy.deepcopy(config[key]) for key in _KEPT if isinstance(config.get(key), Mapping)}
    options["train_micro_batch_size_per_gpu"] = (
        1  # DeepSpeed requires a value, but nothing made from these options runs a batch
    )
    found = _running_dtype(options, dtype)
    if found != dtype:
        name = str(dtype).removeprefix("torch.")
        raise SetupError(
            f"The DeepSpeed config enables {_NAMES[found]}, but the model is loaded in {name}. Nothing was "
            f"loaded.",
            expected=f"a model in {str(found).removeprefix('torch.')}",
            found=name,
            fix=f"Pass dtype={found} to from_pretrained, or enable the dtype of the model in the DeepSpeed "
            f"config.",
        )
    offload = options[_ZERO].get("offload_param") or {}
    shard_device = str(offload.get("device", "none"))
    shard_device = "device" if shard_device in ("none", "None") else shard_device
    path = offload.get("nvme_path")
    return ZeroConfig(options, found, shard_device, str(path) if path is not None else None)


def _check_options(config: Mapping[str, Any]) -> None:
    for error in refused_options(config):
        raise error


def refused_options(config: Mapping[str, Any]) -> Iterator[SetupError]:
    """Yields an error for each option of a DeepSpeed config that would corrupt quantized bytes."""
    for refusal in _REFUSED:
        section = config.get(refusal.section)
        for name in refusal.names:
            if not isinstance(section, Mapping):
                continue
            if name in section and refusal.is_harmful(section[name]):
                yield SetupError(
                    f"The DeepSpeed option {refusal.section}.{name} {refusal.why}. Nothing was loaded.",
                    found=section[name],
                    expected="a value that leaves quantized bytes unchanged",
                    fix=refusal.fix,
                )


def _running_dtype(options: dict[str, Any], dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that ZeRO runs in, and resolves `auto` in `options` to `dtype`."""
    sections = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
    for name, meant in sections.items():
        section = options.get(name, {})
        if section.get("enabled") == "auto":
            section["enabled"] = dtype == meant
        for key in [key for key, value in section.items() if value == "auto"]:
            del section[key]
    enabled = [meant for name, meant in sections.items() if _is_on(options.get(name, {}).get("enabled"))]
    return enabled[0] if enabled else torch.float32
