"""Tests of unsupported formats, which raise an error that names the format before loading."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import FormatError, HfqConfig
from hfq.checkpoint import Checkpoint
from hfq.formats import detect_formats, tensors_by_module
from hfq.formats.detection.unsupported import REFUSED
from tests.support import tiny_models

CT = {"quant_method": "compressed-tensors"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
OTHER_QUARK = "Quark int2 / int3 / int8 in groups / MX"
WORDS, FLOATS = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, 8)
BYTES, POWERS = WORDS.byte(), torch.zeros(4, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def quark(dtype: str, qscheme: str) -> dict:
    weight = {"dtype": dtype, "qscheme": qscheme}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}}


SEEN = [
    ("GPTQ Marlin", {"quant_method": "gptq"}, {"B": WORDS, "s": FLOATS.half()}),
    (
        "GPTQ Marlin",
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
        {"qweight": WORDS, "scales": FLOATS},
    ),
    (
        "marlin-24",
        CT | {"format": "marlin-24"},
        {"weight_packed": WORDS, "scale_packed": FLOATS, "meta": WORDS.short()},
    ),
    ("marlin-24", CT | {"format": "marlin-24"}, {"weight_packed": WORDS, "weight_scale": FLOATS}),
    ("marlin-24", {"quant_method": "gptq"}, {"B_24": WORDS, "B_meta": WORDS.short(), "s": FLOATS}),
    (
        "sparse-24 / sparse-bitmask",
        CT,
        {"compressed": FLOATS, "bitmask": WORDS.byte(), "shape": torch.tensor([4, 8])},
    ),
    (
        "sparse-24 / sparse-bitmask",
        CT | {"format": "sparse-24-bitmask"},
        {"weight_packed": WORDS, "weight_scale": FLOATS},
    ),
    (
        "mxfp6-pack-quantized",
        CT | {"format": "mxfp6-pack-quantized"},
        {"weight_packed": WORDS.byte(), "weight_scale": WORDS.byte()},
    ),
    (
        "mxfp6-pack-quantized",
        CT | {"config_groups": {"group_0": {"targets": ["Linear"], "format": "mxfp6-pack-quantized"}}},
        {"weight_packed": WORDS.byte(), "weight_scale": WORDS.byte()},
    ),
    (
        "bitblas",
        {"quant_method": "gptq", "checkpoint_format": "bitblas"},
        {"qweight": WORDS.char(), "scales": FLOATS},
    ),
    ("AQLM", {"quant_method": "aqlm"}, {"codebooks": FLOATS, "codes": WORDS.short(), "scales": FLOATS}),
    ("VPTQ", {"quant_method": "vptq"}, {"centroids": FLOATS, "indices": WORDS}),
    (
        "EXL2 / EXL3",
        {"quant_method": "exl2"},
        {"q_weight": WORDS, "q_invperm": WORDS.short(), "q_scale": WORDS},
    ),
    ("EXL2 / EXL3", {"quant_method": "exl3"}, {"trellis": WORDS.short(), "suh": FLOATS, "svh": FLOATS}),
    ("SpQR", {"quant_method": "spqr"}, {"dense_weights": WORDS, "row_offsets": WORDS, "col_vals": WORDS}),
    ("QuIP#", {"quant_method": "quip"}, {"Qidxs": WORDS.short(), "SU": FLOATS, "SV": FLOATS}),
    ("FP-Quant", {"quant_method": "fp_quant"}, {"qweight": BYTES, "scales": BYTES, "dqweight": FLOATS[:0]}),
    ("EETQ", {"quant_method": "eetq"}, {"weight": WORDS.char(), "weight_scales": FLOATS[0].half()}),
    ("Four Over Six", {"quant_method": "fouroversix"}, {"weight": BYTES, "weight_scale": BYTES}),
    ("HIGGS", {"quant_method": "higgs"}, {"weight": WORDS.short(), "scales": FLOATS, "tables": FLOATS}),
    ("SINQ", {"quant_method": "sinq"}, {"W_q": BYTES, "scale": FLOATS, "zero": FLOATS}),
    ("QQQ", {"quant_method": "qqq"}, {"B": WORDS, "s_channel": FLOATS, "s_group": FLOATS}),
    *(
        (name, {"quant_method": method}, {"weight_words": WORDS})
        for name, method in (
            ("AQLM", "aqlm"),
            ("VPTQ", "vptq"),
            ("SpQR", "spqr"),
            ("EXL2 / EXL3", "exl3"),
            ("QuIP#", "quip"),
            ("GPTQ Marlin", "marlin"),
            ("bitblas", "bitblas"),
        )
    ),
    ("ComfyUI", {}, {"weight": FLOATS.to(torch.float8_e4m3fn), "scale_weight": FLOATS[0, 0]}),
    ("ComfyUI", FP8, {"weight": FLOATS.to(torch.float8_e4m3fn), "comfy_quant": BYTES[0]}),
    (OTHER_QUARK, quark("uint2", "per_group"), {"weight": BYTES, "weight_scale": FLOATS}),
    (OTHER_QUARK, quark("mx", "None"), {"weight": BYTES}),
    (OTHER_QUARK, quark("int8", "per_group"), {"weight": WORDS.char(), "weight_scale": FLOATS}),
]
IDS = [f"{variant}, {', '.join(tensors)}" for variant, _, tensors in SEEN]


def write(folder, config, tensors):
    """Writes a model of unquantized weights with one quantized layer."""
    dense = {
        name: tensor
        for name, tensor in tiny_models.model_tensors(DenseWeight()).items()
        if tiny_models.FIRST not in name
    }
    stored = {f"{tiny_models.FIRST}.{local}": tensor for local, tensor in tensors.items()}
    return tiny_models.write_model(folder, dense | stored, config)


class DenseWeight:
    """A format for `tiny_models` that quantizes nothing."""

    def quantize(self, weight):
        return {"weight": weight.bfloat16()}


def test_every_refused_dialect_is_seen_in_one_way_or_more():
    assert {variant for variant, _, _ in SEEN} == set(REFUSED)


@pytest.mark.parametrize(("variant", "config", "tensors"), SEEN, ids=IDS)
def test_a_dialect_is_refused_by_its_name(variant, config, tensors, tmp_path):
    checkpoint = Checkpoint.open(write(tmp_path, config, tensors))
    with pytest.raises(FormatError) as caught:
        detect_formats(tensors_by_module(checkpoint.tensors), config)
    assert f"Format {variant} is not supported. Nothing was loaded" in str(caught.value)
    assert caught.value.fix == REFUSED[variant].fix
    assert REFUSED[variant].reason in str(caught.value)
    assert caught.value.file


@pytest.mark.parametrize(("variant", "config", "tensors"), SEEN, ids=IDS)
def test_a_model_of_it_is_refused_before_anything_is_loaded(variant, config, tensors, tmp_path, monkeypatch):
    path = write(tmp_path, config, tensors)
    monkeypatch.setattr("hfq.checkpoint.Reader.map", lambda *_: pytest.fail("a file was mapped"))
    monkeypatch.setattr("hfq.checkpoint.Reader.read_into", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(FormatError) as caught:
        AutoModelForCausalLM.from_pretrained(path, quantization_config=HfqConfig())
    assert f"Format {variant} is not supported. Nothing was loaded" in str(caught.value)


@pytest.mark.parametrize(
    "local", ["B", "s", "codes", "codebooks", "centroids", "indices", "bitmask", "row_offsets"]
)
def test_half_of_a_sign_is_no_sign(local, tmp_path):
    checkpoint = Checkpoint.open(write(tmp_path, {}, {local: WORDS}))
    with pytest.raises(FormatError) as caught:
        detect_formats(tensors_by_module(checkpoint.tensors), {})
    assert "is not supported" not in str(caught.value)


def test_a_plugin_reads_a_format_that_hfq_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr("hfq.formats.detection.plugins._loaded", {"higgs"})
    tensors = {"weight": FLOATS.to(torch.float8_e4m3fn), "weight_scale": FLOATS[:, :1]}
    checkpoint = Checkpoint.open(write(tmp_path, {}, tensors))
    assert detect_formats(tensors_by_module(checkpoint.tensors), {"quant_method": "higgs"})
