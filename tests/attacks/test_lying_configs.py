"""Promise 15: a config.json that contradicts the files, or itself, raises an error.

The error names the key or the tensor.
"""

import json

import pytest

from hfq import FormatError
from tests.support.checkpoint_files import refused
from tests.support.model_copies import edit_config, load

Q_PROJ = "model.layers.0.self_attn.q_proj"
GATE_PROJ = "model.layers.0.mlp.gate_proj"


def test_a_config_that_lies_about_bits_is_refused_with_the_tensor_that_shows_it(gptq):
    for bits in (2, 3, 8):
        edit_config(gptq, {"bits": bits})
        with refused(
            f"expected: {bits} bits", "found: 4 bits", "`bits`", kind=FormatError, tensor=f"{Q_PROJ}.qzeros"
        ):
            load(gptq)


@pytest.mark.parametrize("bits", [0, 1, 5, -4, 2**40, "4", 4.0, True, [4]])
def test_bits_that_gptq_does_not_have_are_refused(gptq, bits):
    with refused(f"bits={bits!r}", "Fix: Set bits in config.json to a valid value", kind=FormatError):
        load(edit_config(gptq, {"bits": bits}))


@pytest.mark.parametrize("size", [0, -2, 2**40, "128", 128.0, True])
def test_group_sizes_that_cannot_be_are_refused(gptq, size):
    with refused(
        f"group_size={size!r}", "Fix: Set group_size in config.json to a valid value", kind=FormatError
    ):
        load(edit_config(gptq, {"group_size": size}))


def test_a_group_size_that_the_tensors_contradict_is_refused(gptq):
    with refused(
        "does not match", f"{Q_PROJ}.scales", "[2, 128], found F16 [1, 128]", kind=FormatError, file=gptq
    ):
        load(edit_config(gptq, {"group_size": 64}))


@pytest.mark.parametrize("size", [[0, 128], [128], [128, -1], 128, "128", [2**40, 2**40], [128.0, 128]])
def test_block_sizes_that_cannot_be_are_refused(fp8, size):
    with refused("weight_block_size", repr(size), kind=FormatError):
        load(edit_config(fp8, {"weight_block_size": size}))


def test_a_block_size_that_the_tensors_contradict_is_refused(fp8):
    with refused("does not match", f"{GATE_PROJ}.weight_scale_inv", kind=FormatError, file=fp8):
        load(edit_config(fp8, {"weight_block_size": [64, 128]}))


@pytest.mark.parametrize("size", [256, 400])
def test_an_intermediate_size_that_the_tensors_contradict_is_refused(model, size):
    tensor = "qweight" if model.name == "model-gptq" else "weight"
    with refused(
        "does not match LlamaForCausalLM", f"- {GATE_PROJ}.{tensor}: expected", kind=FormatError, file=model
    ):
        load(edit_config(model, intermediate_size=size))


@pytest.mark.parametrize("layers", [3, 5])
def test_a_depth_that_the_tensors_contradict_is_refused(model, layers):
    with refused(
        "does not match LlamaForCausalLM",
        f"model.layers.{layers if layers < 4 else 4}.",
        kind=FormatError,
        file=model,
    ):
        load(edit_config(model, num_hidden_layers=layers))


@pytest.mark.parametrize("value", [-1, True])
@pytest.mark.parametrize(
    "key", ["hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"]
)
def test_a_size_that_is_none_is_refused_by_its_key(gptq, key, value):
    with refused(f"{key}={value}", "Fix: Download config.json", kind=FormatError, file=gptq / "config.json"):
        load(edit_config(gptq, **{key: value}))


@pytest.mark.parametrize(
    "changes",
    [
        *({key: 0} for key in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")),
        *({"hidden_size": value} for value in ("128", 128.5, None, [128])),
        {"num_attention_heads": 5_000_000, "head_dim": 5_000_000, "hidden_size": 5_000_000},
    ],
    ids=str,
)
def test_a_size_that_no_model_can_have_is_refused_by_hfq_itself(gptq, changes):
    with refused(next(iter(changes)), "config.json", kind=FormatError):
        load(edit_config(gptq, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_layers": 10**9},
        {"vision_config": {"depth": 10**9}},
        {"thinker": {"text": {"num_hidden_layers": 10**9}}},
    ],
    ids=str,
)
def test_a_depth_is_checked_under_every_name_that_a_model_may_give_it(gptq, changes):
    with refused("=1000000000", kind=FormatError, file=gptq / "config.json"):
        load(edit_config(gptq, **changes))


@pytest.mark.parametrize(
    "changes", [{"quantization_config": ["gptq"]}, {"quantization_config": "gptq"}], ids=str
)
def test_a_quantization_config_that_is_no_object_is_refused(gptq, changes):
    (gptq / "quantize_config.json").unlink()
    config = {**json.loads((gptq / "config.json").read_text()), **changes}
    (gptq / "config.json").write_text(json.dumps(config))
    with refused("quantization_config", kind=FormatError):
        load(gptq)


@pytest.mark.parametrize(
    "value",
    ["marlin", 2, ["gptq"]],
)
def test_a_checkpoint_format_that_is_not_known_is_refused(gptq, value):
    with refused("checkpoint_format", repr(value), kind=FormatError):
        load(edit_config(gptq, {"checkpoint_format": value}))
