"""Tests of QMoE's writer: experts of different sizes, all other layers as they were."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import hfq
from hfq import HfqConfig, SetupError
from hfq.checkpoint import Checkpoint
from hfq.formats.codecs.pair_dictionary import ENTRIES
from hfq.modules.experts import QuantizedExperts
from tests.quantization.conftest import SOURCE
from tests.support.tiny_models import digests, stored_tensors

MODELS = {
    "mixtral": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 96,
    },
    "switch_transformers": {
        "d_model": 64,
        "d_ff": 75,
        "d_kv": 16,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "num_experts": 4,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "vocab_size": 96,
        "decoder_start_token_id": 0,
    },
}
LAST = {
    "mixtral": {"model.layers.1": "disk"},
    "switch_transformers": {"encoder.block.1": "disk", "decoder.block.1": "disk"},
}
IDS = torch.arange(24)[None] * 3 % 96


@pytest.fixture(scope="module", params=MODELS)
def written(request, tmp_path_factory):
    """Returns (kind, folder of the floats, folder of the quantized checkpoint, report)."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **MODELS[request.param], dtype="bfloat16")
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    kind.from_config(config).bfloat16().save_pretrained(folder / "floats")
    report = hfq.quantize(folder / "floats", "qmoe", output_dir=folder / "qmoe")
    return request.param, folder / "floats", folder / "qmoe", report


def load(folder, kind, device_map, **options):
    cls = AutoModelForSeq2SeqLM if kind == "switch_transformers" else AutoModelForCausalLM
    return cls.from_pretrained(folder, quantization_config=HfqConfig(**options), device_map=device_map)


def logits(model, kind):
    more = {"decoder_input_ids": IDS[:, :5]} if kind == "switch_transformers" else {}
    with torch.no_grad():
        return model(input_ids=IDS, **more).logits


def test_experts_alone_are_quantized_each_in_its_own_size(written):
    kind, floats, folder, report = written
    before, found = digests(floats), digests(folder)
    experts = {name for name in before if ".experts." in name}
    assert {name: found[name] for name in before if name not in experts} == {
        name: before[name] for name in before if name not in experts
    }
    local = [name.removesuffix(".weight") for name in experts]
    assert {f"{name}.{part}" for name in local for part in ("w_comp", "row_off", "ter_minmax")} == (
        found.keys() - before.keys()
    )
    assert len(report.layers) == len(experts) == {"mixtral": 24, "switch_transformers": 16}[kind]
    assert len({found[f"{name}.w_comp"][1] for name in local}) > len(experts) / 2
    assert report.nbytes == sum(info.nbytes for info in Checkpoint.open(folder).tensors.values())
    assert all(0 < layer.loss < 1 for layer in report.layers)


def test_every_placement_gives_the_same_bits(written):
    kind, _, folder, _ = written
    expected = logits(load(folder, kind, {"": "cpu"}), kind)
    for device_map in ({"": "cpu"} | LAST[kind], {"": "disk"}):
        for size in (None, 0, 1):
            model = load(folder, kind, device_map, expert_cache_size=size)
            assert torch.equal(logits(model, kind), expected)
            assert torch.equal(logits(model, kind), expected)


def test_experts_on_disk_are_read_when_tokens_are_routed_to_them(written):
    kind, _, folder, _ = written
    model, routed = load(folder, kind, {"": "disk"}), set()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedExperts):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: routed.update((name, expert) for expert in chosen(inputs[1]))
            )
    logits(model, kind)
    counts = model.hf_quantizer.loading.offloader.experts
    assert 0 < counts.misses == len(routed) < 2 * 4 + 1


def chosen(routing):
    """Returns the experts of the indices [tokens, k], or of a mask [tokens, 1, experts]."""
    return (routing.any(0).nonzero()[:, 1] if routing.dim() == 3 else routing.unique()).tolist()


@pytest.mark.parametrize("placement", ["cpu", "disk"])
def test_saving_gives_back_the_bytes(written, placement, tmp_path):
    kind, _, folder, _ = written
    load(folder, kind, {"": placement}).save_pretrained(tmp_path)
    assert digests(tmp_path) == digests(folder)


def test_a_repeated_run_writes_nothing_else(written, tmp_path):
    _, floats, folder, report = written
    again = hfq.quantize(floats, "qmoe", output_dir=tmp_path / "again")
    assert digests(tmp_path / "again") == digests(folder)
    assert (again.nbytes, again.layers) == (report.nbytes, report.layers)


def test_gptq_chooses_among_the_values_of_the_same_rows(written, tmp_path):
    kind, floats, folder, _ = written
    options = {"dataset": [IDS] * 4, "num_calibration_samples": 4, "max_seq_length": IDS.shape[1]}
    if kind == "switch_transformers":
        with pytest.raises(SetupError, match="cannot be calibrated"):
            hfq.quantize(floats, "qmoe-gptq", output_dir=tmp_path / "out", **options)
        return
    report = hfq.quantize(floats, "qmoe-gptq", output_dir=tmp_path / "out", **options)
    assert {layer.method for layer in report.layers} == {"qmoe-gptq"}
    assert "Rounded to nearest" not in (tmp_path / "out" / "README.md").read_text()
    rounded, found = digests(folder), digests(tmp_path / "out")
    assert found.keys() == rounded.keys()
    differing = {name for name in found if found[name] != rounded[name]}
    assert {name.rpartition(".")[2] for name in differing} == {"w_comp", "row_off"}
    assert sum(name.endswith("w_comp") for name in differing) == len(report.layers)
    expected = logits(load(tmp_path / "out", kind, {"": "cpu"}), kind)
    assert expected.isfinite().all()
    assert torch.equal(logits(load(tmp_path / "out", kind, {"": "disk"}), kind), expected)


def test_codes_use_the_whole_range_of_signed_numbers(written):
    tensors = stored_tensors(written[2])
    codes = torch.cat([tensor for name, tensor in tensors.items() if name.endswith("w_comp")])
    assert int(codes.min()) < 0 < int(codes.max()) < ENTRIES // 2


def test_a_model_without_experts_is_refused(tmp_path):
    with pytest.raises(SetupError, match=r"(?s)No layer is left.*routed experts"):
        hfq.quantize(SOURCE, "qmoe", output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()
