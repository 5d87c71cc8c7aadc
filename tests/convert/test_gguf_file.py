"""Conversions from and to GGUF: same numbers, same bytes on the way back, and files that others read."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import CheckpointError
from hfq.checkpoint import Checkpoint, write_safetensors
from hfq.checkpoint.gguf.header import read_gguf_header
from hfq.convert import convert_checkpoint
from hfq.convert.layer_plan import NewTensor
from hfq.loading.gguf.conversion import check_template
from tests.contract.cases import CASES
from tests.loading.gguf.test_saved_files import split
from tests.support import ggml_library, models, tiny_models
from tests.support.checkpoint_files import refused, stored_bytes
from tests.support.gguf_files import IDS, write_gguf
from tests.support.gguf_models import make_model, write_model, write_random_llama
from tests.support.reshard_files import assert_nothing_left

ROWS = {case.id: case for case in CASES}
TOKENS = torch.arange(1, 25)[None]


def logits(path):
    return models.logits(models.load(path, kernel="reference"), TOKENS)


def convert(source, target, to, template=None):
    template = None if template is None else Checkpoint.open(template)
    return convert_checkpoint(
        Checkpoint.open(source), target, to, template=template, check_template=check_template
    )


def stored(path):
    """Returns {name: (type, bytes)} of the tensors of a GGUF file."""
    header = read_gguf_header(path / "model.gguf")
    return {name: (info.blocks.type, stored_bytes(info)) for name, info in header.tensors.items()}


@pytest.mark.parametrize("name", ["llama-biased", "llama-tied", "gemma3", "qwen35", "qwen3moe", "gpt-oss"])
def test_logits_are_bit_identical_and_the_way_back_leads_to_the_same_bytes(tmp_path, name):
    source = write_model(tmp_path / "source", name, make_model(name))
    report = convert(source, tmp_path / "packed", "pack-quantized")
    expected = logits(source)
    assert torch.equal(logits(tmp_path / "packed"), expected)
    assert Checkpoint.open(tmp_path / "packed").gguf is None
    assert convert(tmp_path / "packed", tmp_path / "back", "gguf", source).layers == report.layers
    assert torch.equal(logits(tmp_path / "back"), expected)
    assert without_exponentials(stored(tmp_path / "back")) == without_exponentials(stored(source))
    assert "quantization_config" not in Checkpoint.open(tmp_path / "back").config


def without_exponentials(tensors):
    """Leaves out -exp(a), which several numbers may be for one float32 a."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("ssm_a")}


def test_experts_that_stay_floats_are_fused(tmp_path):
    template = write_model(tmp_path / "template", "qwen3moe", make_model("qwen3moe"))
    convert(template, tmp_path / "packed", "pack-quantized")
    source = with_float_experts(tmp_path / "packed", make_model("qwen3moe"))
    convert(source, tmp_path / "to", "gguf", template)
    assert torch.equal(logits(tmp_path / "to"), logits(source))
    types = {name: kind for name, (kind, _) in stored(tmp_path / "to").items()}
    assert {types[f"blk.0.ffn_{local}_exps.weight"] for local in ("gate", "up", "down")} == {"BF16"}
    assert types["blk.0.attn_q.weight"] == stored(template)["blk.0.attn_q.weight"][0]


