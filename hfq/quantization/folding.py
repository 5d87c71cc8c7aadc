"""Search for modules that can absorb a scale of linear layers' input channels.

Linear layers with weights W diag(s) compute the same outputs if their inputs become x / s. A norm can provide
that if its weight is divided by s. A linear layer can if its rows are, provided that everything between is
linear in them: values before the output projection, `up` before `down`, or a layer before ReLU and the next
layer.

The search does not depend on module names. A forward pass shows which norm's output is the input of which
layers. Sizes show which layers may feed them, possibly head by head. Each candidate is then tested: after
folding in powers of two, the decoder layer must still compute the same output.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hfq.loading.matching.quantizable_layers import is_expert, size_of, with_number_of, without_number
from hfq.quantization.layer_inputs import Call, run_decoder_layer

__all__ = ["Fold", "Trace", "find_fold", "scale_columns", "trace"]

_EQUAL = 1e-3
"""Largest change of a decoder layer's output that counts as rounding.

It is a fraction of the change without compensation.
"""


@dataclass(frozen=True)
class Fold:
    """A module that absorbs the scale of other layers' inputs.

    Attributes:
        name: Name within the decoder layer.
        module: A norm or a linear layer.
        channels: int64 [in], the output channel of the module that feeds each input channel of those layers.
        offset: Number that a norm adds to its weight: 1 for norms that store their weight minus 1.
    """

    name: str
    module: nn.Module
    channels: torch.Tensor
    offset: float = 0.0

    @property
    def is_norm(self) -> bool:
        """True if the module is a norm."""
        return self.module.weight.dim() == 1  # type: ignore[operator]

    @property
    def out_features(self) -> int:
        """Number of output channels of the module."""
        return len(self.module.weight) if self.is_norm else size_of(self.module)[0]  # type: ignore[arg-type]

    def give(
        self, scale: torch.Tensor, dtype_of: Callable[[str], torch.dtype]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Divides the module's output channels by a scale, within the precision of its stored dtype.

        Args:
            scale: float32 [out of the module], positive. 1 for channels that feed none of the layers.
            dtype_of: Returns the dtype of a stored parameter. Rows of a linear layer stay float32, because
                the layer is quantized later.

        Returns:
            The scale to multiply the layers' input channels by, float32 [in]; and the changed parameters in
                their dtypes, by name within the decoder layer.
        """
        weight: torch.Tensor = self.module._parameters["weight"].detach()  # type: ignore[union-attr]
        changed: dict[str, torch.Tensor] = {}
        if self.is_norm:
            stored = ((weight + self.offset) / scale - self.offset).to(dtype_of(f"{self.name}.weight"))
            is_lost = (stored.float() + self.offset == 0) | ~torch.isfinite(stored)
            changed["weight"] = stored = torch.where(is_lost, weight.to(stored.dtype), stored)
            given = stored.float() + self.offset
            scale = torch.where(is_lost, 1, (weight + self.offset) / given)
            put(self.module, "weight", stored.float())
        else:
            along = scale[:, None] if isinstance(self.module, nn.Linear) else scale
            put(self.module, "weight", weight / along)
        bias = self.module._parameters.get("bias")
        if bias is not None:
            changed["bias"] = (bias.detach() / scale).to(dtype_of(f"{self.name}.bias"))
            put(self.module, "bias", changed["bias"].float())
        return scale[self.channels], {f"{self.name}.{local}": value for local, value in changed.items()}


def put(module: nn.Module, local: str, value: torch.Tensor) -> None:
    """Replaces a parameter's value."""
    module._parameters[local] = nn.Parameter(value, requires_grad=False)


def scale_columns(layer: nn.Module, scale: torch.Tensor) -> None:
    """Multiplies the input channels of a linear layer or a Conv1D by a scale [in]."""
    weight: torch.Tensor = layer._parameters["weight"].detach()  # type: ignore[union-attr]
    put(layer, "weight", weight * (scale if isinstance(layer, nn.Linear) else scale[:, None]))


@dataclass(frozen=True)
class Trace:
    """Record of one forward pass of a decoder layer.

    Attributes:
        inputs: Input of each linear layer that ran, in execution order.
        norms: Norms by name within the decoder layer, with their outputs.
        output: Output of the decoder layer.
    """

    inputs: Mapping[str, torch.Tensor]
    norms: Sequence[tuple[str, nn.Module, torch.Tensor]]
    output: torch.Tensor

    def readers(self, name: str) -> list[str]:
        """Returns the layers that receive the same input tensor as this one."""
        if name not in self.inputs:
            return []
        return [other for other, inputs in self.inputs.items() if _is_same(inputs, self.inputs[name])]


def trace(
    decoder_layer: nn.Module, linears: Mapping[str, nn.Module], hidden: torch.Tensor, call: Call
) -> Trace:
    """Runs a decoder layer and records the inputs of its linear layers and outputs of its norms.

    All recorded tensors stay alive, so that no two share memory.
    """
    inputs: dict[str, torch.Tensor] = {}
    norms: list[tuple[str, nn.Module, torch.Tensor]] = []

    def saw_input(name: str, args: tuple) -> None:
        inputs.setdefault(name, args[0])

    def saw_output(name: str, module: nn.Module, output: torch.Tensor) -> None:
        norms.append((name, module, output))

    hooks = [
        layer.register_forward_pre_hook(lambda module, args, name=name: saw_input(name, args))
        for name, layer in linears.items()
    ]
    for name, module in decoder_layer.named_modules():
        if _is_norm(module):
            hooks.append(
                module.register_forward_hook(
                    lambda module, args, output, name=name: saw_output(name, module, output)
                )
            )
    try:
        return Trace(inputs, norms, run_decoder_layer(decoder_layer, hidden, call))
    finally:
        for hook in hooks:
            hook.remove()


