"""Costs of a long context: sequences that fit, its prefill, and its read from disk.

Pure data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hfq.placement.estimate.estimate import Estimate, ModelSizes
from hfq.placement.estimate.kv_cache import activation_nbytes, kv_nbytes, offloaded_kv_nbytes
from hfq.placement.estimate.profile import Profile
from hfq.placement.estimate.roofline import Work, kv_seconds, predict

__all__ = ["ContextCosts", "context_costs"]

_CHUNK = 512
"""Tokens of a prefill that are computed together."""


@dataclass(frozen=True)
class ContextCosts:
    """Costs of sequences of the workload's context.

    Attributes:
        sequence_nbytes: Bytes of the KV cache of one sequence, where it is stored.
        sequences: Sequences that fit together, without another placement of the weights.
        prefill_seconds: Seconds to compute the KV cache of one sequence; None if no rate is known.
        resume_seconds: Seconds to read the KV cache of one sequence from disk, as `hfq.OffloadedCache` does.
    """

    sequence_nbytes: int
    sequences: int
    prefill_seconds: float | None
    resume_seconds: float


def context_costs(estimate: Estimate, sizes: ModelSizes, profile: Profile) -> ContextCosts:
    """Returns the costs of a context on a planned machine.

    Args:
        estimate: The placement.
        sizes: The model.
        profile: Rates of the machine.
    """
    work, workload, main = estimate.work, estimate.workload, estimate.budget.main
    if workload.kv_device is None:
        stored = held = kv_nbytes(sizes.kv, 1, workload.context, sizes.dtype, workload.kv_dtype)
    else:
        stored, held = offloaded_kv_nbytes(sizes.kv, 1, workload.context, sizes.dtype, workload.kv_dtype)
    needs = {main: held + activation_nbytes(sizes.activations, 1, workload.context, sizes.dtype)}
    if workload.kv_device == "cpu":
        needs["cpu"] = needs.get("cpu", 0) + stored
    capacities, devices = estimate.hardware.capacities(), estimate.devices()
    more = min(
        (capacities[device] - sum(devices[device].values())) // max(nbytes, 1)
        for device, nbytes in needs.items()
    )
    saved = replace(work, kv_moved=stored, is_kv_on_disk=True)
    return ContextCosts(
        stored,
        workload.batch + max(more, 0),
        _prefill_seconds(work, workload.context, profile),
        kv_seconds(saved, profile),
    )


def _prefill_seconds(work: Work, context: int, profile: Profile) -> float | None:
    rows = min(context, _CHUNK)
    chunk = predict(replace(work, rows=rows, cache=work.cache // 2, kv_moved=work.kv_moved // 2), profile)
    seconds = chunk.known_seconds if chunk.terms["weights"] else None
    return seconds * math.ceil(context / rows) if seconds else None
