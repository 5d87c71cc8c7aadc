"""The tables of `hfq plan MODEL`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hfq.cli.fitting_table import FittingTable
from hfq.plots.plans import PARTS
from hfq.tables import as_size

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_report"]


def print_report(report: dict) -> None:
    """Prints a report of `hfq.cli.plan.placement.make_report`."""
    from hfq.cli.console import EscapingConsole

    console = EscapingConsole()
    model, work = report["model"], report["workload"]
    console.print(
        f"{model['path']}: {model['class']} of {model['layers']} layers, "
        f"{model['formats'] or 'unquantized'}, computes in "
        f"{model['dtype']}, {as_size(model['file_nbytes'])} of files",
        soft_wrap=True,
    )
    console.print(
        f"batch size {work['batch']}, {work['context']} tokens, KV cache {work['kv_dtype']}; "
        f"{_machine(report['machine'])}",
        soft_wrap=True,
    )
    if model["changes"]:
        console.print(f"note: {model['changes']}", soft_wrap=True)
    if model["layers_with_an_uncounted_state"]:
        console.print(
            f"note: {model['layers_with_an_uncounted_state']} layers keep a state of fixed size, which this "
            f"plan does not count"
        )
    if model["mtp_nbytes"] and report.get("speculation"):
        more = as_size(model["mtp_nbytes"])
        console.print(f"note: use_mtp=True loads layers for further tokens, up to {more} more memory")
    sections: dict[str, Callable[[Console, Any], None]] = {
        "devices": partial(_devices, limits=report["machine"]["limits"]),
        "moved": _moved,
        "context": _context,
        "zero3": _zero3,
        "prediction": _prediction,
        "speculation": _speculation,
        "catalog": _catalog,
        "ladder": _ladder,
    }
    for name, show in sections.items():
        if name in report:
            show(console, report[name])
    for name, text in report["files"].items():
        console.print(f"\n# {name}\n{text}", soft_wrap=True)


def _machine(machine: dict) -> str:
    limits = machine["limits"]
    gpus = ", ".join(limits["gpu"] or map(as_size, machine["gpu_nbytes"])) or "no accelerator"
    cpu = limits["cpu"] or as_size(machine["cpu_nbytes"])
    disk = f", at most {limits['disk']} on disk" if limits["disk"] else ""
    return f"{gpus}, {cpu} of CPU memory{disk}{' (this machine)' if machine['is_this_machine'] else ''}"


def _devices(console: Console, devices: dict, limits: dict[str, str | None]) -> None:

    table = FittingTable("device", *PARTS.values(), "total", "of")
    for device, parts in devices.items():
        capacity = parts["capacity_nbytes"]
        sizes = [as_size(parts[part]) for part in (*PARTS, "total_nbytes")]
        limit = limits.get(device) or ("no limit" if capacity is None else as_size(capacity))
        table.add_row(device, *sizes, limit)
    console.print(table)


def _moved(console: Console, moved: dict) -> None:
    cached = (
        ", from the page cache after the first step"
        if moved["is_cached"] and moved["onloaded_per_step_nbytes"]
        else ""
    )
    nbytes = moved["routed_per_step_nbytes"]
    hits = f"{moved['expert_hit_rate']:.0%} of a token's are cached, by {moved['routing']}"
    routed = f", of which {as_size(nbytes)} of experts ({hits})" if nbytes else ""
    console.print(
        f"onloaded per step: {as_size(moved['onloaded_per_step_nbytes'])} from disk{routed}{cached}, "
        f"{as_size(moved['copied_per_step_nbytes'])} to the accelerator; "
        f"{as_size(moved['per_token_nbytes'])} per token",
        soft_wrap=True,
    )


def _context(console: Console, costs: dict) -> None:
    prefill = costs["prefill_seconds"]
    computed = "" if prefill is None else f", {prefill:.3g} s to compute"
    console.print(
        f"one sequence of this length: {as_size(costs['sequence_nbytes'])} of KV cache{computed}, "
        f"{costs['resume_seconds']:.3g} s to read from disk; {costs['sequences']} fit together",
        soft_wrap=True,
    )


def _prediction(console: Console, prediction: dict) -> None:
    if "not_predicted" in prediction:
        console.print(f"no time is predicted: {prediction['not_predicted']}", soft_wrap=True)
        return
    terms = ", ".join(
        f"{name} {seconds * 1e3:.3g} ms" for name, seconds in prediction["terms"].items() if seconds
    )
    step, load = prediction["step_seconds"], f"load {prediction['load_seconds']:.3g} s from a cold disk"
    if not step:
        console.print(
            f"predicted: {load}; the speed of a step is unknown\nrates: {prediction['source']}",
            soft_wrap=True,
        )
        return
    console.print(
        f"predicted: {prediction['tokens_per_second']:.4g} tokens/s ({step * 1e3:.4g} ms per step: "
        f"{terms}), {load}",
        soft_wrap=True,
    )
    console.print(f"decided by {prediction['dominant_term']}; rates: {prediction['source']}", soft_wrap=True)
    for what, rate in prediction["helps"]:
        console.print(f"  {what}: {rate:.4g} tokens/s")


def _speculation(console: Console, costs: list[dict]) -> None:
    for each in costs:
        seconds = each["seconds_per_token"]
        rate = f", {1 / seconds:.4g} tokens/s" if seconds else ""
        accepted, moved = f"{each['acceptance_rate']:.0%}", as_size(each["per_token_nbytes"])
        console.print(
            f"with {each['num_assistant_tokens']} drafted tokens per pass, {accepted} of them accepted: "
            f"{each['passes_per_token']:.3g} passes and {moved} per token{rate}, "
            "not counting the time to draft",
            soft_wrap=True,
        )


def _zero3(console: Console, zero3: dict) -> None:

    devices = list(zero3["per_rank"])
    table = FittingTable(
        f"ZeRO-3, {zero3['num_processes']} ranks", *(f"{device} per rank" for device in devices)
    )
    for name, held in zero3["parts_per_rank"].items():
        table.add_row(
            name.replace("packed", "quantized"), *(as_size(held.get(device, 0)) for device in devices)
        )
    table.add_row("total", *(as_size(zero3["per_rank"][device]) for device in devices))
    console.print(table)
    where = "ranks compute on CPUs: their devices are the node's memory; " if zero3["ranks_on_cpu"] else ""
    shard_device = zero3["offload_param"].replace("none", "the devices")
    gathered = as_size(zero3["gathered_per_forward_nbytes"])
    console.print(
        f"{where}shards are stored on {shard_device}; each rank gathers {gathered} per forward pass",
        soft_wrap=True,
    )


def _catalog(console: Console, entries: list[dict]) -> None:

    table = FittingTable("machine", "cost per hour", "cost per 1M tokens", "tokens/s", "decided by", "note")
    for entry in entries:
        if "refused" in entry:
            table.add_row(entry["name"], f"{entry['cost']:g}", "-", "-", "-", entry["refused"])
        else:
            per_million = f"{entry['cost_of_a_million_tokens']:.4g}"
            rate = f"{entry['tokens_per_second']:.4g}"
            table.add_row(
                entry["name"], f"{entry['cost']:g}", per_million, rate, entry["dominant"], entry["note"]
            )
    console.print(table)


def _ladder(console: Console, ladder: dict) -> None:

    table = FittingTable("format, best first", "weights", "with KV cache and activations", "fits")
    for rung in ladder["rungs"]:
        table.add_row(
            rung["name"],
            as_size(rung["weights_nbytes"]),
            as_size(rung["total_nbytes"]),
            "yes" if rung["fits"] else "no",
        )
    console.print(table)
    console.print(
        f"best that fits {as_size(ladder['budget_nbytes'])}: {ladder['best'] or 'none'}. {ladder['note']}",
        soft_wrap=True,
    )
