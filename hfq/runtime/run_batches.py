"""Layer-major runs: every block that rests elsewhere is brought to its device once for all batches, not once
for each.
"""

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

    Each batch runs in a thread of its own, on its own inputs, caches and masks, and waits at the border of
    every block that is streamed; only one of them computes at any time. The results are those of separate
    calls, bit for bit, and every block is read once for each step of all batches. Where nothing is streamed
    the batches simply run one after another.

        outputs = hfq.run_batches(model, batches)  # prefill, scoring
        tokens = hfq.run_batches(model, batches, lambda batch: model.generate(**batch, do_sample=False))

    Args:
        model: A model that hfq loaded.
        batches: The inputs of each call: keyword arguments as a dict, or token ids [batch, length].
        fn: What is done with one batch; it may call the model several times. By default one forward. Return
            no more than what is needed: the results of all batches are kept. Sampling draws from one random
            generator for all batches.
        max_concurrent: How many batches run together, which bounds their activations and caches; all of them
            by default.

    Returns:
        The results, in the order of the batches.

    Raises:
        SetupError: hfq did not load the model, or `max_concurrent` is not a positive number.
        Exception: Whatever the first batch that failed raised; the others are given up.
    """
    if max_concurrent is not None and (
        not isinstance(max_concurrent, int) or isinstance(max_concurrent, bool) or max_concurrent < 1
    ):
        raise SetupError(
            "run_batches(max_concurrent=…) wants a number of batches.",
            expected="a positive int, or None",
            found=repr(max_concurrent),
            fix="leave it out to run all batches together",
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
        "run_batches was given a batch that is neither a dict nor a tensor.",
        expected="keyword arguments, or token ids",
        found=type(batch).__name__,
        fix="pass fn= to say what is done with a batch",
    )
