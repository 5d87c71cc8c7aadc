"""GPTQ layers that are resolved together: the same outcome as one by one, or none."""

import itertools
import logging

import pytest
import torch

from hfq import FormatError
from hfq.formats.gptq import Gptq

GROUPS, OUT, IN, SPAN = 4, 32, 256, 64
ORDER = torch.arange(IN, dtype=torch.int32) // SPAN


def layer(zero=7, g_idx=ORDER, scale=0.5):
    """Returns the tensors of a layer whose stored zero points are `zero`, except for its codes."""
    word = sum(zero << shift for shift in range(0, 32, 4))
    qzeros = torch.full((GROUPS, OUT // 8), word - (word >> 31 << 32), dtype=torch.int32)
    scales = torch.full((GROUPS, OUT), 1.0, dtype=torch.float16)
    scales[2, 5] = scale
    return {"qzeros": qzeros, "scales": scales, "g_idx": g_idx}


def with_another_zero(tensors):
    tensors["qzeros"][1, 0] = 0x12345678
    return tensors


LAYERS = {
    "v1": layer(7),
    "v2": layer(8),
    "scattered": layer(7, ORDER.flip(0)),
    "scattered otherwise": layer(7, ORDER.roll(1)),
    "beyond the groups": layer(7, ORDER.flip(0) + 1),
    "negative": layer(7, ORDER.flip(0) - 1),
    "an empty group": layer(7, ORDER.flip(0).clamp(max=2)),
    "not a number": layer(7, scale=torch.nan),
    "infinite": layer(7, scale=torch.inf),
    "zero points that differ": with_another_zero(layer(7)),
    "the largest zero point": with_another_zero(layer(15)),
}
FORMATS = {
    "sym by the config": {"says_symmetric": True},
    "sym by default": {"names_writer": False},
    "labeled v1": {"zero_reading": "word_plus_one"},
    "AutoGPTQ": {"zero_reading": "field_plus_one", "names_writer": False, "symmetric": False},
    "asym": {"zero_reading": "word_plus_one", "symmetric": False},
    "without a name": {"is_nameless": True, "names_writer": False, "symmetric": False},
}


def outcome(weight_format, tensors, caplog):
    """Returns the resolved format, or the text of an error or a warning."""
    caplog.clear()
    try:
        resolved = weight_format.resolve("m", tensors)
    except FormatError as error:
        return str(error)
    return caplog.text or resolved


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("first", "second"), [*itertools.combinations_with_replacement(LAYERS, 2)])
def test_a_stack_is_resolved_as_its_layers_or_not_at_all(first, second, options, caplog):
    caplog.set_level(logging.WARNING)
    weight_format = Gptq(4, SPAN, g_idx_length=IN, **options)
    layers = [LAYERS[first], LAYERS[second], LAYERS[first]]
    expected = [outcome(weight_format, tensors, caplog) for tensors in layers]
    caplog.clear()
    found = weight_format.resolve_stack(
        {name: torch.stack([each[name] for each in layers]) for name in layers[0]}
    )
    assert not caplog.records
    assert found is None or expected == [found] * 3
    is_constant = first not in ("zero points that differ", "the largest zero point")
    if first == second and isinstance(expected[0], Gptq) and (is_constant or not weight_format.symmetric):
        assert found == expected[0]


def test_layers_without_an_index_are_resolved_together():
    tensors = {name: torch.stack([tensor] * 2) for name, tensor in layer().items() if name != "g_idx"}
    assert Gptq(4, SPAN, zero_reading="word_plus_one").resolve_stack(tensors) == Gptq(
        4, SPAN, zero_reading="word_plus_one"
    )
