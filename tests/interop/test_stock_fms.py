"""Tests that are expected to fail because of bugs in FMS 1.13.

A test that passes shows that FMS is fixed.

The config.json of the checkpoints names no quantization, because FMS would otherwise require
fms-model-optimizer.
"""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("fms", reason="ibm-fms is not installed (pip install hfq[fms])")

from transformers import AutoConfig, AutoModelForCausalLM

from tests.interop import fms_models
from tests.interop.test_fms import CONFIG, TOKENS, error, logits, reference

pytestmark = pytest.mark.peers

GPTQ = {"linear_type": "gptq_cpu", "bits": 4, "group_size": 64, "desc_act": False}
FLOAT16 = 5e-3
"""Relative L2 for FMS's GPTQ layers, which compute in float16."""


def stock(path: Path, **options):
    from fms.models import get_model

    with contextlib.redirect_stdout(io.StringIO()):
        return get_model("hf_pretrained", model_path=str(path), **{"fused_weights": False, **options}).eval()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns made(format, key heads, …) → (checkpoint for FMS, expected logits).

    The config.json of the checkpoint names no quantization. The expected logits come from transformers with
    hfq.
    """
    folder, found = tmp_path_factory.mktemp("stock"), {}

    def made(format: str, kv_heads: int, tokens=TOKENS, **options):
        key = (format, kv_heads, len(tokens[0]), *options)
        if key not in found:
            path = fms_models.write(folder / str(len(found)), "llama", format, kv_heads, **options)
            model = AutoModelForCausalLM.from_pretrained(
                path, quantization_config=CONFIG, dtype=torch.float32
            )
            with torch.no_grad():
                expected = model(tokens).logits
            config = json.loads((path / "config.json").read_text())
            config.pop("quantization_config", None)
            (path / "config.json").write_text(json.dumps(config))
            found[key] = path, expected
        return found[key]

    return made


def test_symmetric_gptq_with_many_key_heads_works(made):
    path, expected = made("gptq-sym", 8)
    assert error(logits(stock(path, linear_config=GPTQ)), expected) <= FLOAT16


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="FMS always uses a zero point of 8")
def test_asymmetric_gptq(made):
    path, expected = made("gptq-asym", 8)
    assert error(logits(stock(path, linear_config=GPTQ)), expected) <= FLOAT16


@pytest.mark.xfail(
    strict=True,
    raises=RuntimeError,
    reason="the step for RoPE treats words of packed zero points as features",
)
def test_gptq_with_few_key_heads(made):
    path, expected = made("gptq-sym", 2)
    assert error(logits(stock(path, linear_config=GPTQ)), expected) <= FLOAT16


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="quantized tensors are cast to data_type")
def test_packed_tensors_keep_their_dtype(made):
    path, _ = made("gptq-sym", 8)
    model = stock(path, linear_config=GPTQ, data_type=torch.bfloat16)
    assert model.base_model.layers[0].attn.dense.qweight.dtype == torch.int32


@pytest.mark.xfail(
    strict=True,
    raises=(AssertionError, RuntimeError, NotImplementedError),
    reason="FMS ignores the scales, with a warning",
)
@pytest.mark.parametrize("format", ["fp8-block", "fp8-tensor"])
def test_fp8_without_another_project(made, format):
    path, expected = made(format, 2)
    assert error(logits(stock(path, data_type=torch.float32)), expected) <= FLOAT16


@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="FMS requires fms-model-optimizer")
def test_a_config_that_names_a_quantization(tmp_path):
    from fms.models.hf.config_utils import _FMS_MODEL_CONFIG_REGISTRY as registry

    config = AutoConfig.from_pretrained(fms_models.write(tmp_path, "llama", "gptq-sym", 8))
    type(registry).hf_config_to_fms_config_params(registry, config, None)


@pytest.mark.xfail(
    strict=True, raises=pytest.fail.Exception, reason="FMS leaves missing tensors uninitialized"
)
def test_a_missing_tensor_is_an_error(tmp_path):
    import safetensors.torch as safetensors

    path = fms_models.write(tmp_path, "llama", "dense", 2)
    tensors = safetensors.load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    safetensors.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception):  # noqa: B017  (of any type)
        stock(path)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="FMS looks for rope_scaling in rope_parameters, but transformers 5 does not store it there",
)
def test_scaled_rope(made):
    rope = fms_models.OTHERS["scaled RoPE"][1]["rope_parameters"]
    path, expected = made("dense", 2, rope_parameters=rope, rope_theta=None)
    assert error(logits(stock(path)), expected) <= 5e-6


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="FMS mistakes keys [batch, tokens, heads, …] for [batch, heads, tokens, …]",
)
def test_as_many_tokens_as_key_heads(made):
    path, expected = made("dense", 2, tokens=TOKENS[:, :2])
    with torch.no_grad():
        assert error(stock(path)(TOKENS[:, :2]), expected) <= 5e-6


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="FMS ignores rope_theta")
def test_the_base_of_qwen3s_rope(tmp_path):
    path = fms_models.write_other(tmp_path, "qwen3", "dense")
    assert error(logits(stock(path, multiple_of=1)), reference(path)) <= 5e-6


@pytest.mark.xfail(strict=True, raises=ValueError, reason="FMS rounds the inner size up to a multiple of 256")
@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_an_inner_size_that_256_does_not_divide(tmp_path, name):
    path = (
        fms_models.write(tmp_path, name, "dense", 2)
        if name == "mistral"
        else fms_models.write_other(tmp_path, name, "dense")
    )
    assert error(logits(stock(path)), reference(path)) <= 5e-6


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="FMS ignores sliding_window")
def test_mistrals_sliding_window(tmp_path):
    path = fms_models.write(tmp_path, "mistral", "dense", 2, sliding_window=3)
    assert error(logits(stock(path, multiple_of=1)), reference(path)) <= 5e-6
