"""Runs single blocks of a model on what reaches them: the calls of every block are taken down in one pass
without weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from hfq.errors import SetupError
from hfq.loading.matching.quantizable_layers import size_of
from hfq.quantization.malloc_trim import trim_heap
from hfq.quantization.triangular_matrix import TriangularMatrix

__all__ = [
    "Call",
    "Moments",
    "Stage",
    "capture",
    "find_stages",
    "forward_decoder_layer",
    "measure",
    "run_decoder_layer",
]


class _Enough(Exception):
    """Ends a forward whose rest nobody needs."""


@dataclass(frozen=True)
class Call:
    """What a block is called with beside its hidden states."""

    args: tuple
    kwargs: Mapping[str, Any]


Stage = list[list[str]]
"""Groups of layers that are measured in one pass; the layers of a group share their input."""


def capture(
    model: nn.Module, decoder_layers: Mapping[str, nn.Module], batches: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, list[Call]]]:
    """The hidden states that reach the first block, and the calls of all blocks, of which none computes.

    Args:
        model: The model; what lies before its blocks must be able to compute.
        decoder_layers: Its blocks in order.
        batches: Token ids [batch, length].

    Returns:
        The hidden states of each batch, and by block the call for each batch.

    Raises:
        SetupError: The model does more between its blocks than to hand on hidden states.
    """
    with torch.no_grad():
        for is_tuple in (False, True):  # some models take the first of what a block returns
            recorder = _Recorder(list(decoder_layers), is_tuple)
            with recorder.within(decoder_layers):
                for batch in batches:
                    with contextlib.suppress(_Enough):
                        model(input_ids=batch, use_cache=False)
            if recorder.is_plain:
                return recorder.hidden, recorder.calls
    raise SetupError(
        f"The blocks of {type(model).__name__} do not hand their hidden states to one another; it cannot be "
        f"calibrated.",
        expected="blocks that are called with what the one before returned",
        found=recorder.broken,
        fix="quantize with method='rtn' or 'fp8', which need no calibration",
    )


class _Recorder:
    def __init__(self, names: list[str], is_tuple: bool) -> None:
        self.names, self.is_tuple = names, is_tuple
        self.hidden: list[torch.Tensor] = []
        self.calls: dict[str, list[Call]] = {name: [] for name in names}
        self.broken: str | None = None

    @property
    def is_plain(self) -> bool:
        return self.broken is None and all(len(calls) == len(self.hidden) for calls in self.calls.values())

    @contextlib.contextmanager
    def within(self, decoder_layers: Mapping[str, nn.Module]) -> Iterator[None]:
        kept = {name: vars(decoder_layer).get("forward") for name, decoder_layer in decoder_layers.items()}
        try:
            for name, decoder_layer in decoder_layers.items():
                decoder_layer.forward = self._forward(name)
            yield
        finally:
            for name, decoder_layer in decoder_layers.items():
                del decoder_layer.forward
                if kept[name] is not None:
                    decoder_layer.forward = kept[name]  # type: ignore[assignment]

    def _forward(self, name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states", None), ())
            if name == self.names[0]:
                self.hidden.append(hidden)
            if hidden is not self.hidden[-1]:
                self.broken = f"another tensor at {name}"
                raise _Enough
            self.calls[name].append(Call(rest, kwargs))
            if name == self.names[-1]:
                raise _Enough
            return (hidden,) if self.is_tuple else hidden

        return forward


def run_decoder_layer(decoder_layer: nn.Module, hidden: torch.Tensor, call: Call) -> torch.Tensor:
    """The block's output, by its class's own forward: its weights are in place."""
    with torch.no_grad():
        return forward_decoder_layer(decoder_layer, hidden, call)


def forward_decoder_layer(decoder_layer: nn.Module, hidden: torch.Tensor, call: Call) -> torch.Tensor:
    """As `run_decoder_layer`, and autograd records where it is on."""
    output = type(decoder_layer).forward(decoder_layer, hidden, *call.args, **call.kwargs)
    return output[0] if isinstance(output, tuple) else output


def find_stages(
    decoder_layer: nn.Module,
    linears: Mapping[str, nn.Module],
    hidden: torch.Tensor,
    call: Call,
    star: Callable[[str], str],
) -> list[Stage]:
    """In which order the layers of a block run, and which of them share an input.

    Args:
        decoder_layer: The block, its weights in place.
        linears: Its linear layers by name.
        hidden: Hidden states to try it on.
        call: The block's call.
        star: Gives layers that run in one stage, as those of all experts, one name.

    Returns:
        The stages; layers that these hidden states do not reach are in none.
    """
    reached: list[tuple[str, torch.Tensor]] = []
    with _watching(
        linears, lambda name, inputs: reached.append((name, inputs))
    ):  # keeps inputs, so that no two share memory
        run_decoder_layer(decoder_layer, hidden, call)
    stages: dict[str, Stage] = {}
    previous: torch.Tensor | None = None
    group: list[str] = []
    seen: set[str] = set()
    for name, inputs in reached:
        if name in seen:
            continue
        seen.add(name)
        if (
            previous is not None
            and inputs.data_ptr() == previous.data_ptr()
            and inputs.shape == previous.shape
        ):
            group.append(name)
        else:
            group = [name]
            stages.setdefault(star(name), []).append(group)
        previous = inputs
    return list(stages.values())


@dataclass
class Moments:
    """The second moments of what reached a layer.

    Attributes:
        hessian: float32 [in, in], the sum over tokens of x x^T; `mean` divides it.
        tokens: How many there were.
    """

    hessian: TriangularMatrix
    tokens: int = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Adds activations [..., in]."""
        rows = inputs.reshape(-1, inputs.shape[-1]).to(torch.float32)
        self.hessian.add_products(rows)
        self.tokens += len(rows)

    def mean(self) -> TriangularMatrix:
        """The mean over tokens, in place."""
        return self.hessian.divide(max(self.tokens, 1))


AnyMoments = TypeVar("AnyMoments", bound=Moments)


def measure(
    decoder_layer: nn.Module,
    layers: Mapping[str, nn.Module],
    batches: Sequence[torch.Tensor],
    calls: Sequence[Call],
    is_last_known: bool,
    kind: type[AnyMoments] = Moments,  # type: ignore[assignment]
) -> dict[str, AnyMoments]:
    """The moments of the inputs of some layers over all batches.

    Args:
        decoder_layer: The block, its weights in place.
        layers: The layers by name, one of each group.
        batches: The hidden states that reach the block.
        calls: Its call for each batch.
        is_last_known: Whether each forward can end once it has reached all of them.
        kind: What is gathered of each, from zeros [in, in].
    """
    moments: dict[str, AnyMoments] = {}
    for name, layer in layers.items():
        moments[name] = kind(TriangularMatrix.zeros(size_of(layer)[1]))
    for hidden, call in zip(batches, calls, strict=True):
        missing = set(layers)

        def add(name: str, inputs: torch.Tensor, missing: set[str] = missing) -> None:
            moments[name].add(inputs)
            missing.discard(name)
            if is_last_known and not missing:
                raise _Enough

        with _watching(layers, add), contextlib.suppress(_Enough):
            run_decoder_layer(decoder_layer, hidden, call)
        trim_heap()
    return moments


@contextlib.contextmanager
def _watching(layers: Mapping[str, nn.Module], saw: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    hooks = [
        layer.register_forward_pre_hook(lambda module, args, name=name: saw(name, args[0].detach()))
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