def with_float_experts(path, model):
    """Replaces the quantized experts of a checkpoint by those of a model in bfloat16."""
    config = json.loads((path / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = [name for name in group["targets"] if ".experts." not in name]
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name: t for name, t in tiny_models.stored_tensors(path).items() if ".experts." not in name}
    for name, fused in model.state_dict().items():
        if ".experts." not in name:
            continue
        owner, _, projection = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
        for expert, weight in enumerate(fused.bfloat16()):
            for part, half in zip(parts, weight.chunk(len(parts)), strict=True):
                tensors[f"{owner}.{expert}.{part}.weight"] = half.clone()
    stored = {name: tiny_models.as_stored(t) for name, t in tensors.items()}
    write_safetensors(path / "model.safetensors", stored, {"format": "pt"})
    return path


@pytest.mark.parametrize("to", ["gptq", "gptq_v2"])
def test_linear_layers_become_gptq(tmp_path, to):
    source = write_model(tmp_path / "source", "llama", make_model("llama"), ("BF16", "Q8_0", "Q4_0"))
    convert(source, tmp_path / "gptq", to)
    assert torch.equal(logits(tmp_path / "gptq"), logits(source))
    convert(tmp_path / "gptq", tmp_path / "back", "gguf", source)
    assert stored(tmp_path / "back") == stored(source)


@pytest.mark.parametrize("kind", ["Q5_0", "Q3_K", "Q6_K"])
def test_other_products_of_a_code_and_a_scale_are_held_by_pack_quantized(tmp_path, kind):
    source = write_random_llama(tmp_path / "source", kind, layers=1)
    convert(source, tmp_path / "packed", "pack-quantized")
    assert torch.equal(logits(tmp_path / "packed"), logits(source))
    if kind == "Q5_0":
        convert(tmp_path / "packed", tmp_path / "back", "gguf", source)
        assert stored(tmp_path / "back") == stored(source)


def test_mxfp4_changes_the_order_of_nibbles(tmp_path):
    """The random blocks hold negative zeros, which ggml reads as zeros."""
    source = write_random_llama(tmp_path / "source", "MXFP4", layers=1)
    convert(source, tmp_path / "packed", "mxfp4-pack-quantized")
    expected = logits(source)
    assert torch.equal(logits(tmp_path / "packed"), expected)
    convert(tmp_path / "packed", tmp_path / "back", "gguf", source)
    assert torch.equal(logits(tmp_path / "back"), expected)
    assert {kind for kind, _ in stored(tmp_path / "back").values()} == {"MXFP4", "F32"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gptq-v1-w4-sym", "Q4_0"), ("pack-quantized-w8", "Q8_0"), ("mxfp4", "MXFP4")],
)
def test_checkpoints_of_other_tools_become_blocks(tmp_path, name, kind):
    """The groups of 64 channels become two blocks with one scale."""
    case = ROWS[name]
    tensors = tiny_models.model_tensors(case.format)
    tensors = {
        key: t.half() if key.endswith(".weight_scale") and t.is_floating_point() else t
        for key, t in tensors.items()
    }
    source = tiny_models.write_model(tmp_path / "source", tensors, case.config)
    convert(source, tmp_path / "to", "gguf", template(tmp_path))
    assert torch.equal(logits(tmp_path / "to"), logits(source))
    types = {name: kind for name, (kind, _) in stored(tmp_path / "to").items()}
    assert {types[f"blk.0.{local}.weight"] for local in ("attn_q", "attn_output", "ffn_down")} == {kind}
    assert (types["token_embd.weight"], types["output_norm.weight"]) == ("BF16", "F32")


def template(tmp_path, **changed):
    """Writes the metadata of the model of `tiny_models` without tensors."""
    keys = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.file_type": 1,
        "llama.block_count": 2,
        "llama.embedding_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"t{number}" for number in range(96)],
        "quantize.imatrix.file": "other.dat",
        **changed,
    }
    (tmp_path / "template").mkdir(exist_ok=True)
    return write_gguf(
        tmp_path / "template" / "vocab.gguf",
        {key: value for key, value in keys.items() if value is not None},
        {},
    )


def write_gptq(tmp_path):
    case = ROWS["gptq-v1-w4-sym"]
    return tiny_models.write_model(tmp_path / "source", tiny_models.model_tensors(case.format), case.config)


def test_a_norm_of_nan_is_equal_to_itself(tmp_path):
    case = ROWS["gptq-v1-w4-sym"]
    tensors = tiny_models.model_tensors(case.format)
    tensors["model.norm.weight"][0] = torch.nan
    source = tiny_models.write_model(tmp_path / "source", tensors, case.config)
    convert(source, tmp_path / "to", "gguf", template(tmp_path))
    norm = torch.frombuffer(bytearray(stored(tmp_path / "to")["output_norm.weight"][1]), dtype=torch.float32)
    assert torch.equal(norm.isnan(), tensors["model.norm.weight"].isnan())


