"""Tests of the random models, the contenders, and the report of `python -m benchmarks real_sizes`."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM

from benchmarks.real_sizes import memory_group as groups
from benchmarks.real_sizes.bench_real_sizes import bench_real_sizes
from benchmarks.real_sizes.cases import CASES
from benchmarks.real_sizes.random_gguf import BLOCKS, random_rows, write_gguf
from benchmarks.real_sizes.random_safetensors import write_safetensors
from benchmarks.real_sizes.random_tensors import floats
from benchmarks.real_sizes.rates import measure_rates
from benchmarks.real_sizes.rounded_layouts import ROUNDED
from benchmarks.real_sizes.shapes import SHAPES, set_routing
from benchmarks.real_sizes.worker import RealSizeWorker
from hfq import HfqConfig
from hfq.errors import SetupError
from hfq.placement.estimate.profile import PUBLISHED
from hfq.runtime import predicted_speed
from hfq.runtime.predicted_speed import predict_step

KINDS = ["gguf", "gptq4", "fp8"]
TYPES = {"": Type.Q4_K, "output": Type.Q6_K}
SIZES = {"layers": 2, "hidden": 256, "inner": 256, "heads": (4, 2), "vocabulary": 320}
SMALL = {
    "mixture": replace(SHAPES["qwen3-30b-a3b"], **SIZES, head=64, experts=(16, 2)),
    "dense": replace(SHAPES["llama-3-8b"], **SIZES | {"inner": 512}, head=64),
    "gpt-oss": replace(SHAPES["gpt-oss-20b"], **SIZES, head=64, experts=(4, 2)),
    "deepseek": replace(
        SHAPES["deepseek-v3-short"],
        **SIZES | {"heads": (4, 4)},
        experts=(8, 2),
        others=SHAPES["deepseek-v3-short"].others
        | {"intermediate_size": 512, "q_lora_rank": 128, "kv_lora_rank": 128, "n_group": 2, "topk_group": 1},
    ),
}
MADE = [
    *((shape, kind) for shape in ("mixture", "dense") for kind in KINDS),
    *(("dense", kind) for kind in ROUNDED),
    ("gpt-oss", "mxfp4"),
    ("deepseek", "fp8"),
]


def made(folder, shape, kind):
    """Writes a random checkpoint into a new folder, and returns it."""
    path = folder / kind
    write_gguf(path, shape, TYPES) if kind == "gguf" else write_safetensors(path, shape, kind)
    return path


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_random_blocks_have_no_mean_and_the_asked_deviation(kind):
    raw = np.concatenate(list(random_rows(np.random.default_rng(0), kind, (64, 2048), 0.02)))
    numbers = gguf.quants.dequantize(raw, kind)
    assert abs(numbers.mean()) < 0.0002
    assert 0.015 < numbers.std() < 0.03  # scales are powers of two, or vary


@pytest.mark.parametrize("kind", ROUNDED)
def test_no_two_rounded_layers_are_equal_and_none_has_a_mean(tmp_path, kind):
    path = made(tmp_path, SMALL["dense"], kind)
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=HfqConfig(), device_map="cpu")
    first, second = (layer.mlp.gate_proj.weight.float() for layer in model.model.layers)
    assert not torch.equal(first, second)
    for weight in (first, second):
        assert abs(weight.mean()) < 0.0002
        assert 0.018 < weight.std() < 0.024  # rotated codes have the scales and zero points of other rows


def test_floats_drawn_in_pieces_are_those_drawn_at_once(monkeypatch):
    planned = floats(10, 8, deviation=2.0)
    whole = planned.draw(np.random.default_rng(0), planned.shape)
    monkeypatch.setattr("benchmarks.real_sizes.random_tensors._ROWS", 3)
    assert np.array_equal(planned.draw(np.random.default_rng(0), planned.shape), whole)


@pytest.mark.parametrize(("name", "kind"), MADE, ids=["-".join(each) for each in MADE])
def test_a_random_model_loads_quantized_and_tells_tokens_apart(tmp_path, name, kind):
    path = made(tmp_path, SMALL[name], kind)
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=HfqConfig(), device_map="cpu")
    assert model.hf_quantizer.loading.quantized
    with torch.inference_mode():
        logits = model(torch.arange(1, 9)[None]).logits[0].float()
    assert logits.isfinite().all()
    assert torch.corrcoef(logits).fill_diagonal_(0).max() < 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_skewed_routers_choose_few_experts_often(tmp_path, kind):
    shape = SMALL["mixture"]
    path = made(tmp_path, shape, kind)
    shares = []
    for is_skewed in (False, True, False):
        set_routing(path, shape, is_skewed)
        model = AutoModelForCausalLM.from_pretrained(
            path, quantization_config=HfqConfig(), device_map="cpu", output_router_logits=True
        )
        with torch.inference_mode():
            chosen = model(torch.arange(256)[None]).router_logits[0].topk(2).indices
        counts = torch.bincount(chosen.flatten(), minlength=16).sort(descending=True).values
        shares.append(float(counts[:4].sum() / counts.sum()))
    assert shares[0] == shares[2]
    assert shares[0] < 0.5 < 0.6 < shares[1]


def test_the_worker_counts_tokens_bytes_and_hits(tmp_path):
    write_gguf(tmp_path, SMALL["mixture"], TYPES)
    worker = RealSizeWorker("hfq", str(tmp_path), torch.get_num_threads(), None, {"": "disk"})
    assert worker.load()["anonymous"] > 0
    assert worker.predict(PUBLISHED.to_json())["seconds"] > 0
    assert worker.prefill(4)["seconds"] > 0
    found = worker.decode(3)
    assert found["seconds"] > 0
    assert 0 <= found["hit_rate"] <= 1
    offloader = worker._runtime.model.hf_quantizer.loading.offloader
    assert found["needed"] >= offloader.pass_nbytes > 0


def test_a_prediction_may_have_the_routing_of_tokens_that_ran_before(tmp_path, monkeypatch):
    write_gguf(tmp_path, SMALL["mixture"], TYPES)
    worker = RealSizeWorker("hfq", str(tmp_path), torch.get_num_threads(), None, {"": "disk"})
    worker.load()
    given = []

    def predict(*arguments, routing=None, **options):
        given.append(routing)
        return predict_step(*arguments, routing=routing, **options)

    monkeypatch.setattr(predicted_speed, "predict_step", predict)
    for recorded in (0, 16):
        assert worker.predict(PUBLISHED.to_json(), recorded)["seconds"] > 0
    assert given[0] is None
    assert str(given[1]) == "the routing of 16 tokens"


def test_a_row_may_have_a_rounded_head_and_another_attention(tmp_path):
    path = made(tmp_path, SMALL["mixture"], "gptq4")
    rounded = next(each for each in CASES[0].contenders if each.options)
    worker = RealSizeWorker("hfq", str(path), 1, None, None, rounded.options, rounded.attention)
    worker.load()
    model = worker._runtime.model
    assert "e4m3" in model.lm_head.weight_format.describe()
    assert model.config._attn_implementation == "hfq_sdpa"
    assert worker.decode(3)["seconds"] > 0


def test_decoding_ends_after_the_asked_time_and_three_tokens(tmp_path):
    write_safetensors(tmp_path / "model", SMALL["dense"], "bf16")
    worker = RealSizeWorker("accelerate", str(tmp_path / "model"), 1)
    worker.load()
    assert any(parameter.is_meta for parameter in worker._runtime.model.parameters())
    ran = []
    worker._runtime.run = ran.append
    found = worker.decode(9, most_seconds=0)
    assert ran == [8, 1, *[1] * 3]
    assert "needed" not in found


def test_rates_are_measured_with_the_layers_of_the_files(tmp_path):
    paths = [made(tmp_path, SMALL["mixture"], kind) for kind in ("gguf", "gptq4")]
    rates = measure_rates(tmp_path, paths, 1, quick=True)
    assert {"gptq 4-bit bfloat16", "head bfloat16", "gguf 4.5-bit bfloat16"} <= set(rates.products)
    for path in paths:
        worker = RealSizeWorker("hfq", str(path), 1, None, {"": "cpu"})
        worker.load()
        assert worker.predict(rates.to_json())["seconds"] > 0


def test_an_unquantized_model_has_the_layers_that_fit(tmp_path):
    shape = SMALL["dense"]
    write_safetensors(tmp_path / "model", shape, "bf16")
    nbytes = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert shape.within(nbytes).layers == 2
    assert shape.within(nbytes * 0.9).layers == 1
    assert shape.within(0).layers == 1


@pytest.mark.slow
def test_the_report_has_a_row_for_each_contender_and_deletes_the_models(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "llama-3-8b", SMALL["dense"])
    monkeypatch.setattr("benchmarks.real_sizes.bench_real_sizes.importlib.util.find_spec", lambda name: None)
    said = []
    report = bench_real_sizes(tmp_path, None, ["Llama-3-8B on disk"], 1, 1, True, False, said.append)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "left out" in said[0]
    assert [row[1] for row in report.tables[0].rows] == [
        "hfq, GPTQ",
        "hfq, the same GGUF",
        "accelerate, bfloat16",
    ]
    assert not [record for record in report.records if "error" in record]
    kept = bench_real_sizes(
        tmp_path, None, ["Llama-3-8B on disk, 4 GB: hfq, GPTQ"], 1, 1, True, True, said.append
    )
    assert len(kept.records) == 1
    assert [path.name for path in (tmp_path / "real_sizes").iterdir()] == ["llama-3-8b-gptq4"]


def test_unknown_shapes_and_rows_and_groups_that_cannot_be_made_are_errors(tmp_path, monkeypatch):
    with pytest.raises(SetupError, match="is not a shape"):
        bench_real_sizes(tmp_path, ["llama-3-9b"], None, 1, 1, True, False, print)
    with pytest.raises(SetupError, match="in the name of no row"):
        bench_real_sizes(tmp_path, None, ["5 GB"], 1, 1, True, False, print)
    monkeypatch.setattr(groups, "_V1", tmp_path / "missing" / "memory")
    monkeypatch.setattr(groups, "_V2", tmp_path / "missing")
    with pytest.raises(SetupError, match="No memory cgroup"), groups.memory_group(1 << 30):
        pass
    with groups.memory_group(None) as group:
        assert group is None
