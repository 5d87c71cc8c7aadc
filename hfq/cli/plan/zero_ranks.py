"""`hfq plan MODEL --zero-stage STAGE --num-processes N`: bytes on each rank and node."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hfq.cli.fitting_table import FittingTable
from hfq.tables import as_size

if TYPE_CHECKING:
    from hfq.cli.plan.options import PlanOptions
    from hfq.placement.zero.memory import ModelStates, ZeroMemory, ZeroSetup

__all__ = ["plan_zero"]


def plan_zero(options: PlanOptions) -> None:
    """Prints the bytes of a model under ZeRO on devices, in CPU memory, and on NVMe."""
    from hfq.errors import SetupError
    from hfq.placement.zero.memory import STAGES, estimate_zero

    _check_source(options)
    if options.lora_target and options.lora_rank is None:
        raise SetupError(
            "--lora-target requires --lora-rank.",
            expected="--lora-rank R",
            found="no rank",
            fix="Add --lora-rank 16.",
        )
    optimizer, zero = options.optimizer, options.zero_stage or 0
    trains = options.lora_rank is not None or options.trainable is not None
    trains = trains or (options.parameters is not None and optimizer != "none")
    optimizer = optimizer or ("adam" if trains else "none")
    offloads = {
        "offload_param": options.offload_param_device or "none",
        "offload_optimizer": options.offload_optimizer_device,
    }
    ranks = options.num_processes, options.per_machine
    setup = _setup(zero, *ranks, optimizer, offloads)
    states = _states(options, optimizer)
    others = [
        _setup(stage, *ranks, optimizer, _allowed(stage, offloads)) for stage in STAGES if stage != zero
    ]
    estimates = sorted(
        (estimate_zero(states, each) for each in (setup, *others)), key=lambda each: each.setup.stage
    )
    if options.as_json:
        print(json.dumps(_report(states, setup, estimates), indent=2))
    else:
        _print(states, setup, estimates)


def _check_source(options: PlanOptions) -> None:
    from hfq.errors import SetupError

    parameters, trainable = options.parameters, options.trainable
    if (options.model is None) == (parameters is None):
        raise SetupError(
            "hfq plan requires either MODEL or --parameters.",
            expected="MODEL or --parameters",
            found="both" if options.model else "neither",
            fix="Pass one of the two.",
        )
    if options.lora_rank and (trainable or parameters):
        raise SetupError(
            "--lora-rank requires MODEL, without --parameters or --trainable.",
            expected="MODEL --lora-rank R",
            found="--trainable" if trainable else "--parameters",
            fix="Omit --lora-rank, and pass the number of adapter parameters with --trainable.",
        )
    for name, value in (("--parameters", parameters), ("--trainable", trainable)):
        if value is not None and not 1 <= value <= 1e15:
            raise SetupError(
                f"{name} {value:g} is out of range.",
                expected="1 to 1e15",
                found=value,
                fix=f"Pass {name} 7.5e9, for example.",
            )


def _states(options: PlanOptions, optimizer: str) -> ModelStates:
    from dataclasses import replace

    from hfq.errors import SetupError
    from hfq.placement.zero.memory import ModelStates

    added = (int(options.trainable),) if options.trainable else ()
    if options.model is None:
        whole = (int(options.parameters or 0),)
        frozen, trained = (whole, added) if added or optimizer == "none" else ((), whole)
        return ModelStates(frozen=frozen, trained=trained, is_sum=True)
    from hfq.checkpoint import Checkpoint
    from hfq.cli.model_argument import model_headers
    from hfq.placement.zero.model_states import count_states

    everything = optimizer != "none" and options.lora_rank is None and not added
    with model_headers(options.model, options.revision) as found:
        checkpoint = Checkpoint.open(found.folder)
        states = count_states(
            checkpoint, options.lora_rank, options.lora_target or [], trains_unquantized=everything
        )
    if everything and states.quantized:
        raise SetupError(
            f"--optimizer {optimizer} has nothing to train: quantized weights are frozen.",
            expected="--lora-rank or --trainable",
            found=f"--optimizer {optimizer}",
            fix="Pass --lora-rank 16, or --optimizer none for inference.",
        )
    return replace(states, trained=states.trained + added)


def _setup(
    stage: int, ranks: int, ranks_per_node: int | None, optimizer: str, offloads: dict[str, str]
) -> ZeroSetup:
    from hfq.placement.zero.memory import ZeroSetup

    return ZeroSetup(stage, ranks, ranks_per_node, optimizer, **offloads)  # type: ignore[arg-type]


def _allowed(stage: int, offloads: dict[str, str]) -> dict[str, str]:
    """Returns the offloads that a stage supports, for the comparison of stages."""
    least = {"offload_param": 3, "offload_optimizer": 1}
    return {name: device if stage >= least[name] else "none" for name, device in offloads.items()}


def _report(states: ModelStates, setup: ZeroSetup, estimates: list[ZeroMemory]) -> dict:
    from dataclasses import asdict

    counted = {
        "quantized_modules": len(states.quantized),
        "quantized_nbytes": sum(states.quantized),
        "frozen_parameters": sum(states.frozen),
        "trained_parameters": sum(states.trained),
        "itemsize": states.itemsize,
    }
    return {
        "model": counted,
        "setup": asdict(setup),
        "stages": [estimate.to_dict() for estimate in estimates],
    }


def _print(states: ModelStates, setup: ZeroSetup, estimates: list[ZeroMemory]) -> None:
    from hfq.cli.console import EscapingConsole
    from hfq.placement.zero.memory import DEVICES, OPTIMIZERS

    console = EscapingConsole()
    console.print(
        f"{len(states.quantized)} quantized modules of {as_size(sum(states.quantized))}, "
        f"{sum(states.frozen):,} other frozen parameters, "
        f"{sum(states.trained):,} trained; {setup.optimizer} ({OPTIMIZERS[setup.optimizer]} B per parameter)",
        soft_wrap=True,
    )
    stored = (
        f"weights stored on {_device(setup.offload_param)}, optimizer states on "
        f"{_device(setup.offload_optimizer)}"
    )
    console.print(f"{setup.ranks} ranks, {setup.on_a_node} per node; {stored}", soft_wrap=True)
    chosen = next(estimate for estimate in estimates if estimate.setup.stage == setup.stage)
    table = FittingTable(f"stage {setup.stage}", *(f"{device} per rank" for device in DEVICES))
    for name, devices in chosen.parts.items():
        table.add_row(
            name.replace("packed", "quantized"), *(as_size(devices.get(device, 0)) for device in DEVICES)
        )
    console.print(table)
    stages = FittingTable("stage", *(f"{device} per {who}" for who in ("rank", "node") for device in DEVICES))
    for estimate in estimates:
        sizes = (*estimate.per_rank().values(), *estimate.per_node().values())
        stages.add_row(f"{estimate.setup.stage}{' ←' if estimate is chosen else ''}", *map(as_size, sizes))
    console.print(stages)
    note = (
        f", and {as_size(gathered)} or more of gathered weights"
        if (gathered := chosen.largest_row_nbytes)
        else ""
    )
    console.print(f"not counted on each device: activations, buckets, the KV cache{note}", soft_wrap=True)


def _device(offload: str) -> str:
    return "the device" if offload == "none" else offload