@pytest.mark.parametrize("name", ["gemma3", "llama-biased"])
def test_computed_norms_and_biases_are_read_back(tmp_path, monkeypatch, name):
    source = write_model(tmp_path / "source", name, make_model(name))
    part = NewTensor.part

    def spoiled(tensor):
        if callable(tensor.data) and len(tensor.shape) == 1 and tensor.dtype == "F32":
            good = tensor.data
            return part(dataclasses.replace(tensor, data=lambda: good() + 1))
        return part(tensor)

    monkeypatch.setattr(NewTensor, "part", spoiled)
    with refused("does not read back", kind=CheckpointError):
        convert(source, tmp_path / "packed", "pack-quantized")
    assert_nothing_left(tmp_path)


def test_metadata_are_those_of_the_template(tmp_path):
    source, found = write_gptq(tmp_path), template(tmp_path, **{"general.alignment": 64})
    convert(source, tmp_path / "to", "gguf", found)
    before, after = read_gguf_header(found), read_gguf_header(tmp_path / "to" / "model.gguf")
    own = {"general.file_type": 2, "general.quantization_version": 2}
    kept = {key: value for key, value in before.keys.items() if not key.startswith("quantize.")}
    assert after.keys == {**kept, **own}
    assert all(info.range.offset % 64 == 0 for info in after.tensors.values())
    assert next(iter(after.tensors)) == "token_embd.weight"


def test_tensors_that_repeat_the_config_are_copied_from_the_template(tmp_path):
    source = write_gptq(tmp_path)
    config = json.loads((source / "config.json").read_text())
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    (source / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    other = write_random_llama(tmp_path / "other", "Q8_0", layers=1)
    factors = torch.full((16,), 2.0).numpy().tobytes()
    keys = read_gguf_header(template(tmp_path)).keys
    scalars = {key: value for key, value in keys.items() if isinstance(value, (int, str))}
    scalars["tokenizer.ggml.tokens"] = ["t"] * 96
    scalars |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2}
    found = write_gguf(other / "model.gguf", scalars, {"rope_freqs.weight": ("F32", (16,), factors)})
    convert(source, tmp_path / "to", "gguf", found)
    assert stored(tmp_path / "to")["rope_freqs.weight"] == ("F32", factors)


def test_plain_transformers_reads_the_file_as_that_of_the_source(tmp_path):
    pytest.importorskip("gguf")
    source = write_model(tmp_path / "source", "llama-biased", make_model("llama-biased"))
    convert(source, tmp_path / "packed", "pack-quantized")
    convert(tmp_path / "packed", tmp_path / "back", "gguf", source)
    found, expected = (
        AutoModelForCausalLM.from_pretrained(path, gguf_file="model.gguf", dtype=torch.float32)
        for path in (tmp_path / "back", source)
    )
    assert torch.equal(models.logits(found, TOKENS), models.logits(expected, TOKENS))


def test_each_part_of_a_split_becomes_a_shard(tmp_path):
    source = write_model(tmp_path / "source", "llama", make_model("llama"))
    expected = logits(source)
    split(source)
    convert(source, tmp_path / "packed", "pack-quantized")
    assert torch.equal(logits(tmp_path / "packed"), expected)
    assert len(list((tmp_path / "packed").glob("model-0000?-of-00002.safetensors"))) == 2


def test_ggml_and_the_package_gguf_read_the_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    convert(write_gptq(tmp_path), tmp_path / "to", "gguf", template(tmp_path))
    path = tmp_path / "to" / "model.gguf"
    header = read_gguf_header(path)
    read = gguf.GGUFReader(path)
    assert {tensor.name: (int(tensor.tensor_type), tensor.data.tobytes()) for tensor in read.tensors} == {
        name: (IDS[info.blocks.type], stored_bytes(info)) for name, info in header.tensors.items()
    }
    if not ggml_library.is_installed():
        pytest.skip("needs ggml's library")
    found = ggml_library.read_tensors(path)
    assert found == {
        name: (IDS[info.blocks.type], info.range.offset - header.data_start, info.nbytes)
        for name, info in header.tensors.items()
    }
