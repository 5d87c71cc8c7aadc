"""Tests that quantizing covers encoders, decoders, and other architectures, layer by layer."""

import re

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

import hfq
from hfq import FormatError, HfqConfig, Recipe, SetupError
from hfq.checkpoint import Checkpoint
from hfq.loading.loaded_model import loader_of
from hfq.loading.matching.quantizable_layers import check_unfused
from hfq.modules.linear import QuantizedLinear
from tests.support import tiny_models

pytest.importorskip("optimum.gptq")
IDS = torch.arange(12)[None] % 90 + 3
TEXT, BOTH = {"input_ids": IDS}, {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
PIXELS = {"pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)}
PATCHES = {
    "pixel_values": torch.linspace(-1, 1, 16 * 384).view(16, 384),
    "image_grid_thw": torch.tensor([[1, 4, 4]]),
    "mm_token_type_ids": torch.tensor([[0, 1, 1, 1, 1, 0, *[0] * 12]]),
}
SOUND = {"input_features": torch.linspace(-1, 1, 256).view(1, 8, 32), "decoder_input_ids": IDS[:, :5]}
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
ENCODER = {**SIZES, "intermediate_size": 128, "vocab_size": 96, "max_position_embeddings": 64}
DECODER = {**ENCODER, "vocab_size": 128, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
VISION = {**SIZES, "intermediate_size": 128, "image_size": 32, "patch_size": 8}
CLIP = {
    "text_config": {**ENCODER, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
    "vision_config": VISION,
    "projection_dim": 64,
}
SEQ2SEQ = {
    "d_model": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")},
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
SPARSE = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
LLAVA = {
    "text_config": {"model_type": "llama", **DECODER},
    "vision_config": {"model_type": "clip_vision_model", **VISION},
    "image_token_index": 100,
}
QWEN = {
    "text_config": {**DECODER, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
    "vision_config": {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 64,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 8,
        "temporal_patch_size": 2,
    },
    "image_token_id": 100,
    "vision_start_token_id": 102,
    "vision_end_token_id": 103,
}
FALCON = {**SIZES, "vocab_size": 96}
MODELS = {
    "BertModel": (ENCODER, TEXT, 13, set()),
    "BertForSequenceClassification": (ENCODER, TEXT, 13, {"classifier"}),
    "RobertaForMaskedLM": (ENCODER, TEXT, 12, {"dense", "decoder"}),
    "ViTForImageClassification": (VISION, PIXELS, 12, {"classifier"}),
    "Swinv2ForImageClassification": (
        {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4]}
        | {"window_size": 4},
        PIXELS,
        13,
        {"0", "2", "classifier"},
    ),
    "CLIPModel": (CLIP, {**TEXT, **PIXELS}, 24, {"text_projection", "visual_projection"}),
    "T5ForConditionalGeneration": (T5, BOTH, 28, {"wo", "lm_head"}),
    "SwitchTransformersForConditionalGeneration": (
        {**T5, "num_decoder_layers": 2, "num_experts": 4, **SPARSE},
        BOTH,
        44,
        {"classifier", "lm_head"},
    ),
    "BartForConditionalGeneration": (SEQ2SEQ, BOTH, 32, {"lm_head"}),
    "MarianMTModel": (SEQ2SEQ, BOTH, 32, {"lm_head"}),
    "WhisperForConditionalGeneration": ({**SEQ2SEQ, **SPEECH}, SOUND, 32, {"proj_out"}),
    "MambaForCausalLM": ({**SIZES, "vocab_size": 96}, TEXT, 6, {"dt_proj", "lm_head"}),
    "FalconForCausalLM": ({**FALCON, "bias": True}, TEXT, 8, {"lm_head"}),
    "FalconForCausalLM new": (
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
        TEXT,
        8,
        {"lm_head"},
    ),
    "LlamaForQuestionAnswering": (DECODER, TEXT, 14, {"qa_outputs"}),
    "Qwen3ForQuestionAnswering": (DECODER, TEXT, 14, {"qa_outputs"}),
    "GPT2LMHeadModel": ({"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 96}, TEXT, 8, {"lm_head"}),
    "OPTForCausalLM": ({**ENCODER, "ffn_dim": 128, "word_embed_proj_dim": 32}, TEXT, 14, {"lm_head"}),
    "LlavaForConditionalGeneration": (
        LLAVA,
        {"input_ids": torch.cat([torch.full((1, 16), 100), IDS], 1), **PIXELS},
        28,
        {"lm_head"},
    ),
    "Qwen2VLForConditionalGeneration": (
        QWEN,
        {"input_ids": torch.cat([torch.tensor([[102, 100, 100, 100, 100, 103]]), IDS], 1), **PATCHES},
        24,
        {"lm_head"},
    ),
}
"""Options, inputs, number of quantized layers, and last names of the other linear layers."""


def written(name, folder):
    """Writes random floats, and returns the class and the model that loads them back."""
    cls = getattr(transformers, name.partition(" ")[0])
    torch.manual_seed(0)
    model = cls(cls.config_class(**MODELS[name][0]))
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1)
    model.tie_weights()
    model.save_pretrained(folder)
    return cls, cls.from_pretrained(folder)


def plain(layer: str) -> str:
    """Returns the name in transformers' model of a layer; experts of Switch Transformers have another one."""
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(up|down)_proj", layer)
    return f"{found[1]}.expert_{found[2]}.{'wi' if found[3] == 'up' else 'wo'}" if found else layer


def output(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, Recipe("fp8")) for name in MODELS),
        ("BartForConditionalGeneration", Recipe("rtn", group_size=32)),
        ("MambaForCausalLM", Recipe("mxfp4")),
    ],
    ids=lambda value: getattr(value, "method", value),
)
def test_all_linear_layers_but_heads_and_routers_are_quantized(name, method, tmp_path):
    _, inputs, count, left = MODELS[name]
    cls, floats = written(name, tmp_path / "floats")
    (tmp_path / "offload").mkdir()

    def load(path, device_map, config):
        return cls.from_pretrained(
            path, quantization_config=config, device_map=device_map, offload_folder=tmp_path / "offload"
        )

    model = load(tmp_path / "floats", None, HfqConfig(quantize_weights=method))
    quantized = loader_of(model).quantized
    linears = {layer for layer, module in floats.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    others = linears - set(map(plain, quantized))
    assert len(quantized) == count
    assert {layer.rpartition(".")[2] for layer in others} == left
    assert all(type(module) is QuantizedLinear for module in quantized.values())
    expected = output(model, inputs)
    model.save_pretrained(tmp_path / "saved")
    bytes_of = tiny_models.digests(tmp_path / "saved")
    mixed = {"": "cpu", **dict.fromkeys(list(quantized)[::3], "disk")}
    for device_map in ({"": "disk"}, mixed):
        for path, config in (("floats", HfqConfig(quantize_weights=method)), ("saved", HfqConfig())):
            other = load(tmp_path / path, device_map, config)
            assert torch.equal(output(other, inputs), expected)
        other.save_pretrained(tmp_path / "again")
        assert tiny_models.digests(tmp_path / "again") == bytes_of
    hfq.quantize(tmp_path / "floats", method, tmp_path / "written")
    assert tiny_models.digests(tmp_path / "written") == bytes_of
    configs = [Checkpoint.open(tmp_path / path).config for path in ("written", "saved")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    for layer, module in quantized.items():
        floats.get_submodule(plain(layer)).weight.data = module.weight.clone()
    torch.testing.assert_close(output(floats, inputs), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "BertModel", "MambaForCausalLM"])
@pytest.mark.parametrize(
    "recipe", [Recipe("gptq"), Recipe("rtn", distill_steps=2)], ids=lambda value: value.method
)
def test_calibration_of_other_models_is_an_error_whose_fix_works(name, recipe, tmp_path):
    written(name, tmp_path / "floats")
    with pytest.raises(SetupError, match=f"(?s){name} cannot be calibrated.*method='fp8'"):
        hfq.quantize(tmp_path / "floats", recipe, tmp_path / "out", dataset=[IDS])
    assert [path.name for path in tmp_path.iterdir()] == ["floats"]
    assert len(hfq.quantize(tmp_path / "floats", Recipe("fp8"), tmp_path / "out").layers) == MODELS[name][2]


@pytest.mark.parametrize(
    ("name", "count", "left"),
    [
        ("LlavaForConditionalGeneration", 14, "model.vision_tower.encoder.layers"),
        ("OPTForCausalLM", 12, "model.decoder.project_in, model.decoder.project_out"),
    ],
)
def test_formats_that_others_read_in_decoder_layers_alone_name_the_rest(name, count, left, tmp_path, caplog):
    cls, _ = written(name, tmp_path)
    config = HfqConfig(quantize_weights=Recipe("rtn", group_size=32))
    model = cls.from_pretrained(tmp_path, quantization_config=config)
    assert len(loader_of(model).quantized) == count
    assert left in caplog.text


def test_the_fix_for_sizes_that_do_not_fit_names_all_of_them(tmp_path):
    cls, _ = written("MambaForCausalLM", tmp_path)
    with pytest.raises(FormatError, match=r"modules_to_not_convert=\['x_proj'\]"):
        cls.from_pretrained(tmp_path, quantization_config=HfqConfig(quantize_weights=Recipe("w4a16")))
    config = HfqConfig(quantize_weights=Recipe("w4a16"), modules_to_not_convert=["x_proj"])
    model = cls.from_pretrained(tmp_path, quantization_config=config)
    assert len(loader_of(model).quantized) == 4


def test_a_new_head_stays_unquantized(tmp_path):
    written("BertModel", tmp_path)
    cls = transformers.BertForTokenClassification
    config = HfqConfig(quantize_weights="fp8")
    model = cls.from_pretrained(tmp_path, quantization_config=config)
    assert len(loader_of(model).quantized) == 12
    assert type(model.classifier) is nn.Linear


def test_parameters_that_are_no_experts_are_not_refused():
    unit = type("Unit", (nn.Module,), {})()
    unit.scale, unit.positions = nn.Parameter(torch.ones(4, 1, 1)), nn.Parameter(torch.ones(1, 9, 8))
    check_unfused(unit, "unit", ())
    unit.experts = nn.Parameter(torch.ones(4, 8, 8))
    with pytest.raises(SetupError, match=r"unit\.experts"):
        check_unfused(unit, "unit", ())


def test_a_model_whose_first_layer_is_quantized_reports_its_own_dtype(tmp_path):
    sizes = {"patch_input": False, "d_model": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    floats = transformers.PatchTSTModel(
        transformers.PatchTSTConfig(**sizes, patch_length=32, patch_stride=32, context_length=96)
    )
    floats.save_pretrained(tmp_path / "floats")
    model = transformers.PatchTSTModel.from_pretrained(
        tmp_path / "floats", quantization_config=HfqConfig(quantize_weights="fp8"), dtype=torch.bfloat16
    )
    assert type(model.encoder.embedder.input_embedding) is QuantizedLinear
    assert (model.dtype, model.encoder.dtype) == (torch.bfloat16, torch.bfloat16)
    assert model.to(torch.float32).dtype == torch.float32
    model.save_pretrained(tmp_path / "saved")
    assert Checkpoint.open(tmp_path / "saved").config["dtype"] == "float32"