def find_fold(
    decoder_layer: nn.Module,
    linears: Mapping[str, nn.Module],
    group: Sequence[str],
    seen: Trace,
    hidden: torch.Tensor,
    call: Call,
    known: dict[str, Fold | None],
) -> Fold | None:
    """Finds the module that can absorb a scale of some layers' input.

    Args:
        decoder_layer: The decoder layer, with its weights in memory. It is unchanged afterwards.
        linears: All of its quantized layers. No other linear layer may change.
        group: The layers with this input.
        seen: Result of `trace` for these hidden states.
        hidden: Hidden states to test candidates with.
        call: Other arguments of the decoder layer.
        known: Results for the same layers of other experts. The new result is added.

    Returns:
        The module. None if there is none, or if these hidden states reach neither the layers nor those of
            another expert.
    """
    pattern = without_number(group[0])
    if is_expert(group[0]) and pattern in known:
        return _of_expert(known[pattern], group[0], decoder_layer, linears)
    if group[0] not in seen.inputs:
        return None
    layers = [linears[name] for name in group]
    effect = _change(decoder_layer, layers, None, seen.output, hidden, call)
    candidates = _candidates(decoder_layer, linears, group, seen) if effect else ()
    fits = (
        fold
        for fold in candidates
        if _change(decoder_layer, layers, fold, seen.output, hidden, call) <= _EQUAL * effect
    )
    known[pattern] = next(fits, None)
    return known[pattern]


def _of_expert(
    like: Fold | None, layer: str, decoder_layer: nn.Module, linears: Mapping[str, nn.Module]
) -> Fold | None:
    """Returns the result of another expert, transferred to the expert of this layer."""
    if like is None:
        return None
    name = with_number_of(like.name, layer)
    module = decoder_layer.get_submodule(name)
    is_free = like.is_norm or any(module is quantized for quantized in linears.values())
    return dataclasses.replace(like, name=name, module=module) if is_free else None


def _candidates(
    decoder_layer: nn.Module, linears: Mapping[str, nn.Module], group: Sequence[str], seen: Trace
) -> Iterator[Fold]:
    """Yields norms before the group, and then earlier linear layers, last first."""
    inputs = seen.inputs[group[0]]
    channels = torch.arange(inputs.shape[-1])
    for name, module, output in seen.norms:
        if _is_same(output, inputs):
            yield Fold(name, module, channels)
            yield Fold(name, module, channels, offset=1.0)
    names = {module: name for name, module in decoder_layer.named_modules()}
    dims = {
        vars(module).get(name) for module in decoder_layer.modules() for name in ("head_dim", "head_size")
    }
    head_dims = sorted(dim for dim in dims if isinstance(dim, int))
    ran = list(seen.inputs)
    for name in reversed(ran[: ran.index(group[0])]):
        layer = linears[name]
        for feeding in _channel_maps(size_of(layer)[0], len(channels), head_dims):
            yield Fold(names[layer], layer, feeding)


def _channel_maps(given: int, taken: int, dims: Iterable[int]) -> Iterator[torch.Tensor]:
    """Yields possible maps from another layer's input channels to a layer's output channels."""
    if given == taken:
        yield torch.arange(taken)
    if given > taken:  # values after queries and keys, or `up` after the gate
        yield torch.arange(given - taken, given)
    shared = (
        given if given < taken else (given - taken) // 2
    )  # values of fewer heads: alone, or after as many keys
    for dim in dims:
        if 0 < shared < taken and not shared % dim and not taken % shared:
            heads = torch.arange(given - shared, given).view(-1, 1, dim)
            yield heads.expand(-1, taken // shared, -1).flatten()
        if given == 3 * taken and not taken % dim:  # queries, keys, and values of each head together
            yield torch.arange(given).view(-1, 3, dim)[:, 2].flatten()


def _change(
    decoder_layer: nn.Module,
    layers: Sequence[nn.Module],
    fold: Fold | None,
    expected: torch.Tensor,
    hidden: torch.Tensor,
    call: Call,
) -> float:
    """Returns the change of the output after scaling inputs by powers of two.

    The fold compensates the scale. None means no compensation.
    """
    outputs = size_of(layers[0])[1] if fold is None else fold.out_features
    scale = torch.randint(-4, 5, (outputs,), generator=torch.Generator().manual_seed(0)).float().exp2()
    with _restored([*layers, *([] if fold is None else [fold.module])]):
        if fold is not None:
            kept = torch.ones(outputs)
            kept[fold.channels] = scale[fold.channels]
            scale, _ = fold.give(kept, lambda name: torch.float32)
        for layer in layers:
            scale_columns(layer, scale)
        return float((run_decoder_layer(decoder_layer, hidden, call) - expected).norm())


@contextlib.contextmanager
def _restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    before = [(module, dict(module._parameters)) for module in modules]
    try:
        yield
    finally:
        for module, parameters in before:
            module._parameters.update(parameters)


def _is_norm(module: nn.Module) -> bool:
    own = module._parameters
    weight = own.get("weight")
    is_alone = not any(module.children()) and own.keys() <= {"weight", "bias"}
    return is_alone and weight is not None and weight.dim() == 1


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape)
