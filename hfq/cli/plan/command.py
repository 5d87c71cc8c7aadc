"""`hfq plan MODEL`: predicts placement, memory, and speed of a model, from headers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hfq.cli.model_argument import Revision
from hfq.cli.plan.options import PlanOptions

__all__ = ["plan"]

_MACHINE = "Machine"
_WORK = "Work"
_ZERO = "DeepSpeed ZeRO"
_TRAINING = "Training under ZeRO"


def _option(text: str, panel: str, metavar: str | None = None, least: int | None = None) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, metavar=metavar, min=least)


Source = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Folder, GGUF file, or Hub id of the checkpoint.")
]
Gpu = Annotated[
    list[str] | None,
    _option("Accelerator memory: 24GiB, 24GiB×2, or a catalog name; repeatable.", _MACHINE, metavar="SIZE"),
]
Cpu = Annotated[
    str | None, _option("CPU memory (default: available memory of this machine).", _MACHINE, metavar="SIZE")
]
Disk = Annotated[
    str | None,
    _option("Weights that may stay on disk, 0GB for none (default: all).", _MACHINE, metavar="SIZE"),
]
Profile = Annotated[
    Path | None,
    _option("Machine profile (default: the one of this machine).", _MACHINE, metavar="FILE"),
]
Catalog = Annotated[
    str | None,
    _option("Rank the machines of this file by cost; `shipped` for the examples.", _MACHINE, metavar="FILE"),
]
SuggestFormat = Annotated[
    str | None,
    _option("Suggest the best format whose weights fit in this much memory.", _MACHINE, metavar="SIZE"),
]
BatchSize = Annotated[int, _option("Sequences per batch.", _WORK)]
MaxModelLen = Annotated[int, _option("Tokens per sequence, including generated ones.", _WORK)]
KvCacheDtype = Annotated[
    str,
    _option(
        "Dtype of the KV cache: auto, fp8, int4, or int2; with --kv-cache-device auto, fp8, or int8.", _WORK
    ),
]
KvCacheDevice = Annotated[
    str | None,
    _option("Device of an offloaded KV cache (hfq.OffloadedCache).", _WORK, metavar="cpu|disk"),
]
NumAssistantTokens = Annotated[
    int | None,
    _option("Drafted tokens per pass (prompt lookup, assistant, or MTP layers).", _WORK, least=1),
]
AcceptanceRate = Annotated[
    float | None, _option("Share of drafted tokens that are accepted (default: 0.5, 0.7, and 0.9).", _WORK)
]
Routing = Annotated[
    Path | None,
    _option("Recording of hfq.record_routing (default: even routing).", _WORK, metavar="FILE"),
]
Dtype = Annotated[str, _option("Dtype to load in: auto, bfloat16, float16, or float32.", _WORK)]
QuantizeOutputHead = Annotated[
    str | None, _option("Round the output head on load: fp8 or int8.", _WORK, metavar="fp8|int8")
]
OutputDir = Annotated[
    Path | None, _option("Folder to write the planned configs and code into.", _WORK, metavar="FOLDER")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with exact bytes.")]
ZeroStage = Annotated[
    int | None, _option("Plan for DeepSpeed ZeRO at this stage, 0 to 3.", _ZERO, metavar="STAGE")
]
NumProcesses = Annotated[int, _option("Processes on all machines together, one per device.", _ZERO)]
NumMachines = Annotated[int, _option("Machines that share the processes evenly.", _ZERO)]
NvmePath = Annotated[
    str | None,
    _option("Allow ZeRO-3 shards on NVMe, with swap files in this folder.", _ZERO, metavar="FOLDER"),
]
OffloadParam = Annotated[
    str | None,
    _option("Device of stage 3 weights (default: the fastest that fits).", _ZERO, metavar="none|cpu|nvme"),
]
OffloadOptimizer = Annotated[str, _option("Device of the optimizer states.", _ZERO, metavar="none|cpu|nvme")]
Optimizer = Annotated[
    str | None,
    _option("none, sgd, momentum, adam, or adam8bit (default: adam for training).", _TRAINING),
]
LoraRank = Annotated[int | None, _option("Train only LoRA adapters of this rank.", _TRAINING, least=1)]
LoraTarget = Annotated[
    list[str] | None,
    _option("Module with an adapter, repeatable (default: every linear layer).", _TRAINING),
]
Parameters = Annotated[
    float | None,
    _option("Plan for this many 16-bit parameters, without a checkpoint.", _TRAINING, metavar="COUNT"),
]
Trainable = Annotated[
    float | None,
    _option("Train only this many additional parameters.", _TRAINING, metavar="COUNT"),
]


def plan(
    model: Source = None,
    revision: Revision = None,
    gpu: Gpu = None,
    cpu: Cpu = None,
    disk: Disk = None,
    profile: Profile = None,
    catalog: Catalog = None,
    suggest_format: SuggestFormat = None,
    batch_size: BatchSize = 1,
    max_model_len: MaxModelLen = 2048,
    kv_cache_dtype: KvCacheDtype = "auto",
    kv_cache_device: KvCacheDevice = None,
    num_assistant_tokens: NumAssistantTokens = None,
    acceptance_rate: AcceptanceRate = None,
    routing: Routing = None,
    dtype: Dtype = "auto",
    quantize_output_head: QuantizeOutputHead = None,
    output_dir: OutputDir = None,
    as_json: AsJson = False,
    zero_stage: ZeroStage = None,
    num_processes: NumProcesses = 1,
    num_machines: NumMachines = 1,
    nvme_path: NvmePath = None,
    offload_param_device: OffloadParam = None,
    offload_optimizer_device: OffloadOptimizer = "none",
    optimizer: Optimizer = None,
    lora_rank: LoraRank = None,
    lora_target: LoraTarget = None,
    parameters: Parameters = None,
    trainable: Trainable = None,
) -> None:
    """Predicts memory use and speed of a model from its headers, without reading a weight.

    With `--zero-stage 3` alone, hfq picks the device of the shards and predicts inference.
    Another stage, an offload device, or training counts the bytes of every stage instead.
    """
    options = PlanOptions(**locals())  # each parameter is the field of its name
    from hfq.cli.plan.placement import plan_placement
    from hfq.cli.plan.zero_ranks import plan_zero

    options.check()
    if options.counts_states:
        plan_zero(options)
    else:
        plan_placement(options)
