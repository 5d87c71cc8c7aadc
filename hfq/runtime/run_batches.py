"""Layer-major runs of several batches, which onload each unit once for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hfq.errors import SetupError
from hfq.loading.loaded_model import loader_of
from hfq.offload.lockstep import run_in_lockstep

__all__ = ["run_batches"]


def run_batches(
    model: nn.Module,
    batches: Sequence[Any],
    fn: Callable[[Any], Any] | None = None,
    *,
    max_concurrent: int | None = None,
) -> list[Any]:
    """Runs a model on several batches, layer by layer instead of batch by batch.

    Each batch runs in its own thread, with its own inputs, caches, and masks. It waits at the boundary of
    every offloaded unit, and only one batch computes at a time. The results are bit-identical to those of
    separate calls, and each unit is read once per step of all batches. If nothing is offloaded, the batches
    run one after another.

        outputs = hfq.run_batches(model, batches)  # prefill, scoring
        tokens = hfq.run_batches(model, batches, lambda batch: model.generate(**batch, do_sample=False))

    Args:
        model: A model that hfq loaded.
        batches: Inputs of each call: keyword arguments as a dict, or token ids [batch, length].
        fn: Function of one batch, which may call the model several times. None runs one forward pass. All
            results are kept, so return only the data that you need. Sampling uses one random generator for
            all batches.
        max_concurrent: Number of batches that run together, which limits their activations and caches. None
            runs all of them together.

    Returns:
        The results, in the order of the batches.

    Raises:
        SetupError: hfq did not load the model, or `max_concurrent` is not a positive int.
        Exception: The error of the first batch that failed; the other batches are stopped.
    """
    if max_concurrent is not None and (
        not isinstance(max_concurrent, int) or isinstance(max_concurrent, bool) or max_concurrent < 1
    ):
        raise SetupError(
            "run_batches(max_concurrent=…) requires a number of batches.",
            expected="a positive int, or None",
            found=repr(max_concurrent),
            fix="Pass a positive int, or leave it out to run all batches together.",
        )
    batches, call = list(batches), fn or functools.partial(_forward, model)
    offloader = loader_of(model).offloader
    size = max_concurrent or max(len(batches), 1)
    results: list[Any] = []
    for first in range(0, len(batches), size):
        group = batches[first : first + size]
        if offloader is None or len(group) == 1:
            results += [call(batch) for batch in group]
        else:
            results += run_in_lockstep(offloader, [functools.partial(call, batch) for batch in group])
    return results


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, torch.Tensor):
        return model(batch)
    raise SetupError(
        "run_batches() requires dicts or tensors as batches.",
        expected="keyword arguments, or token ids",
        found=type(batch).__name__,
        fix="Pass fn=, a function that runs the model on one batch.",
    )
