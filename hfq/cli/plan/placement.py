"""Reports of `hfq plan MODEL`: a device map or ZeRO-3 ranks, with bytes, rates, and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfq.cli.plan.options import PlanOptions
    from hfq.loading.dry_run import PlannedModel
    from hfq.placement.estimate.estimate import Estimate, HitRate, Workload
    from hfq.placement.estimate.hardware import Hardware
    from hfq.placement.estimate.profile import Profile

__all__ = ["make_report", "plan_placement"]


def plan_placement(options: PlanOptions) -> None:
    """Plans one checkpoint and prints the plan."""
    from hfq.cli.plan.tables import print_report
    from hfq.cli.typed_options import check_dtype

    check_dtype(options.dtype)
    report = make_report(options)
    if options.output_dir is not None:
        _write(options.output_dir, report["files"])
    print(json.dumps(report, indent=2)) if options.as_json else print_report(report)


def make_report(options: PlanOptions) -> dict:
    """Returns the plan as JSON-ready data."""
    from hfq.cli.model_argument import model_headers
    from hfq.loading.dry_run import open_model
    from hfq.placement.estimate.estimate import Workload

    hardware = _hardware(options)
    workload = Workload(
        options.batch_size, options.max_model_len, options.kv_cache_dtype, options.kv_cache_device
    )
    with model_headers(str(options.model), options.revision) as found:
        model = open_model(found.folder, options.dtype, options.quantize_output_head)
        described = model.describe() | {"path": found.name} | found.describe()
        report = {"model": described, "workload": asdict(workload), "machine": _describe(hardware, options)}
        return _planned(options, model, hardware, workload, report)


def _planned(
    options: PlanOptions, model: PlannedModel, hardware: Hardware, workload: Workload, report: dict
) -> dict:
    if options.catalog is not None:
        from hfq.placement.estimate.catalog import rank_machines, read_catalog

        report["catalog"] = rank_machines(read_catalog(options.catalog), model.sizes, workload)
        return report | {"files": {}}
    if options.suggest_format is not None:
        return report | {"ladder": _ladder(options, model, workload), "files": {}}
    if options.zero_stage is not None:
        return report | _zero3(options, model, hardware, workload)
    if len(hardware.gpus) > 1:
        return report | _spread(options, model, hardware, workload)
    return report | _placed(options, model, hardware, workload)


def _placed(options: PlanOptions, model: PlannedModel, hardware: Hardware, workload: Workload) -> dict:
    from hfq.checkpoint.memory_limit import available_memory
    from hfq.placement.estimate.context_costs import context_costs
    from hfq.placement.estimate.estimate import estimate_placement
    from hfq.placement.launch_configs import accelerate_yaml, loading_code

    profile = _profile(options, model)
    free = available_memory() if profile.is_measured else None
    hits, source = _hit_rate(options, model)
    estimate = estimate_placement(model.sizes, hardware, workload, profile, free, hit_rate=hits)
    device_map = model.device_map(estimate.budget)
    weights = model.weights_by_device(device_map, estimate.budget.main)
    limits = {
        device: nbytes
        for device, nbytes in estimate.budget.capacities.items()
        if device in (estimate.budget.main, "cpu")
    }
    code = loading_code(
        str(options.model),
        model.sizes.dtype,
        limits,
        options.kv_cache_dtype,
        options.revision,
        options.kv_cache_device,
        options.quantize_output_head,
    )
    return {
        "devices": _device_nbytes(estimate, weights, hardware),
        "moved": _moved_bytes(estimate, workload.batch, source),
        "context": asdict(context_costs(estimate, model.sizes, profile)),
        "speculation": _speculation(options, estimate, model, profile),
        "prediction": _prediction(estimate, profile),
        "device_map": device_map,
        "max_memory": limits,
        "modules": model.modules(device_map, hardware.kind),
        "files": {
            "device_map.json": json.dumps(device_map, indent=2),
            "load.py": code,
            "accelerate.yaml": accelerate_yaml(1, on_cpu=not hardware.gpus),
        },
    }


def _moved_bytes(estimate: Estimate, batch: int, routing: str) -> dict[str, Any]:
    """Returns the bytes that a step reads and copies, and the hits of the expert cache.

    Args:
        estimate: The estimate of the plan.
        batch: Sequences of a step.
        routing: What the hits are computed from.
    """
    work = estimate.work
    return {
        "onloaded_per_step_nbytes": work.streamed,
        "routed_per_step_nbytes": work.on_demand,
        "expert_hit_rate": estimate.hit_rate,
        "routing": routing,
        "copied_per_step_nbytes": work.copied,
        "per_token_nbytes": (work.streamed + work.copied) // batch,
        "is_cached": work.is_cached,
    }


def _prediction(estimate: Estimate, profile: Profile) -> dict[str, Any]:
    """Returns predicted seconds, the deciding term, and the three most helpful changes."""
    from hfq.placement.estimate.roofline import TERMS, what_helps

    helps = [[what, each.tokens_per_second] for what, each in what_helps(estimate.work, profile)[:3]]
    found = estimate.prediction
    return found.to_dict() | {"dominant_term": TERMS[found.dominant], "helps": helps}


def _hit_rate(options: PlanOptions, model: PlannedModel) -> tuple[HitRate, str]:
    """Returns the hits of an expert cache by its size, and what they are computed from."""
    from hfq.placement.estimate.estimate import even_hit_rate
    from hfq.runtime.record_routing import Routing

    if options.routing is None:
        return even_hit_rate, "even routing"
    routing = Routing.load(options.routing)
    routing.check(model.loading.model)
    return routing.hit_rate, str(routing)


def _speculation(
    options: PlanOptions, estimate: Estimate, model: PlannedModel, profile: Profile
) -> list[dict[str, Any]]:
    """Returns the costs of a token at each acceptance rate; empty without drafted tokens."""
    from hfq.placement.estimate.speculation import ACCEPTANCE_RATES, speculation_costs

    if options.num_assistant_tokens is None:
        return []
    rates = ACCEPTANCE_RATES if options.acceptance_rate is None else (options.acceptance_rate,)
    found = speculation_costs(estimate, model.sizes, profile, options.num_assistant_tokens, rates)
    return [asdict(costs) for costs in found]


def _device_nbytes(estimate: Estimate, weights: dict[str, int], hardware: Hardware) -> dict:
    capacities = hardware.capacities()
    found: dict[str, dict[str, int | None]] = {}
    for device, parts in estimate.devices(weights).items():
        total = sum(parts.values())
        found[device] = _with_unit({**parts, "total": total, "capacity": capacities.get(device)})
    return found


def _with_unit(parts: Mapping[str, int | None]) -> dict[str, int | None]:
    """Returns the same numbers under names that end in `_nbytes`."""
    return {f"{name}_nbytes": nbytes for name, nbytes in parts.items()}


def _spread(options: PlanOptions, model: PlannedModel, hardware: Hardware, workload: Workload) -> dict:
    from hfq.errors import PlacementError
    from hfq.placement.estimate.kv_cache import activation_nbytes, kv_nbytes
    from hfq.placement.launch_configs import accelerate_yaml
    from hfq.placement.multi_device import plan_accelerators

    sizes, capacities = model.sizes, hardware.capacities()
    kv = kv_nbytes(sizes.kv, workload.batch, workload.context, sizes.dtype, workload.kv_dtype)
    activations = activation_nbytes(sizes.activations, workload.batch, workload.context, sizes.dtype)
    blocks = {unit.name for unit in sizes.units if unit.kind == "block"}
    share = -(-kv // max(len(blocks), 1))
    try:
        budget = plan_accelerators(sizes.units, capacities, layer_nbytes=share, device_nbytes=activations)
    except PlacementError as error:
        raise PlacementError(
            "The model does not fit on these devices together.",
            expected=error.expected,
            found=error.found,
            fix="Pass --gpu, --cpu, or --disk with more memory, or a shorter --max-model-len.",
        ) from error
    device_map = model.device_map(budget)
    weights = model.weights_by_device(device_map, budget.main)
    devices = {}
    for device, capacity in capacities.items():
        computes = device not in ("cpu", "disk")
        parts = {
            "weights": weights.get(device, 0),
            "buffer": budget.buffers.get(device, 0),
            "experts": budget.expert_caches.get(device, 0),
            "kv_cache": share * sum(budget.executes[name] == device for name in blocks),
            "activations": activations if computes else 0,
        }
        if computes or any(parts.values()):
            devices[device] = _with_unit(parts | {"total": sum(parts.values()), "capacity": capacity})
    files = {"device_map.json": json.dumps(device_map, indent=2), "accelerate.yaml": accelerate_yaml(1)}
    return {
        "devices": devices,
        "device_map": device_map,
        "modules": model.modules(device_map, hardware.kind),
        "files": files,
    }


def _zero3(options: PlanOptions, model: PlannedModel, hardware: Hardware, workload: Workload) -> dict:
    from hfq.placement.estimate.roofline import TERMS
    from hfq.placement.launch_configs import accelerate_yaml, deepspeed_config
    from hfq.placement.zero.fit import fit_zero3, predict_zero3
    from hfq.placement.zero.model_states import count_states

    itemsize = {"float32": 4}.get(model.sizes.dtype, 2)
    states = count_states(model.loading.checkpoint, itemsize=itemsize)
    ranks = options.num_processes, options.per_machine
    fit = fit_zero3(states, model.sizes, hardware, workload, *ranks, has_nvme=options.nvme_path is not None)
    config = deepspeed_config(
        fit.memory.setup.offload_param, options.nvme_path, model.sizes.dtype, workload.batch
    )
    found = predict_zero3(fit, model.sizes, workload, _profile(options, model))
    prediction: dict[str, Any] = {"not_predicted": found}
    if not isinstance(found, str):
        prediction = found.to_dict() | {"dominant_term": TERMS[found.dominant], "helps": []}
    return {
        "zero3": fit.to_dict(),
        "prediction": prediction,
        "files": {
            "deepspeed.json": json.dumps(config, indent=2),
            "accelerate.yaml": accelerate_yaml(
                options.num_processes, "deepspeed.json", options.num_machines, on_cpu=not hardware.gpus
            ),
        },
    }


def _ladder(options: PlanOptions, model: PlannedModel, workload: Workload) -> dict:
    from hfq.placement.estimate.best_format import choose_format
    from hfq.placement.estimate.hardware import parse_size

    return choose_format(
        model.shapes(), model.sizes, workload, parse_size(options.suggest_format or "", "--suggest-format")
    )


def _profile(options: PlanOptions, model: PlannedModel) -> Profile:
    """Returns the machine profile, with the memory bandwidth that the catalog has for `--gpu`."""
    from hfq.machine_profile.machine_facts import machine_facts
    from hfq.placement.estimate.catalog import SHIPPED, read_catalog
    from hfq.placement.estimate.profile import read_profile

    facts = machine_facts(Path(model.loading.checkpoint.root))
    profile = read_profile(options.profile, {"processor": facts["processor"]})
    rate = read_catalog(SHIPPED).memory_rate(options.gpu[0]) if options.gpu else None
    if rate is None:
        return profile
    return replace(
        profile,
        device_memory=rate,
        source=f"{profile.source}; the accelerator's memory bandwidth from the catalog",
    )


def _hardware(options: PlanOptions) -> Hardware:
    from hfq.checkpoint.memory_limit import available_memory
    from hfq.placement.estimate.catalog import SHIPPED, read_catalog
    from hfq.placement.estimate.hardware import Hardware, parse_gpus, parse_size

    known = {} if all(text[:1].isdigit() for text in options.gpu or []) else read_catalog(SHIPPED).gpus
    gpus = parse_gpus(options.gpu or [], known)
    kind = Hardware.kind
    if not options.gpu and options.cpu is None:
        gpus, kind = _gpus_here()
    cpu = available_memory() or 0 if options.cpu is None else parse_size(options.cpu, "--cpu")
    disk = None if options.disk is None else parse_size(options.disk, "--disk", least=0)
    return Hardware(gpus, cpu, disk, kind)


def _gpus_here() -> tuple[tuple[int, ...], str]:
    """Returns bytes and device type of the accelerators of this machine."""
    from hfq.placement.accelerators import accelerator_kind, describe_accelerator, list_accelerators
    from hfq.placement.estimate.hardware import Hardware

    sizes = tuple(describe_accelerator(device).total_nbytes for device in list_accelerators())
    return tuple(filter(None, sizes)), accelerator_kind() or Hardware.kind


def _describe(hardware: Hardware, options: PlanOptions) -> dict[str, Any]:
    is_here = not options.gpu and options.cpu is None
    return {
        "gpu_nbytes": list(hardware.gpus),
        "cpu_nbytes": hardware.cpu,
        "disk_nbytes": hardware.disk,
        "limits": {"gpu": options.gpu or [], "cpu": options.cpu, "disk": options.disk},
        "is_this_machine": is_here,
    }


def _write(folder: Path, files: dict[str, str]) -> None:
    from hfq.output_file import check_output_file, write_output_file

    for name, text in files.items():
        check_output_file(folder / name)
        write_output_file(folder / name, text)
