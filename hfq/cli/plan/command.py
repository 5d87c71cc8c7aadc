"""`hfq plan CHECKPOINT`: where a model would rest, what it would take and how fast it would be, from headers
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["plan"]

_MACHINE, _WORK, _ZERO, _TRAINING = "Machine", "Work", "DeepSpeed ZeRO", "Training under ZeRO"


def _option(text: str, panel: str, *names: str, metavar: str | None = None, least: int | None = None):
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, min=least)


Source = Annotated[
    str | None,
    typer.Argument(
        metavar="CHECKPOINT", help="Its folder, or a model of the hub: organisation/model[@revision]."
    ),
]
Gpu = Annotated[
    list[str] | None,
    _option("24GiB, 24GiB×2, or a name of the catalog; may be repeated.", _MACHINE, metavar="SIZE"),
]
Cpu = Annotated[
    str | None, _option("Memory of the host; by default what is available here.", _MACHINE, metavar="SIZE")
]
Disk = Annotated[
    str | None, _option("Bytes that may stay on disk, 0 for none; by default all.", _MACHINE, metavar="SIZE")
]
Nvme = Annotated[
    str | None,
    _option("Allow ZeRO-3 shards on NVMe, with swap files in this folder.", _MACHINE, metavar="FOLDER"),
]
Profile = Annotated[
    Path | None, _option("What `hfq calibrate` wrote; by default that of this machine.", _MACHINE)
]
Catalog = Annotated[
    str | None,
    _option("Rank the machines of this file by cost; `shipped` for the examples.", _MACHINE, metavar="FILE"),
]
Budget = Annotated[
    str | None, _option("Name the best format whose weights fit so much memory.", _MACHINE, metavar="SIZE")
]
Batch = Annotated[int, _option("Sequences at once.", _WORK)]
Context = Annotated[int, _option("Tokens of each sequence, generated ones included.", _WORK)]
KvDtype = Annotated[str, _option("auto, or transformers' quantized caches: fp8, int4, int2.", _WORK)]
Dtype = Annotated[str, _option("The dtype to load in: auto, bfloat16, float16, float32.", _WORK)]
Launcher = Annotated[str, _option("device_map, or zero3.", _WORK, metavar="device_map|zero3")]
Out = Annotated[Path | None, _option("Write the configs that the plan implies into this folder.", _WORK)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with exact bytes.")]
Zero = Annotated[
    int | None, _option("Plan the states of DeepSpeed ZeRO of this stage, 0 to 3.", _ZERO, metavar="STAGE")
]
Ranks = Annotated[int, _option("Processes, one for each device.", _ZERO)]
RanksPerNode = Annotated[int | None, _option("Processes of one node; by default all.", _ZERO)]
OffloadParam = Annotated[str, _option("Where weights rest (stage 3).", _ZERO, metavar="none|cpu|nvme")]
OffloadOptimizer = Annotated[str, _option("Where optimizer states rest.", _ZERO, metavar="none|cpu|nvme")]
Optimizer = Annotated[
    str | None,
    _option("none, sgd, momentum, adam or adam8bit; by default adam where anything is trained.", _TRAINING),
]
LoraRank = Annotated[
    int | None, _option("Train LoRA adapters of this rank, and nothing else.", _TRAINING, least=1)
]
LoraTarget = Annotated[
    list[str] | None,
    _option("A module with an adapter (q_proj); may be repeated; by default every linear layer.", _TRAINING),
]
Parameters = Annotated[
    float | None, _option("Plan for so many 16-bit parameters, without a checkpoint.", _TRAINING)
]
Trainable = Annotated[float | None, _option("Train so many parameters more, and nothing else.", _TRAINING)]


def plan(
    path: Source = None,
    gpu: Gpu = None,
    cpu: Cpu = None,
    disk: Disk = None,
    nvme: Nvme = None,
    profile: Profile = None,
    catalog: Catalog = None,
    budget: Budget = None,
    batch: Batch = 1,
    context: Context = 2048,
    kv_dtype: KvDtype = "auto",
    dtype: Dtype = "auto",
    launcher: Launcher = "device_map",
    out: Out = None,
    as_json: AsJson = False,
    zero: Zero = None,
    ranks: Ranks = 1,
    ranks_per_node: RanksPerNode = None,
    offload_param: OffloadParam = "none",
    offload_optimizer: OffloadOptimizer = "none",
    optimizer: Optimizer = None,
    lora_rank: LoraRank = None,
    lora_target: LoraTarget = None,
    parameters: Parameters = None,
    trainable: Trainable = None,
) -> None:
    """Say what a model takes before it is loaded: bytes in each home, bytes moved for a token, how fast that
    is, and why.
    """
    from hfq.cli.plan.placement import PlacementOptions, plan_placement
    from hfq.cli.plan.zero_ranks import ZeroOptions, plan_zero

    if zero is not None or parameters is not None or path is None:
        unused: dict[str, object] = {
            "--gpu": gpu,
            "--cpu": cpu,
            "--disk": disk,
            "--nvme": nvme,
            "--catalog": catalog,
            "--budget": budget,
        }
        unused |= {"--profile": profile, "--out": out}
        _check_unused(unused, "plans a machine", "leave --zero out, or use --launcher zero3")
        given = None if path is None else Path(path)
        devices = ranks, ranks_per_node, optimizer, offload_param, offload_optimizer
        plan_zero(
            ZeroOptions(given, _stage(zero), *devices, lora_rank, lora_target or [], parameters, trainable),
            as_json,
        )
        return
    unused = {
        "--optimizer": optimizer,
        "--lora-rank": lora_rank,
        "--lora-target": lora_target,
        "--trainable": trainable,
    }
    unused |= {"--offload-param": offload_param != "none", "--offload-optimizer": offload_optimizer != "none"}
    if launcher == "device_map":
        _check_unused(
            {"--ranks": ranks != 1, "--ranks-per-node": ranks_per_node},
            "is for ZeRO-3",
            "add --launcher zero3",
        )
    _check_unused(unused, "belongs to DeepSpeed ZeRO", "add --zero 3")
    machine, files = (gpu or [], cpu, disk, nvme, profile), (catalog, budget, out)
    plan_placement(
        PlacementOptions(
            path, *machine, batch, context, kv_dtype, dtype, launcher, ranks, ranks_per_node, *files
        ),
        as_json,
    )


def _check_unused(options: dict[str, object], what: str, fix: str) -> None:
    """Refuses options that this kind of plan would have to ignore."""
    from hfq.errors import SetupError

    for name, value in options.items():
        if value:
            raise SetupError(
                f"{name} {what}, which this plan does not use.", expected=f"no {name}", found=name, fix=fix
            )


def _stage(zero: int | None) -> int:
    from hfq.errors import SetupError

    if zero is None:
        raise SetupError(
            "hfq plan does not know what to plan for.",
            expected="a checkpoint, or --parameters with --zero STAGE",
            found="neither",
            fix="pass CHECKPOINT for a device map, or --zero 3 for DeepSpeed",
        )
    return zero
