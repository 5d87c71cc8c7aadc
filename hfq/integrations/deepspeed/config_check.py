"""What is wrong with a DeepSpeed or accelerate config, found before anything is launched with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
"""Keys that accelerate (1.15, `utils/constants.py`) refuses beside `deepspeed_config_file`."""


def check_config(file: Path) -> list[HfqError]:
    """Every finding on a config, most harmful first; none where it is fit for packed checkpoints.

    Args:
        file: A DeepSpeed config (`.json`), or an accelerate config (`.yaml`, `.yml`), whose DeepSpeed config
            is read too.

    Raises:
        SetupError: The file cannot be read, or is of neither kind.
    """
    if file.suffix == ".json":
        return _check_deepspeed(_read(file), file)
    if file.suffix in (".yaml", ".yml"):
        return _check_accelerate(_read(file), file)
    raise SetupError(
        "A config is told by its ending.",
        file=file,
        expected=".json of DeepSpeed, .yaml of accelerate",
        found=file.suffix or "none",
        fix="rename the file",
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            found = json.loads(text)
        else:
            import yaml

            found = yaml.safe_load(text)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise SetupError(
            "The config cannot be read.",
            file=file,
            expected=f"a {file.suffix[1:]} file",
            found=f"{type(error).__name__}: {reason}",
            fix="correct the file",
        ) from error
    if not isinstance(found, dict):
        raise SetupError(
            "The config is no mapping.",
            file=file,
            expected="keys and values",
            found=type(found).__name__,
            fix="correct it",
        )
    return found


def _check_deepspeed(config: Mapping[str, Any], file: Path) -> list[HfqError]:
    findings: list[HfqError] = list(refused_options(config))
    zero = config.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if stage != 3:
        findings.append(
            SetupError(
                "This is not stage 3: every rank loads the whole model.",
                file=file,
                expected='"stage": 3',
                found=stage,
                fix="set zero_optimization.stage to 3 to shard packed weights",
            )
        )
    offload = zero.get("offload_param") if isinstance(zero, Mapping) else None
    if isinstance(offload, Mapping) and offload.get("device") == "nvme" and not offload.get("nvme_path"):
        findings.append(
            SetupError(
                "Shards are to rest on NVMe, and no folder is named.",
                file=file,
                expected="offload_param.nvme_path",
                found="none",
                fix='add "nvme_path"; with HfqConfig(nvme_source="checkpoint") nothing is written there',
            )
        )
    sections = [name for name in ("bf16", "bfloat16", "fp16") if _is_enabled(config.get(name))]
    if len(sections) > 1:
        findings.append(
            SetupError(
                "Two dtypes are enabled.",
                file=file,
                expected="bf16 or fp16",
                found=" and ".join(sections),
                fix="disable one of them",
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
                "YAML reads a bare NO as false.",
                file=file,
                expected='distributed_type: "NO"',
                found="NO without quotes",
                fix="quote it",
            )
        ]
    if kind in ("FSDP", "MEGATRON_LM"):
        findings.append(
            SetupError(
                f"hfq does not shard under {kind}.",
                file=file,
                expected='DEEPSPEED, "NO" or MULTI_CPU and MULTI_GPU',
                found=kind,
                fix="use ZeRO-3: configs/accelerate/zero3.yaml",
            )
        )
    if kind != "DEEPSPEED":
        return list(findings)
    return [*findings, *_check_plugin(config.get("deepspeed_config"), file)]


def _check_plugin(plugin: Any, file: Path) -> list[HfqError]:
    if not isinstance(plugin, Mapping):
        return [
            SetupError(
                "DeepSpeed is asked for, and not configured.",
                file=file,
                expected="deepspeed_config",
                found="none",
                fix="add deepspeed_config with deepspeed_config_file",
            )
        ]
    findings: list[HfqError] = []
    named = plugin.get("deepspeed_config_file")
    if plugin.get("zero3_init_flag") is not True and plugin.get("zero_stage", 3) == 3:
        findings.append(
            SetupError(
                "Every process would load the whole model before it is sharded.",
                file=file,
                expected="zero3_init_flag: true",
                found=plugin.get("zero3_init_flag"),
                fix="set zero3_init_flag to true",
            )
        )
    if plugin.get("zero3_save_16bit_model") is True:
        findings.append(
            SetupError(
                "Packed bytes would be saved as if they were floats.",
                file=file,
                expected="zero3_save_16bit_model: false",
                found="true",
                fix="set it to false, and save with save_pretrained, called on all ranks",
            )
        )
    return findings if named is None else findings + _check_named_config(named, plugin, file)


def _check_named_config(named: str, plugin: Mapping, file: Path) -> list[HfqError]:
    """Checks the DeepSpeed config that an accelerate config names, and the keys next to its name."""
    findings: list[HfqError] = []
    beside = [key for key in _SAID_IN_THE_FILE if key in plugin]
    if beside:
        findings.append(
            SetupError(
                "accelerate refuses keys beside deepspeed_config_file that belong into that file.",
                file=file,
                expected="none of them",
                found=", ".join(beside),
                fix="remove them here, and set them in the DeepSpeed config",
            )
        )
    nested = next((path for path in (Path(named), file.parent / named) if path.is_file()), None)
    if nested is None:
        findings.append(
            SetupError(
                "The DeepSpeed config is not there.",
                file=named,
                expected="a file, relative to where the command is run",
                found="nothing",
                fix="run from the folder that the path is relative to, or give an absolute path",
            )
        )
        return findings
    return findings + _check_deepspeed(_read(nested), nested)
