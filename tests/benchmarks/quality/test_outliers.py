"""Tests of outlier features: equal outputs, different activations."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.quality.outliers import NONE, Outliers, with_outliers
from benchmarks.quality.training import Training
from hfq import SetupError

IDS = torch.arange(40).view(2, 20) * 7 % 300


def made(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Training(family, hidden=64, layers=2, vocabulary=300).config()
    ).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.05  # norms and biases with distinct values
    return model.double()


def seen(model, layer):
    """Returns the logits, and the largest magnitude of each input channel of a layer."""
    found = []
    hook = (
        model.get_decoder()
        .layers[1]
        .get_submodule(layer)
        .register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    )
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    hook.remove()
    return logits, found[0].abs().flatten(0, -2).amax(0)


@pytest.mark.parametrize(
    ("family", "outliers", "layer"),
    [
        ("opt", Outliers(100, 297), "fc1"),
        ("opt", Outliers(shift=60), "self_attn.k_proj"),
        ("llama", Outliers(200), "mlp.up_proj"),
        ("llama", Outliers(200), "self_attn.q_proj"),
    ],
)
def test_the_model_computes_the_same_from_activations_with_outliers(family, outliers, layer):
    model = made(family)
    changed = with_outliers(model, outliers)
    (expected, before), (logits, after) = seen(model, layer), seen(changed, layer)
    torch.testing.assert_close(
        logits, expected, rtol=1e-8, atol=1e-8
    )  # float64; a shift is taken out again by a subtraction
    assert ((after - before).abs() > 10).sum() == outliers.channels


def test_no_outliers_change_nothing_and_the_model_itself_never_changes():
    model = made("opt")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    same = with_outliers(model, NONE).state_dict()
    with_outliers(model, Outliers(8, 8))
    assert all(
        torch.equal(same[name], tensor) and torch.equal(model.state_dict()[name], tensor)
        for name, tensor in before.items()
    )


def test_a_shift_needs_norms_with_biases():
    with pytest.raises(SetupError, match="only a gain"):
        with_outliers(made("llama"), Outliers(4, 9))


@pytest.mark.parametrize(
    ("outliers", "text"), [(NONE, "none"), (Outliers(4, 9), "×4 +9"), (Outliers(shift=60), "+60")]
)
def test_outliers_have_a_name(outliers, text):
    assert str(outliers) == text
