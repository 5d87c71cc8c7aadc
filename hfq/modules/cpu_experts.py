"""Routed experts that compute on the CPU while the accelerator goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

__all__ = ["CpuExperts"]

Outputs = Mapping[int, torch.Tensor]


class CpuExperts:
    """The experts of one call that compute on the CPU, in a thread of their own.

    Activations are copied to the host once, and each expert's output is copied back once.

    Args:
        hidden_states: [tokens, hidden] on an accelerator.
        tokens: Tokens of each expert, int64 on the CPU.
        compute: Returns an expert's output for its rows, on the CPU.

    Attributes:
        tokens: As above.
    """

    def __init__(
        self,
        hidden_states: torch.Tensor,
        tokens: Mapping[int, torch.Tensor],
        compute: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> None:
        self._device, self.tokens = hidden_states.device, tokens
        rows = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device="cpu", pin_memory=True)
        rows.copy_(hidden_states, non_blocking=True)
        copied = torch.accelerator.current_stream(self._device).record_event()

        def work() -> Outputs:
            copied.synchronize()
            with torch.no_grad():
                return {
                    expert: compute(expert, rows[chosen]).pin_memory() for expert, chosen in tokens.items()
                }

        self._outputs: Future[Outputs] = _threads[0].submit(work)

    def outputs(self) -> dict[int, torch.Tensor]:
        """Waits for the experts, and starts the copies of their outputs to the accelerator."""
        return {
            expert: output.to(self._device, non_blocking=True)
            for expert, output in self._outputs.result().items()
        }


def _new_threads() -> None:
    _threads[:] = [ThreadPoolExecutor(1, thread_name_prefix="hfq-cpu-experts")]


_threads: list[ThreadPoolExecutor] = []
_new_threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_threads)
