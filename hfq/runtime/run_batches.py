"""Layer-major runs: every block that rests elsewhere is brought to its device once for all batches, not once for each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hfq.errors import SetupError
from hfq.loading.loaded_model import loading_of
from hfq.offload.lockstep import run_in_lockstep

__all__ = ["layer_major"]


def layer_major(
    model: nn.Module, batches: Sequence[Any], run: Callable[[Any], Any] | None = None, *, at_once: int | None = None
) -> list[Any]:
    """Runs a model on several batches, layer by layer instead of batch by batch.

    Each batch runs in a thread of its own, on its own inputs, caches and masks, and waits at the border of every block that is
    streamed; only one of them computes at any time. The results are those of separate calls, bit for bit, and every block is
    read once for each step of all batches. Where nothing is streamed the batches simply run one after another.

        outputs = hfq.layer_major(model, batches)                                                    # prefill, scoring
        tokens = hfq.layer_major(model, batches, lambda batch: model.generate(**batch, do_sample=False))

    Args:
        model: A model that hfq loaded.
        batches: The inputs of each call: keyword arguments as a dict, or token ids [batch, length].
        run: What is done with one batch; it may call the model several times. By default one forward. Return no more than what
            is needed: the results of all batches are kept. Sampling draws from one random generator for all batches.
        at_once: How many batches run together, which bounds their activations and caches; all of them by default.

    Returns:
        The results, in the order of the batches.

    Raises:
        SetupError: hfq did not load the model, or `at_once` is not a positive number.
        Exception: Whatever the first batch that failed raised; the others are given up.
    """
    if at_once is not None and (not isinstance(at_once, int) or isinstance(at_once, bool) or at_once < 1):
        raise SetupError(
            "layer_major(at_once=…) wants a number of batches.", expected="a positive int, or None", found=repr(at_once),
            fix="leave it out to run all batches together",
        )  # fmt: skip
    batches, call = list(batches), run or functools.partial(_forward, model)
    streamer = loading_of(model).streamer
    size = at_once or max(len(batches), 1)
    results: list[Any] = []
    for first in range(0, len(batches), size):
        group = batches[first : first + size]
        if streamer is None or len(group) == 1:
            results += [call(batch) for batch in group]
        else:
            results += run_in_lockstep(streamer, [functools.partial(call, batch) for batch in group])
    return results


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, torch.Tensor):
        return model(batch)
    raise SetupError(
        "layer_major was given a batch that is neither a dict nor a tensor.", expected="keyword arguments, or token ids",
        found=type(batch).__name__, fix="pass run= to say what is done with a batch",
    )  # fmt: skip
