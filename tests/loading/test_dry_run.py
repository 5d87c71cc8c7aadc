"""Tests that a plan from headers matches the load: bytes on each device, and KV caches."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
)
from typer.testing import CliRunner

from hfq import HfqConfig, report
from hfq.cli.main import app
from hfq.errors import CheckpointError, SetupError
from hfq.loading.dry_run import open_model
from hfq.loading.kv_layers import kv_layers
from hfq.loading.loaded_model import loader_of
from hfq.placement.estimate.kv_cache import kv_nbytes
from tests.support import tiny_models

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = SIZES | {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "heads of their own": LlamaConfig(**SIZES, num_key_value_heads=4),
    "grouped heads": LlamaConfig(**SIZES, num_key_value_heads=2),
    "one head of its own size": LlamaConfig(**SIZES, num_key_value_heads=1, head_dim=24),
    "sliding window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=7),
    "every other layer slides": Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16, sliding_window=7),
    "latents, DeepSeek-V2": DeepseekV2Config(**LATENT),
    "latents, DeepSeek-V3": DeepseekV3Config(**LATENT),
    "Conv1D": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, bos_token_id=1, eos_token_id=2),
    "fused projections": Phi3Config(**SIZES, num_key_value_heads=2),
    "one head for all": FalconConfig(**SIZES, multi_query=True),
}


@pytest.mark.parametrize("what", CONFIGS)
@pytest.mark.parametrize(("batch", "context"), [(1, 5), (3, 20)])
def test_kv_bytes_are_those_of_transformers_own_cache(what, batch, context):
    model = AutoModelForCausalLM.from_config(CONFIGS[what], dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        cache = model(torch.randint(3, 90, (batch, context)), use_cache=True).past_key_values
    real = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    layers, uncounted = kv_layers(model)
    assert kv_nbytes(layers, batch, context, "bfloat16") == real > 0
    assert uncounted == 0


def plan(*arguments) -> dict:
    done = CliRunner().invoke(app, ["plan", *map(str, arguments), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def measure(model) -> dict[str, int]:
    """Returns the bytes of a loaded model.

    Counts tensors in memory, tensors in files, and its offload buffer.
    """
    loading = loader_of(model)
    held = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()] if not t.is_meta}
    away = [
        module
        for module in loading.quantized.values()
        if all(t.is_meta for t in module.stored_tensors().values())
    ]
    on_disk = sum(info.nbytes for module in away for info in module.infos.values())
    parameters = dict(model.named_parameters())
    on_disk += sum(
        info.nbytes
        for name, info in loading.match.unquantized.items()
        if name in parameters and parameters[name].is_meta
    )
    ring = loading.offloader.buffer_nbytes if loading.offloader is not None else 0
    return {"cpu": sum(held.values()), "disk": on_disk, "ring": ring}


@pytest.mark.parametrize("name", ["tiny-llama-gptq", "tiny-llama-fp8", "tiny-llama"])
def test_planned_bytes_are_measured_bytes_in_every_home(name):
    path = tiny_models.DATA / name
    whole = plan(path, "--max-model-len", 1)
    parts = whole["devices"]["cpu"]
    work = parts["kv_cache_nbytes"] + parts["activations_nbytes"]
    enough = int(parts["total_nbytes"] * 1.02)  # a buffer that is read instead of mapped has gaps
    assert plan(path, "--max-model-len", 1, "--disk", "0B", "--cpu", f"{enough}B")["devices"] == {
        "cpu": parts | {"capacity_nbytes": enough}
    }
    for share, homes in ((1.01, {"cpu"}), (0.72, {"cpu", "disk"}), (None, {"cpu", "disk"})):
        cpu = _least(path, work) if share is None else int(parts["weights_nbytes"] * share) + work
        planned = plan(path, "--max-model-len", 1, "--cpu", f"{cpu}B")
        model = AutoModelForCausalLM.from_pretrained(
            path,
            quantization_config=HfqConfig(kernel="reference"),
            device_map="auto",
            max_memory=planned["max_memory"],
        )
        assert model.hfq_device_map == planned["device_map"]
        measured, expected = measure(model), planned["devices"]
        assert set(expected) == homes
        assert expected["cpu"]["total_nbytes"] <= cpu
        assert measured["cpu"] == pytest.approx(expected["cpu"]["weights_nbytes"], rel=0.02)
        assert measured["disk"] == pytest.approx(
            expected.get("disk", {"weights_nbytes": 0})["weights_nbytes"], rel=0.02
        )
        assert measured["ring"] == pytest.approx(expected["cpu"]["buffer_nbytes"], rel=0.02)
        offloader = model.hf_quantizer.loading.offloader
        passed, pages = (0, 0) if offloader is None else (offloader.pass_nbytes, 8192 * len(offloader.units))
        assert (
            passed <= planned["moved"]["onloaded_per_step_nbytes"] <= passed + pages
        )  # a unit is read in whole pages


def _least(path, work: int) -> int:
    """Returns the smallest sufficient memory, as the error message states it."""
    done = CliRunner().invoke(app, ["plan", str(path), "--max-model-len", "1", "--cpu", "20000B"])
    assert done.exit_code == 1
    return int(done.exception.expected.split()[2].replace(",", "")) + work


def test_a_skeleton_is_reached_without_reading_weights(monkeypatch):
    from hfq.loading import model_loader as loading

    monkeypatch.setattr(loading, "load_quantized_weights", lambda *_: pytest.fail("weights were read"))
    model = open_model(tiny_models.DATA / "tiny-llama-gptq")
    assert all(tensor.is_meta for tensor in model.loading.model.parameters())
    assert model.sizes.weights["gptq 4-bit bfloat16"][0] == sum(
        out * into for out, into in model.shapes().quantized
    )
    assert open_model(tiny_models.DATA / "tiny-llama-gptq", "float32").sizes.dtype == "float32"


def test_what_cannot_be_loaded_cannot_be_planned(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint at this path"):
        open_model(tmp_path / "nowhere")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tiny_models.DATA / "tiny-llama" / "model.safetensors")
    config = json.loads((tiny_models.DATA / "tiny-llama" / "config.json").read_text())
    changes = {"architectures": ["OwnModel"], "auto_map": {"AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises((SetupError, CheckpointError)):
        open_model(folder)


def test_a_report_tells_what_was_predicted_beside_what_was_achieved():
    model = AutoModelForCausalLM.from_pretrained(
        tiny_models.DATA / "tiny-llama-gptq",
        quantization_config=HfqConfig(kernel="reference"),
        device_map={"": "disk"},
    )
    plain, measured = report(model).speed, report(model, measure=True).speed
    assert plain.step_achieved_seconds is None
    assert "not measured" in str(plain)
    assert measured.step_achieved_seconds > 0
    assert measured.load_achieved_seconds > 0
    assert measured.step_predicted_seconds is None  # no profile, and fewer bytes than calls
    assert "one token: not predicted, achieved" in str(measured)
    assert f"achieved {1 / measured.step_achieved_seconds:.3g} tokens/s" in str(measured)
    assert report(model).to_dict()["speed"]["source"]
