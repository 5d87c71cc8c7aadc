"""Guesses of the experts that the next layer needs, made by its router ahead of time."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hfq.modules.experts import MaskedExperts, QuantizedExperts
from hfq.modules.quantized_module import QuantizedModule

__all__ = ["GuessCounts", "Lookahead", "attach_lookahead", "token_ids"]

logger = logging.getLogger("hfq")

_ROUTERS = ("gate", "router")
"""Names that transformers gives to the router of a layer."""

_TABLE = "tid2eid"
"""Name of the buffer of a router that looks experts up by token id (DeepSeek-V4)."""


@dataclass
class GuessCounts:
    """Reads ahead of the router so far.

    Attributes:
        made: Number of experts that were read, or began to wait for a read.
        used: Number of those that were needed.
        wasted_nbytes: Bytes that were read of others.
    """

    made: int = 0
    used: int = 0
    wasted_nbytes: int = 0


class Lookahead:
    """Guesses which experts a layer routes to.

    The router gets the hidden state of an earlier layer, so it may be wrong. A router that looks experts up
    by token id is always right.

    Args:
        router: The router of the layer.
        experts: The experts of the layer.
        input_ids: Returns the token ids of the current pass; None if they are unknown.
    """

    def __init__(
        self, router: nn.Module, experts: QuantizedExperts, input_ids: Callable[[], torch.Tensor | None]
    ) -> None:
        self._router, self._experts, self._input_ids = router, experts, input_ids
        self._parts = list(router.modules())
        self._tells = True

    @property
    def is_certain(self) -> bool:
        """True if token ids alone decide."""
        return hasattr(self._router, _TABLE)

    def guess(self, hidden_states: torch.Tensor | None) -> list[Sequence[QuantizedModule]]:
        """Returns the offloaded layers of the experts that the layer may need.

        Those of one token are in the order of the router, those of several are sorted.

        Args:
            hidden_states: [tokens, hidden], the input of an earlier layer's experts; None before the first.
        """
        chosen = self._choose(hidden_states)
        if chosen is None:
            return []
        numbers = chosen.flatten().tolist() if len(chosen) == 1 else chosen.unique().tolist()
        return self._experts.offloaded_layers(numbers)

    def _choose(self, hidden_states: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the experts of each token, or None if the router cannot tell."""
        if self.is_certain:
            ids = self._input_ids()
            return None if ids is None else getattr(self._router, _TABLE)[ids.reshape(-1)]
        router = self._router
        if hidden_states is None or not self._tells or router.training:
            return None
        for module in self._parts:
            for weight in (*module._parameters.values(), *module._buffers.values()):
                if weight is not None and weight.is_meta:
                    return None
        try:
            with torch.no_grad():  # past hooks: transformers records what a router returns
                chosen = _indices(type(router).forward(router, hidden_states))
        except Exception as error:
            # the router of custom code may need other inputs; its own call is not affected
            logger.warning("hfq: %s cannot guess experts ahead: %s", type(router).__name__, error)
            chosen = None
        self._tells = chosen is not None
        return chosen


def attach_lookahead(model: nn.Module, input_ids: Callable[[], torch.Tensor | None]) -> Lookahead | None:
    """Gives each module of experts the lookahead of the next one.

    Args:
        model: The model.
        input_ids: See `Lookahead`.

    Returns:
        The lookahead of the first module of experts, which follows none, if it is certain.
    """
    names = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedExperts)}
    found: list[Lookahead | None] = []
    for name, experts in names.items():
        # its router returns a mask of a batch, and no indices
        is_masked = isinstance(experts, MaskedExperts)
        router = None if is_masked else _router_of(model.get_submodule(name.rpartition(".")[0]))
        found.append(None if router is None else Lookahead(router, experts, input_ids))
    for experts, following in zip(names.values(), found[1:], strict=False):
        experts.guess_next = None if following is None else following.guess
    return found[0] if found and found[0] is not None and found[0].is_certain else None


def token_ids(args: Sequence[object], kwargs: Mapping[str, object]) -> torch.Tensor | None:
    """Returns the token ids among the inputs of a model; None if it gets embeddings."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    return ids if isinstance(ids, torch.Tensor) and not ids.is_floating_point() else None


def _router_of(block: nn.Module) -> nn.Module | None:
    """Returns the router of a block if hidden states or token ids are all that it needs."""
    router = next((found for name in _ROUTERS if (found := getattr(block, name, None)) is not None), None)
    if not isinstance(router, nn.Module):
        return None
    _, *parameters = inspect.signature(type(router).forward).parameters.values()
    needed = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    return router if len(needed) == 1 or hasattr(router, _TABLE) else None


def _indices(outputs: object) -> torch.Tensor | None:
    """Returns the integers [tokens, k] among the outputs of a router."""
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return next(
        (part for part in parts if isinstance(part, torch.Tensor) and part.dim() == 2 and _counts(part)), None
    )


def _counts(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)
