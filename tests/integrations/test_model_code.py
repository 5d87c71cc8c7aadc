"""Models whose own code reads, moves or initialises the weights of its layers: what hfq gives them, and what it refuses."""

import json
import re

import pytest
import tiny_models
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hfq import HfqConfig, PlacementError
from hfq.checkpoint import write_safetensors
from hfq.formats.fp8 import Fp8

CONFIG = {"quant_method": "fbgemm_fp8"}
TOKENS = {"input_ids": torch.tensor([[1, 5, 9, 60, 33, 2, 7]])}
SIGLIP = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
    "vision_use_head": False,
}  # fmt: skip
FALCON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 8, "time_step_rank": 16}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 96, "decoder_start_token_id": 0}
LLAMA = {key: value for key, value in tiny_models.CONFIG.items() if key not in ("model_type", "architectures")}
PIXELS = {"pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)}


def write(folder, auto, kind: str, options: dict, packed: str):
    """(a plain float32 model with the dequantized weights, the folder of its packed checkpoint)."""
    torch.manual_seed(5)
    model = auto.from_config(AutoConfig.for_model(kind, **options), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn(parameter.shape) * (0.1 if parameter.dim() > 1 else 0.5)
        parameter.data += 1.0 if "norm" in name else 0.0
    tensors, weight_format = {}, Fp8()
    for name, tensor in list(model.state_dict().items()):
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and re.search(packed, module):
            stored = weight_format.quantize(tensor)
            tensors |= {f"{module}.{local}": t for local, t in stored.items()}
            model.get_parameter(name).data = weight_format.dequantize(stored)
        elif name not in model.all_tied_weights_keys:
            tensors[name] = tensor.clone()
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(
        folder / "model.safetensors", {n: tiny_models.as_stored(t) for n, t in tensors.items()}, {"format": "pt"}
    )
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "quantization_config": CONFIG}
    (folder / "config.json").write_text(json.dumps(config))
    return model, folder


CASES = {
    "siglip, whose initialisation zeroes biases": (AutoModel, "siglip_vision_model", SIGLIP, r"_proj$|fc\d$", PIXELS),
    "falcon, whose linear layers have a forward of their own": (
        AutoModelForCausalLM, "falcon", FALCON, r"(query_key_value|dense\w*)$", TOKENS,
    ),
    "mamba, which reads weight and bias": (AutoModelForCausalLM, "mamba", MAMBA, r"(in|x|dt|out)_proj$", TOKENS),
    "t5, which reads the dtype of a weight": (
        AutoModelForSeq2SeqLM, "t5", T5, r"\.(q|k|v|o|wi|wo)$", {**TOKENS, "decoder_input_ids": TOKENS["input_ids"]},
    ),
}  # fmt: skip


def output(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        found = model(**inputs)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def load(auto, path, device_map):
    config = HfqConfig(activations="none")
    return auto.from_pretrained(path, quantization_config=config, dtype=torch.float32, device_map=device_map).eval()


@pytest.mark.parametrize("case", CASES)
def test_it_runs_in_every_placement_and_is_saved_as_it_was(case, tmp_path):
    auto, kind, options, packed, inputs = CASES[case]
    plain, path = write(tmp_path / "source", auto, kind, options, packed)
    models = [load(auto, path, device_map) for device_map in ({"": "cpu"}, {"": "disk"})]
    found = [output(model, inputs) for model in models]
    expected = output(plain, inputs)
    # float32 sums over panels in another order than over the whole
    assert (found[0] - expected).norm() <= 1e-5 * expected.norm()
    assert torch.equal(found[0], found[1])
    assert len(models[0].hf_quantizer.loading.packed) >= 8
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / str(number))
        assert tiny_models.digests(tmp_path / str(number)) == tiny_models.digests(path)


def test_a_bias_that_is_read_is_a_copy_in_the_models_dtype(tmp_path):
    auto, kind, options, packed, _ = CASES["siglip, whose initialisation zeroes biases"]
    _, path = write(tmp_path, auto, kind, options, packed)
    model = load(auto, path, {"": "disk"}).to(torch.bfloat16)
    layer = model.get_submodule("encoder.layers.0.self_attn.q_proj")
    assert layer.bias.dtype == layer.weight.dtype == torch.bfloat16
    layer.bias.zero_()
    assert layer.bias.abs().sum() > 0


def test_an_input_that_was_moved_to_meta_is_refused(tmp_path):
    options = LLAMA
    _, path = write(tmp_path, AutoModelForCausalLM, "llama", options, r"_proj$")
    model = load(AutoModelForCausalLM, path, {"": "cpu", "model.embed_tokens": "disk"})
    with pytest.raises(PlacementError, match=r"(?s)model.embed_tokens was given an input on meta.*Fix:"):
        model.get_input_embeddings()(TOKENS["input_ids"].to("meta"))


def test_a_tied_model_that_stores_its_head_alone_runs_from_disk(tmp_path):
    options = LLAMA | {"tie_word_embeddings": True}
    plain, path = write(tmp_path, AutoModelForCausalLM, "llama", options, r"_proj$")
    stored = tiny_models.stored_tensors(path)
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    write_safetensors(path / "model.safetensors", {n: tiny_models.as_stored(t) for n, t in stored.items()}, {"format": "pt"})
    expected = output(plain, TOKENS)
    for device_map in ({"": "cpu"}, {"": "disk"}):
        found = output(load(AutoModelForCausalLM, path, device_map), TOKENS)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
