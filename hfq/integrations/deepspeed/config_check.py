"""Checks of DeepSpeed and accelerate configs before a launch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfq.checkpoint.index import JSON_LIMIT
from hfq.checkpoint.small_file import read_small_file, read_yaml
from hfq.errors import HfqError, SetupError
from hfq.integrations.deepspeed.zero_config import refused_options

__all__ = ["check_config"]

_SAID_IN_THE_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)
"""Keys that accelerate (1.15, `utils/constants.py`) rejects next to `deepspeed_config_file`."""


def check_config(file: Path) -> list[HfqError]:
    """Returns the problems of a config.

    Args:
        file: A DeepSpeed config (`.json`) or an accelerate config (`.yaml`, `.yml`). The DeepSpeed config
            that an accelerate config names is checked, too.

    Returns:
        One error per problem, or an empty list if the config works with quantized checkpoints.

    Raises:
        SetupError: The file cannot be read, or has another suffix.
    """
    if file.suffix == ".json":
        return _check_deepspeed(_read(file), file)
    if file.suffix in (".yaml", ".yml"):
        return _check_accelerate(_read(file), file)
    raise SetupError(
        "The file suffix does not say which kind of config this is.",
        file=file,
        expected=".json for DeepSpeed, .yaml or .yml for accelerate",
        found=file.suffix or "no suffix",
        fix="Pass a config with one of these suffixes.",
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.suffix == ".json":
            found = json.loads(read_small_file(file, JSON_LIMIT).decode("utf-8"))
        else:
            found = read_yaml(file)
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise SetupError(
            "The config cannot be read.",
            file=file,
            expected=f"a {file.suffix[1:]} file",
            found=(error.strerror if isinstance(error, OSError) else None) or reason,
            fix="Pass a file that exists and contains valid JSON or YAML.",
        ) from error
    if not isinstance(found, dict):
        raise SetupError(
            "The config is not a mapping.",
            file=file,
            expected="keys and values",
            found=type(found).__name__,
            fix="Pass a DeepSpeed or accelerate config file.",
        )
    return found


def _check_deepspeed(config: Mapping[str, Any], file: Path) -> list[HfqError]:
    findings: list[HfqError] = list(refused_options(config))
    zero = config.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if stage != 3:
        findings.append(
            SetupError(
                "The ZeRO stage is not 3, so every rank loads the whole model.",
                file=file,
                expected='"stage": 3',
                found=stage,
                fix="Set zero_optimization.stage to 3 to shard quantized weights.",
            )
        )
    offload = zero.get("offload_param") if isinstance(zero, Mapping) else None
    if isinstance(offload, Mapping) and offload.get("device") == "nvme" and not offload.get("nvme_path"):
        findings.append(
            SetupError(
                "offload_param.device is nvme, but nvme_path is missing.",
                file=file,
                expected="offload_param.nvme_path",
                found="none",
                fix='Add "nvme_path". With HfqConfig(nvme_source="checkpoint"), hfq writes nothing there.',
            )
        )
    sections = [name for name in ("bf16", "bfloat16", "fp16") if _is_enabled(config.get(name))]
    if len(sections) > 1:
        findings.append(
            SetupError(
                "The config enables more than one dtype.",
                file=file,
                expected="bf16 or fp16",
                found=" and ".join(sections),
                fix="Enable only one of them.",
            )
        )
    return findings


def _is_enabled(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _check_accelerate(config: Mapping[str, Any], file: Path) -> list[HfqError]:
    kind, findings = config.get("distributed_type"), []
    if kind is False:
        return [
            SetupError(
                "distributed_type is false, because YAML reads NO without quotes as false.",
                file=file,
                expected='distributed_type: "NO"',
                found="NO without quotes",
                fix='Write distributed_type: "NO".',
            )
        ]
    if kind in ("FSDP", "MEGATRON_LM"):
        findings.append(
            SetupError(
                f"hfq does not shard under {kind}.",
                file=file,
                expected='DEEPSPEED, "NO", MULTI_CPU, or MULTI_GPU',
                found=kind,
                fix="Use ZeRO-3, for example configs/accelerate/zero3.yaml.",
            )
        )
    if kind != "DEEPSPEED":
        return list(findings)
    return [*findings, *_check_plugin(config.get("deepspeed_config"), file)]


def _check_plugin(plugin: Any, file: Path) -> list[HfqError]:
    if not isinstance(plugin, Mapping):
        return [
            SetupError(
                "distributed_type is DEEPSPEED, but deepspeed_config is missing.",
                file=file,
                expected="deepspeed_config",
                found="none",
                fix="Add deepspeed_config with a deepspeed_config_file.",
            )
        ]
    findings: list[HfqError] = []
    named = plugin.get("deepspeed_config_file")
    if plugin.get("zero3_init_flag") is not True and plugin.get("zero_stage", 3) == 3:
        findings.append(
            SetupError(
                "Every process would load the whole model before DeepSpeed shards it.",
                file=file,
                expected="zero3_init_flag: true",
                found=plugin.get("zero3_init_flag"),
                fix="Set zero3_init_flag to true.",
            )
        )
    if plugin.get("zero3_save_16bit_model") is True:
        findings.append(
            SetupError(
                "zero3_save_16bit_model would save quantized bytes as if they were floats.",
                file=file,
                expected="zero3_save_16bit_model: false",
                found="true",
                fix="Set it to false, and call save_pretrained on all ranks to save the model.",
            )
        )
    return findings if named is None else findings + _check_named_config(named, plugin, file)


def _check_named_config(named: str, plugin: Mapping, file: Path) -> list[HfqError]:
    """Returns the problems of the DeepSpeed config that an accelerate config names.

    Keys next to its name that accelerate rejects are problems, too.
    """
    findings: list[HfqError] = []
    rejected = [key for key in _SAID_IN_THE_FILE if key in plugin]
    if rejected:
        findings.append(
            SetupError(
                "accelerate rejects keys that belong in the file of deepspeed_config_file.",
                file=file,
                expected="none of these keys",
                found=", ".join(rejected),
                fix="Remove them here, and set them in the DeepSpeed config.",
            )
        )
    nested = next((path for path in (Path(named), file.parent / named) if path.is_file()), None)
    if nested is None:
        findings.append(
            SetupError(
                "The DeepSpeed config does not exist.",
                file=named,
                expected="a path relative to the current folder or to the accelerate config",
                found="no file",
                fix="Run the command from the folder that the path is relative to, or use an absolute path.",
            )
        )
        return findings
    return findings + _check_deepspeed(_read(nested), nested)
