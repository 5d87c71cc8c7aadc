"""Operators of torch that stand for quantized layers in compiled and exported graphs.

A layer is its stored tensors, which are inputs of the graph, and the text of its layout. The experts of one
module have too many tensors for that: a graph holds a number that no other module has.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.library import Library, register_autograd, register_fake

from hfq.errors import SetupError
from hfq.formats import ActivationScheme, Format
from hfq.kernels.activations import quantize_activations
from hfq.kernels.cpp import dense
from hfq.kernels.registry import Kernel
from hfq.modules.late_tensor import awaited
from hfq.modules.layer_layout import LayerLayout, layout_of
from hfq.modules.tensor_cache import TensorCache

__all__ = [
    "OPS",
    "experts_number",
    "head_grad",
    "look_up",
    "multiply_head",
    "multiply_rounded",
    "without_autocast",
]

OPS = torch.ops.hfq
"""The operators, by name."""

_library = Library("hfq", "DEF")
_held: dict[int, tuple[weakref.ref[torch.Tensor], str, TensorCache]] = {}
_experts: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_AS_IT_IS = contextlib.nullcontext()


def multiply_rounded(
    kernel: Kernel,
    activations: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    weight_format: Format,
    scheme: ActivationScheme,
) -> torch.Tensor:
    """Multiplies rounded activations by a layer.

    Args:
        kernel: Multiplies.
        activations: [..., in_features].
        tensors: The layer's tensors by checkpoint name, on the device of the activations.
        weight_format: The format of the tensors.
        scheme: Scheme that quantizes activations.
    """
    if kernel.rounds:
        return kernel.linear(activations, tensors, weight_format, scheme)
    return kernel.linear(quantize_activations(activations, scheme, tensors), tensors, weight_format)


def multiply_head(activations: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes `nn.functional.linear`, few 16-bit rows by the C++ library."""
    found = dense.linear(activations, weight)
    return torch.nn.functional.linear(activations, weight) if found is None else found


