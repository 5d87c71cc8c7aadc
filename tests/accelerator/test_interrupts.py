"""Tests that after an interrupt from the keyboard the next pass on accelerators is right."""

import contextlib

import pytest
import torch

from tests.support.accelerator_maps import LAYERS, ORDERS
from tests.support.interruption import Interruption
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator
TOKENS = torch.arange(8)[None]
CYCLIC = {"": "sim:0"} | {layer: ("cpu", "disk")[at % 2] for at, layer in enumerate(LAYERS)}
SHARE = 10
"""One of so many lines is interrupted here; `tests/offload` interrupts all of them."""
MAPS = {"1+cpu+disk": CYCLIC, "2+cpu+disk": CYCLIC | {"model.norm": "sim:1", f"{LAYERS[2]}.mlp": "sim:1"}}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS.to("sim:0")).logits.cpu()


@pytest.fixture(scope="module")
def expected(sim):
    return logits(load(GPTQ, {"": "sim:0"}))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", MAPS)
def test_after_an_interrupt_in_a_layer_the_next_pass_is_right(sim, expected, placement, order):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with sim.streams(**ORDERS[order]):
        model = load(GPTQ, MAPS[placement])
        for layer in model.model.layers:
            for module in (layer.input_layernorm, layer.mlp.up_proj, layer.mlp):
                handle = module.register_forward_hook(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    logits(model)
                handle.remove()
                assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("placement", MAPS)
def test_after_an_interrupt_between_copies_the_next_pass_is_right(sim, expected, placement):
    with sim.streams(**ORDERS["lazy"]):
        model, whole = load(GPTQ, MAPS[placement]), Interruption()
        whole.run(lambda: logits(model))
        places = {line: index for index, line in enumerate(whole.lines)}
        assert len(places) > 100
        for line, index in list(places.items())[::SHARE]:
            with contextlib.suppress(KeyboardInterrupt):
                Interruption(index).run(lambda: logits(model))
            assert torch.equal(logits(model), expected), line
