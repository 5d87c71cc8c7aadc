"""`hfq plan CHECKPOINT --zero STAGE --ranks N`: what each rank and node would hold, from headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hfq.placement.zero_memory import ModelStates, ZeroMemory, ZeroSetup

__all__ = ["plan"]

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def plan(
    path: Annotated[Path | None, typer.Argument(metavar="CHECKPOINT", help="The checkpoint's folder.")] = None,
    zero: Annotated[int | None, typer.Option(metavar="STAGE", help="Plan for DeepSpeed ZeRO of this stage, 0 to 3.")] = None,
    ranks: Annotated[int, typer.Option(help="Processes, one for each device.")] = 1,
    ranks_per_node: Annotated[int | None, typer.Option(help="Processes of one node; by default all.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="none, sgd, momentum, adam or adam8bit; by default adam where anything is trained.")
    ] = None,
    offload_param: Annotated[str, typer.Option(metavar="none|cpu|nvme", help="Where weights rest (stage 3).")] = "none",
    offload_optimizer: Annotated[str, typer.Option(metavar="none|cpu|nvme", help="Where optimizer states rest.")] = "none",
    lora_rank: Annotated[int | None, typer.Option(min=1, help="Train LoRA adapters of this rank, and nothing else.")] = None,
    lora_target: Annotated[
        list[str] | None,
        typer.Option(help="A module with an adapter (q_proj); may be repeated; by default every linear layer."),
    ] = None,
    parameters: Annotated[float | None, typer.Option(help="Plan for so many 16-bit parameters, without a checkpoint.")] = None,
    trainable: Annotated[float | None, typer.Option(help="Train so many parameters more, and nothing else.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with exact bytes.")] = False,
) -> None:
    """Say what a model takes before it is loaded: bytes on each device, in CPU memory and on NVMe, per rank and node."""
    from hfq.errors import SetupError
    from hfq.placement.zero_memory import STAGES, estimate_zero

    if zero is None:
        raise SetupError(
            "hfq plan does not know what to plan for.", expected="--zero STAGE", found="no placement",
            fix="pass --zero 3; device maps are planned by from_pretrained itself, as yet",
        )  # fmt: skip
    _check_source(path, parameters, lora_rank, trainable)
    if lora_target and lora_rank is None:
        raise SetupError(
            "--lora-target names layers that get an adapter.",
            expected="--lora-rank R",
            found="no rank",
            fix="add --lora-rank 16",
        )
    trains = lora_rank is not None or trainable is not None or (parameters is not None and optimizer != "none")
    optimizer = optimizer or ("adam" if trains else "none")
    states = _states(path, parameters, optimizer, lora_rank, lora_target or [], trainable)
    offloads = {"offload_param": offload_param, "offload_optimizer": offload_optimizer}
    setup = _setup(zero, ranks, ranks_per_node, optimizer, offloads)
    others = [_setup(stage, ranks, ranks_per_node, optimizer, _allowed(stage, offloads)) for stage in STAGES if stage != zero]
    estimates = sorted((estimate_zero(states, each) for each in (setup, *others)), key=lambda each: each.setup.stage)
    if as_json:
        print(json.dumps(_report(states, setup, estimates), indent=2))
    else:
        _print(states, setup, estimates)


def _check_source(path: Path | None, parameters: float | None, lora_rank: int | None, trainable: float | None) -> None:
    from hfq.errors import SetupError

    if (path is None) == (parameters is None):
        raise SetupError(
            "hfq plan counts a checkpoint, or a number of parameters.", expected="CHECKPOINT or --parameters",
            found="both" if path else "neither", fix="pass one of the two",
        )  # fmt: skip
    if lora_rank and (trainable or parameters):
        raise SetupError(
            "--lora-rank counts the adapters of a checkpoint's layers.", expected="CHECKPOINT --lora-rank R",
            found="--trainable" if trainable else "--parameters", fix="give the adapters' parameters with --trainable alone",
        )  # fmt: skip
    for name, value in (("--parameters", parameters), ("--trainable", trainable)):
        if value is not None and not 1 <= value <= 1e15:
            raise SetupError(f"{name} is out of range.", expected="1 to 1e15", found=value, fix="pass a number such as 7.5e9")


def _states(
    path: Path | None, parameters: float | None, optimizer: str, lora_rank: int | None, targets: list[str], extra: float | None
) -> ModelStates:
    from dataclasses import replace

    from hfq.errors import SetupError
    from hfq.placement.zero_memory import ModelStates

    added = (int(extra),) if extra else ()
    if path is None:
        whole = (int(parameters or 0),)
        frozen, trained = (whole, added) if added or optimizer == "none" else ((), whole)
        return ModelStates(frozen=frozen, trained=trained, is_sum=True)
    from hfq.checkpoint import Checkpoint
    from hfq.placement.model_states import count_states

    everything = optimizer != "none" and lora_rank is None and not added
    states = count_states(Checkpoint.open(path), lora_rank, targets, trains_dense=everything)
    if everything and states.packed:
        raise SetupError(
            "Packed weights are not trained, so that an optimizer has nothing to do.", expected="--lora-rank or --trainable",
            found=f"--optimizer {optimizer}", fix="pass --lora-rank 16, or --optimizer none for inference",
        )  # fmt: skip
    return replace(states, trained=states.trained + added)


def _setup(stage: int, ranks: int, ranks_per_node: int | None, optimizer: str, offloads: dict[str, str]) -> ZeroSetup:
    from hfq.placement.zero_memory import ZeroSetup

    return ZeroSetup(stage, ranks, ranks_per_node, optimizer, **offloads)  # type: ignore[arg-type]


def _allowed(stage: int, offloads: dict[str, str]) -> dict[str, str]:
    """The offloads that a stage has, for the comparison of stages."""
    least = {"offload_param": 3, "offload_optimizer": 1}
    return {name: home if stage >= least[name] else "none" for name, home in offloads.items()}


def _report(states: ModelStates, setup: ZeroSetup, estimates: list[ZeroMemory]) -> dict:
    from dataclasses import asdict

    counted = {
        "packed_rows": len(states.packed), "packed_nbytes": sum(states.packed), "frozen_parameters": sum(states.frozen),
        "trained_parameters": sum(states.trained), "itemsize": states.itemsize,
    }  # fmt: skip
    return {"model": counted, "setup": asdict(setup), "stages": [estimate.to_dict() for estimate in estimates]}


def _print(states: ModelStates, setup: ZeroSetup, estimates: list[ZeroMemory]) -> None:
    from rich.console import Console
    from rich.table import Table

    from hfq.placement.zero_memory import HOMES, OPTIMIZERS

    console = Console(markup=False, highlight=False)
    console.print(
        f"{len(states.packed)} packed rows of {_size(sum(states.packed))}, {sum(states.frozen):,} other frozen parameters, "
        f"{sum(states.trained):,} trained; {setup.optimizer} ({OPTIMIZERS[setup.optimizer]} B a parameter)", soft_wrap=True,
    )  # fmt: skip
    resting = f"weights at rest on {_home(setup.offload_param)}, optimizer states on {_home(setup.offload_optimizer)}"
    console.print(f"{setup.ranks} ranks, {setup.on_a_node} on a node; {resting}", soft_wrap=True)
    chosen = next(estimate for estimate in estimates if estimate.setup.stage == setup.stage)
    table = Table(f"stage {setup.stage}", *(f"{home} per rank" for home in HOMES))
    for name, homes in chosen.parts.items():
        table.add_row(name, *(_size(homes.get(home, 0)) for home in HOMES))
    console.print(table)
    stages = Table("stage", *(f"{home} per {who}" for who in ("rank", "node") for home in HOMES))
    for estimate in estimates:
        sizes = (*estimate.per_rank().values(), *estimate.per_node().values())
        stages.add_row(f"{estimate.setup.stage}{' ←' if estimate is chosen else ''}", *map(_size, sizes))
    console.print(stages)
    note = f", and {_size(gathered)} or more of gathered weights" if (gathered := chosen.largest_row_nbytes) else ""
    console.print(f"not counted on each device: activations, buckets, the KV cache{note}", soft_wrap=True)


def _home(offload: str) -> str:
    return "the device" if offload == "none" else offload


def _size(nbytes: int) -> str:
    if nbytes == 0:
        return "-"
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if nbytes >= scale), (1, "B"))
    return f"{nbytes / scale:.4g} {unit}"