def head_grad(
    grad: torch.Tensor, inputs: Sequence[torch.Tensor], is_needed: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the gradients of a head for activations and weight, None if not needed."""
    (activations, weight), of_weight = inputs, None
    if is_needed[1]:
        rows = activations.reshape(-1, activations.shape[-1])
        of_weight = grad.reshape(-1, grad.shape[-1]).t() @ rows
    return grad @ weight if is_needed[0] else None, of_weight


def look_up(
    name: str,
    tokens: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    weight_format: Format,
    size: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Dequantizes the rows of tokens, in panels of `row_multiple` rows.

    Args:
        name: The embedding's name, for messages.
        tokens: Integers of any shape.
        tensors: The embedding's tensors by checkpoint name.
        weight_format: The format of the tensors.
        size: Number of rows of the table, and of elements of a row.
        dtype: Dtype of the result.

    Returns:
        [..., elements of a row].

    Raises:
        SetupError: A token is out of range.
    """
    wanted, places = tokens.reshape(-1).unique(return_inverse=True)
    count, width = size
    if wanted.numel() and not 0 <= int(wanted[0]) <= int(wanted[-1]) < count:
        raise SetupError(
            f"{name} received a token outside of its table.",
            expected=f"0 to {count - 1}",
            found=f"{int(wanted[0])} to {int(wanted[-1])}",
            fix="Use the tokenizer of this checkpoint.",
        )
    device, multiple = next(iter(tensors.values())).device, weight_format.row_multiple
    rows = torch.empty(wanted.numel(), width, dtype=dtype, device=device)
    last, panel = -1, torch.empty(0)
    for index, token in enumerate(wanted.tolist()):
        start = token // multiple * multiple
        if start != last:
            panel = torch.empty(min(multiple, count - start), width, dtype=torch.float32, device=device)
            weight_format.dequantize_into(panel, tensors, start)
            last = start
        rows[index] = panel[token - start]
    return rows[places].view(*tokens.shape, width)


def experts_number(experts: Any) -> torch.Tensor:
    """Returns a new number for a module of experts, int64 [] on the CPU.

    It is random, so that a program that another process exported finds no module of this one. A graph takes
    a tensor as input, and would be made again for each other integer.
    """
    number = secrets.randbits(62)
    _experts[number] = experts
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def without_autocast(values: torch.Tensor) -> contextlib.AbstractContextManager:
    """Returns the context of a kernel, which chooses the dtypes of its own operations."""
    device = values.device.type
    is_needed = not values.is_meta and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_needed else _AS_IT_IS


def _tensors(stored: Sequence[torch.Tensor], text: str, layout: LayerLayout) -> Mapping[str, torch.Tensor]:
    """Returns a layer's tensors, in one object as long as a graph passes the same ones."""
    key, sources = id(stored[0]), dict(zip(layout.names, stored, strict=False))
    first, described, cache = _held.get(key, (None, None, None))
    if first is not None and cache is not None and described == text and first() is stored[0]:
        found = cache.find(sources)  # type: ignore[arg-type]
        if found is not None:
            return found[0]
    cache = TensorCache(sources)  # type: ignore[arg-type]
    _held[key] = weakref.ref(stored[0], functools.partial(_forget, key)), text, cache
    with torch.inference_mode(False):
        return cache.keep(layout.tensors(stored), is_meta=False)[0]


def _forget(key: int, first: weakref.ref[torch.Tensor]) -> None:
    held = _held.get(key)
    if held is not None and held[0] is first:
        del _held[key]


def _linear(activations: torch.Tensor, stored: list[torch.Tensor], text: str) -> torch.Tensor:
    layout = layout_of(text)
    kernel, layer = layout.kernel_for(activations), (_tensors(stored, text, layout), layout.weight_format)
    with without_autocast(activations):
        if layout.scheme is None:
            return kernel.linear(activations, *layer).contiguous()
        return multiply_rounded(kernel, activations, *layer, layout.scheme).contiguous()


def _linear_grad(grad: torch.Tensor, stored: list[torch.Tensor], text: str) -> torch.Tensor:
    layout = layout_of(text)
    kernel, tensors = layout.kernel_for(grad), _tensors(stored, text, layout)
    with without_autocast(grad):
        return kernel.linear_grad(grad, tensors, layout.weight_format).contiguous()


def _lookup(tokens: torch.Tensor, stored: list[torch.Tensor], text: str, dtype: torch.dtype) -> torch.Tensor:
    layout = layout_of(text)
    size = layout.out_features, layout.in_features
    tensors = _tensors(stored, text, layout)
    return look_up("A quantized embedding", tokens, tensors, layout.weight_format, size, dtype)


def _dequantize(stored: list[torch.Tensor], text: str, dtype: torch.dtype) -> torch.Tensor:
    layout = layout_of(text)
    return layout.weight_format.dequantize(_tensors(stored, text, layout), dtype).contiguous()


def _compute_of(number: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Returns the function that computes with the experts of a number.

    Raises:
        SetupError: This process has no such module.
    """
    found = _experts.get(int(number))
    if found is None:
        raise SetupError(
            "This graph computes with experts that are not in memory.",
            expected="the model that the graph was made of, in the same process",
            found="a model that was freed, or another process",
            fix="Keep the model while the graph is used, and compile or export it again in each process.",
        )
    return found._compute_routed


def _routed(
    hidden_states: torch.Tensor, routed: torch.Tensor, weights: torch.Tensor, number: torch.Tensor
) -> torch.Tensor:
    return awaited(_compute_of(number)(hidden_states, routed, weights)).contiguous()


def _routed_grad(
    grad: torch.Tensor,
    hidden_states: torch.Tensor,
    routed: torch.Tensor,
    weights: torch.Tensor,
    number: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the forward pass again, since an operator keeps no intermediate values."""
    compute = _compute_of(number)
    with torch.enable_grad(), _autograd():
        inputs = hidden_states.detach().requires_grad_(), weights.detach().requires_grad_()
        outputs = compute(inputs[0], routed, inputs[1])
        found = torch.autograd.grad(outputs, inputs, grad, materialize_grads=True, allow_unused=True)
    return found[0].contiguous(), found[1].contiguous()


def _autograd() -> Any:
    """Returns a context with autograd, which torch turns off within an operator."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _new_outputs(activations: torch.Tensor, _stored: Sequence[torch.Tensor], text: str) -> torch.Tensor:
    return activations.new_empty(*activations.shape[:-1], layout_of(text).out_features)


def _new_inputs(grad: torch.Tensor, _stored: Sequence[torch.Tensor], text: str) -> torch.Tensor:
    return grad.new_empty(*grad.shape[:-1], layout_of(text).in_features)


def _new_rows(
    tokens: torch.Tensor, _stored: Sequence[torch.Tensor], text: str, dtype: torch.dtype
) -> torch.Tensor:
    return tokens.new_empty(*tokens.shape, layout_of(text).in_features, dtype=dtype)


def _new_weight(stored: Sequence[torch.Tensor], text: str, dtype: torch.dtype) -> torch.Tensor:
    layout = layout_of(text)
    return stored[0].new_empty(layout.out_features, layout.in_features, dtype=dtype)


def _new_logits(activations: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return activations.new_empty(*activations.shape[:-1], weight.shape[0])


def _new_like(hidden_states: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


def _new_grads(
    _grad: object, hidden_states: torch.Tensor, _routed: object, weights: torch.Tensor, _: object
) -> tuple:
    return _new_like(hidden_states), _new_like(weights)


def _keep_layer(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    _, stored, ctx.text = inputs
    ctx.save_for_backward(*stored)


def _backward_layer(ctx: Any, grad: torch.Tensor) -> tuple:
    stored = list(ctx.saved_tensors)
    return OPS.linear_grad(grad, stored, ctx.text), [None] * len(stored), None


def _keep_inputs(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_head(ctx: Any, grad: torch.Tensor) -> tuple:
    return head_grad(grad, ctx.saved_tensors, ctx.needs_input_grad)


def _backward_routed(ctx: Any, grad: torch.Tensor) -> tuple:
    of_hidden_states, of_weights = OPS.experts_grad(grad, *ctx.saved_tensors)
    return of_hidden_states, None, of_weights, None


def _define(schema: str, compute: Callable, fake: Callable, tags: tuple = ()) -> None:
    """Defines an operator.

    Args:
        schema: Its signature.
        compute: Computes it on any device.
        fake: Returns what `compute` returns, without values.
        tags: Tags of torch.
    """
    _library.define(schema, tags=tags)
    name = schema.partition("(")[0]
    _library.impl(name, compute, "CompositeExplicitAutograd")
    register_fake(f"hfq::{name}", fake, lib=_library)


_HOST = (torch.Tag.cudagraph_unsafe,)
"""Tags of operators whose work depends on values that the host reads."""

for _name in ("linear", "linear_without_grad"):
    _define(f"{_name}(Tensor activations, Tensor[] stored, str layout) -> Tensor", _linear, _new_outputs)
_define("linear_grad(Tensor grad, Tensor[] stored, str layout) -> Tensor", _linear_grad, _new_inputs)
_define(
    "lookup(Tensor tokens, Tensor[] stored, str layout, ScalarType dtype) -> Tensor",
    _lookup,
    _new_rows,
    _HOST,
)
_define("dequantize(Tensor[] stored, str layout, ScalarType dtype) -> Tensor", _dequantize, _new_weight)
_define("head(Tensor activations, Tensor weight) -> Tensor", multiply_head, _new_logits)
_define(
    "experts(Tensor hidden_states, Tensor routed, Tensor weights, Tensor number) -> Tensor",
    _routed,
    _new_like,
    _HOST,
)
_define(
    "experts_grad(Tensor grad, Tensor hidden_states, Tensor routed, Tensor weights, Tensor number)"
    " -> (Tensor, Tensor)",
    _routed_grad,
    _new_grads,
    _HOST,
)
# no autograd: its dispatch takes longer than the call
_library.impl("linear_without_grad", torch.library.fallthrough_kernel, "Autograd")
register_autograd("hfq::linear", _backward_layer, setup_context=_keep_layer, lib=_library)
register_autograd("hfq::head", _backward_head, setup_context=_keep_inputs, lib=_library)
register_autograd("hfq::experts", _backward_routed, setup_context=_keep_inputs, lib=_library)
