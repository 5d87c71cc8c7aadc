"""Tests of the number of Python calls that a module of experts takes for one token."""

import gc
import sys

import pytest
import torch

from hfq.modules.experts import QuantizedExperts
from tests.support import moe_models
from tests.support.models import load

EXPERTS, CHOSEN, LAYERS = 32, 8, 3
SCHEME = moe_models.Scheme("qwen3 by expert, gptq", "qwen3", moe_models.GPTQ, moe_models.GPTQ_CONFIG)
IN_MEMORY, OFFLOADED = 40, 304
"""The most calls of a layer and token. One more call for each expert, read or not, exceeds them."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "num_hidden_layers": LAYERS}
    return moe_models.save_wide(tmp_path_factory.mktemp("moe"), SCHEME, **sizes)


class Calls:
    """Counts the calls of this thread while tokens pass through the experts of all layers.

    Attributes:
        count: The number of calls.
    """

    def __init__(self, model) -> None:
        self.modules = [each for each in model.modules() if isinstance(each, QuantizedExperts)]
        self.count = 0

    def pass_tokens(self, numbers) -> None:
        """Routes tokens to experts that their numbers tell, half of which the token before had, too."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(len(numbers), 1, moe_models.HIDDEN, generator=generator)
        weights = torch.full((1, CHOSEN), 1 / CHOSEN)
        gc.collect()
        gc.disable()  # callbacks of freed objects are calls, too
        try:
            with torch.no_grad():
                for number, states in zip(numbers, hidden, strict=True):
                    for layer, experts in enumerate(self.modules):
                        first = CHOSEN // 2 * number + layer
                        chosen = torch.arange(first, first + CHOSEN)[None] % EXPERTS
                        self.resume()
                        experts(states, chosen, weights)
                        sys.setprofile(None)
        finally:
            sys.setprofile(None)
            gc.enable()

    def resume(self) -> None:
        sys.setprofile(self._note)

    def _note(self, _, event, __) -> None:
        self.count += event == "call"

    def read_at_once(self, offloader) -> None:
        """Makes this thread read, uncounted, where it asks reader threads. So no count depends on time."""

        def submit_all(tickets, is_guess=False) -> None:
            sys.setprofile(None)
            for ticket in tickets:
                for _ in range(ticket.count):
                    ticket.run_next()
            self.resume()

        offloader.pool.submit_all = submit_all

    def of_a_layer(self) -> float:
        """Returns the calls of a layer and token, once every expert was used."""
        self.pass_tokens(range(2 * EXPERTS))
        self.count = 0
        self.pass_tokens(range(16))
        return self.count / 16 / LAYERS


def test_the_calls_of_experts_in_memory_are_few(native, path):
    assert Calls(load(path)).of_a_layer() <= IN_MEMORY


def test_the_calls_of_offloaded_experts_are_few_also_where_some_are_read_and_guessed(native, path):
    layers = {f"model.layers.{layer}.mlp.experts": "disk" for layer in range(LAYERS)}
    model = load(path, {"": "cpu", **layers}, expert_cache_size=0)
    offloader = model.hf_quantizer.loading.offloader
    offloader.experts._may_guess = lambda: True
    calls = Calls(model)
    calls.read_at_once(offloader)
    found = calls.of_a_layer()
    assert offloader.experts.guesses.made > 0 < offloader.experts.misses
    assert found <= OFFLOADED
