"""Inputs of single decoder layers, recorded in one pass without weights."""

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
    """Ends a forward pass early."""


@dataclass(frozen=True)
class Call:
    """Arguments of a decoder layer other than its hidden states."""

    args: tuple
    kwargs: Mapping[str, Any]


Stage = list[list[str]]
"""Groups of layers that are measured in one pass. The layers of a group share their input."""


def capture(
    model: nn.Module, decoder_layers: Mapping[str, nn.Module], batches: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, list[Call]]]:
    """Records the inputs of every decoder layer without running any layer.

    Args:
        model: The model. Modules before its decoder layers must be able to compute.
        decoder_layers: Decoder layers by name, in order.
        batches: Token ids [batch, length].

    Returns:
        The hidden states that enter the first decoder layer, for each batch; and the calls of each decoder
            layer, one per batch.

    Raises:
        SetupError: The model changes the hidden states between its decoder layers.
    """
    with torch.no_grad():
        for is_tuple in (False, True):  # some models expect a tuple from a decoder layer
            recorder = _Recorder(list(decoder_layers), is_tuple)
            with recorder.within(decoder_layers):
                for batch in batches:
                    with contextlib.suppress(_Enough):
                        model(input_ids=batch, use_cache=False)
            if recorder.is_plain:
                return recorder.hidden, recorder.calls
    raise SetupError(
        f"A decoder layer of {type(model).__name__} does not receive the output of the layer before it. "
        f"The model cannot be calibrated.",
        expected="decoder layers that are called with the output of the layer before",
        found=recorder.broken,
        fix="Use method='rtn' or 'fp8', which need no calibration data.",
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
    """Returns the decoder layer's output, computed by the forward of its class."""
    with torch.no_grad():
        return forward_decoder_layer(decoder_layer, hidden, call)


def forward_decoder_layer(decoder_layer: nn.Module, hidden: torch.Tensor, call: Call) -> torch.Tensor:
    """Does the same as `run_decoder_layer`, without disabling autograd."""
    output = type(decoder_layer).forward(decoder_layer, hidden, *call.args, **call.kwargs)
    return output[0] if isinstance(output, tuple) else output


def find_stages(
    decoder_layer: nn.Module,
    linears: Mapping[str, nn.Module],
    hidden: torch.Tensor,
    call: Call,
    star: Callable[[str], str],
) -> list[Stage]:
    """Finds the execution order of a decoder layer's linear layers, and their shared inputs.

    Args:
        decoder_layer: The decoder layer, with its weights in memory.
        linears: Linear layers by name.
        hidden: Hidden states to run it with.
        call: Other arguments of the decoder layer.
        star: Returns one common name for layers that run in one stage, such as those of all experts.

    Returns:
        The stages. Layers that these hidden states do not reach are in none.
    """
    reached: list[tuple[str, torch.Tensor]] = []
    with _watching(
        linears, lambda name, inputs: reached.append((name, inputs))
    ):  # keeps inputs alive, so that no two share memory
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
    """Second moments of a layer's input.

    Attributes:
        hessian: float32 [in, in], the sum over tokens of x x^T. `mean` divides it.
        tokens: Number of tokens.
    """

    hessian: TriangularMatrix
    tokens: int = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Adds activations [..., in]."""
        rows = inputs.reshape(-1, inputs.shape[-1]).to(torch.float32)
        self.hessian.add_products(rows)
        self.tokens += len(rows)

    def mean(self) -> TriangularMatrix:
        """Divides by the number of tokens in place, and returns the mean."""
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
    """Gathers the moments of some layers' inputs over all batches.

    Args:
        decoder_layer: The decoder layer, with its weights in memory.
        layers: One layer of each group, by name.
        batches: Hidden states that enter the decoder layer.
        calls: Other arguments of the decoder layer, for each batch.
        is_last_known: True if each forward pass can end after it has reached all of these layers.
        kind: Class of the moments, constructed from zeros [in, in].
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
