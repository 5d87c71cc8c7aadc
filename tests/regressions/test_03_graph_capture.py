"""Tests that torch records no addresses of tensors and no offloaded weights, which would return garbage."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hfq.errors import SetupError
from tests.support.models import load, logits

X = torch.randn(2, 128, generator=torch.Generator().manual_seed(0))
CAPTURES = {
    "torch.jit.trace": lambda layer: torch.jit.trace(layer, (X,)),
    "make_fx": lambda layer: make_fx(layer)(X),
    "torch.func": lambda layer: torch.func.vmap(layer)(X),
}


@pytest.mark.parametrize("kernel", ["cpp", "reference"])
@pytest.mark.parametrize("capture", CAPTURES)
def test_no_kernel_is_captured(capture, kernel, native):
    layer = load(kernel=kernel).model.layers[0].self_attn.q_proj
    with torch.no_grad(), pytest.raises(SetupError, match=f"q_proj cannot be captured by {capture}[.] Only"):
        CAPTURES[capture](layer)
    assert torch.isfinite(layer(X)).all()


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_offloaded_weights_are_not_captured(kernel):
    model = load(
        device_map={"": "cpu", "model.layers.0": "disk", "model.embed_tokens": "disk"}, kernel=kernel
    )
    for module, inputs in ((model.model.layers[0], X[None]), (model.model.embed_tokens, torch.tensor([3]))):
        with torch.no_grad(), pytest.raises(SetupError, match=r"captured by torch\.jit\.trace"):
            torch.jit.trace(module, (inputs,))
        with (
            torch.no_grad(),
            pytest.raises(SetupError, match=r"model\.(layers\.0|embed_tokens).*is offloaded"),
        ):
            torch.export.export(module, (inputs,))
    assert torch.isfinite(logits(model, torch.tensor([[3]]))).all()
