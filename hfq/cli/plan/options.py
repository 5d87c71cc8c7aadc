"""Options of `hfq plan`, and their valid combinations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PlanOptions"]


@dataclass(frozen=True)
class PlanOptions:
    """Options as typed; each field is the option of its name."""

    model: str | None
    revision: str | None
    gpu: list[str] | None
    cpu: str | None
    disk: str | None
    profile: Path | None
    catalog: str | None
    suggest_format: str | None
    batch_size: int
    max_model_len: int
    kv_cache_dtype: str
    kv_cache_device: str | None
    num_assistant_tokens: int | None
    acceptance_rate: float | None
    routing: Path | None
    dtype: str
    quantize_output_head: str | None
    output_dir: Path | None
    as_json: bool
    zero_stage: int | None
    num_processes: int
    num_machines: int
    nvme_path: str | None
    offload_param_device: str | None
    offload_optimizer_device: str
    optimizer: str | None
    lora_rank: int | None
    lora_target: list[str] | None
    parameters: float | None
    trainable: float | None

    @property
    def counts_states(self) -> bool:
        """True for a plan that counts the bytes of every ZeRO stage, not of a placement."""
        if self.model is None or self.parameters is not None:
            return True
        is_given = self.offload_param_device is not None or any(self._training().values())
        return self.zero_stage is not None and (self.zero_stage != 3 or is_given)

    @property
    def per_machine(self) -> int | None:
        """Processes on each machine; None if all are on one.

        Raises:
            SetupError: The machines cannot share the processes evenly.
        """
        from hfq.errors import SetupError

        if self.num_machines == 1:
            return None
        if self.num_machines < 1 or self.num_processes % self.num_machines:
            raise SetupError(
                f"--num-machines {self.num_machines} cannot share --num-processes {self.num_processes} "
                "evenly.",
                expected="a multiple of the number of machines",
                found=self.num_processes,
                fix="Pass a --num-processes that is a multiple of --num-machines.",
            )
        return self.num_processes // self.num_machines

    def check(self) -> None:
        """Raises an error for an option that this kind of plan would ignore.

        Raises:
            SetupError: There is such an option, or nothing to plan for.
        """
        from hfq.errors import SetupError

        if self.counts_states:
            advice = "Omit it, or plan MODEL with --zero-stage 3, without training and offload options."
            _check_unused(self._machine() | self._host(), "plans for a machine", advice)
            if self.zero_stage is None:
                is_count = self.parameters is not None
                raise SetupError(
                    f"hfq plan requires {'a stage of ZeRO for --parameters' if is_count else 'a model'}.",
                    expected="MODEL, or --parameters with --zero-stage STAGE",
                    found="no --zero-stage" if is_count else "neither",
                    fix="Add --zero-stage 3."
                    if is_count
                    else "Pass MODEL, or --parameters with --zero-stage 3.",
                )
        elif self.zero_stage is None:
            _check_unused(self._training() | self._ranks(), "is for DeepSpeed ZeRO", "Add --zero-stage 3.")
            if self.suggest_format is not None:
                head = {"--quantize-output-head": self.quantize_output_head}
                _check_unused(head, "is for a placement", "Omit --quantize-output-head.")
            self._check_kv_cache_device()
            self._check_speculation()
            if self.routing is not None:
                _check_unused(self._other_plans(), "plans without --routing", "Omit --routing.")
        else:
            _check_unused(self._machine(), "is for a device map", "Omit --zero-stage.")

    def _check_kv_cache_device(self) -> None:
        from hfq.errors import SetupError, nearest

        device, allowed = self.kv_cache_device, ("cpu", "disk") if self.gpu else ("disk",)
        if device is None:
            return
        if device not in allowed:
            raise SetupError(
                f"--kv-cache-device {device} is not valid.{nearest(device, allowed)}",
                expected=" or ".join(allowed),
                found=device,
                fix="Pass --kv-cache-device disk, or cpu together with --gpu.",
            )
        _check_unused(self._other_plans(), "plans without --kv-cache-device", "Omit --kv-cache-device.")

    def _check_speculation(self) -> None:
        if self.num_assistant_tokens is None:
            rate = {"--acceptance-rate": self.acceptance_rate is not None}
            _check_unused(rate, "is for drafted tokens", "Add --num-assistant-tokens 4.")
            return
        others = {**self._other_plans(), "--batch-size": self.batch_size != 1}
        _check_unused(others, "plans without --num-assistant-tokens", "Omit --num-assistant-tokens.")

    def _other_plans(self) -> dict[str, object]:
        """Returns the options of plans that are not of one placement."""
        return {
            "--catalog": self.catalog,
            "--suggest-format": self.suggest_format,
            "a second --gpu": len(self.gpu or ()) > 1 or "×" in "".join(self.gpu or ()),
        }

    def _machine(self) -> dict[str, object]:
        return {
            "--kv-cache-device": self.kv_cache_device,
            "--num-assistant-tokens": self.num_assistant_tokens,
            "--acceptance-rate": self.acceptance_rate is not None,
            "--quantize-output-head": self.quantize_output_head,
            "--routing": self.routing,
            "--disk": self.disk,
            "--catalog": self.catalog,
            "--suggest-format": self.suggest_format,
        }

    def _host(self) -> dict[str, object]:
        return {
            "--gpu": self.gpu,
            "--cpu": self.cpu,
            "--nvme-path": self.nvme_path,
            "--profile": self.profile,
            "--output-dir": self.output_dir,
        }

    def _ranks(self) -> dict[str, object]:
        return {
            "--num-processes": self.num_processes != 1,
            "--num-machines": self.num_machines != 1,
            "--nvme-path": self.nvme_path,
            "--offload-param-device": self.offload_param_device,
        }

    def _training(self) -> dict[str, object]:
        return {
            "--optimizer": self.optimizer,
            "--lora-rank": self.lora_rank,
            "--lora-target": self.lora_target,
            "--trainable": self.trainable,
            "--offload-optimizer-device": self.offload_optimizer_device != "none",
        }


def _check_unused(options: Mapping[str, object], what: str, fix: str) -> None:
    from hfq.errors import SetupError

    for name, value in options.items():
        if value:
            raise SetupError(
                f"{name} {what}, which this plan does not use.", expected=f"no {name}", found=name, fix=fix
            )
