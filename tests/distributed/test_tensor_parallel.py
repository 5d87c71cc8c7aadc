"""Tests of tensor parallelism for quantized models on two CPU ranks, launched with torchrun.

Each rank holds its slices. Together, the ranks compute the same results as one process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from tests.contract.cases import GPTQMODEL, compressed_tensors
from tests.support import moe_models, tiny_models
from tests.support.gguf_models import make_model, write_model

pytest.importorskip(
    "transformers.distributed.mixin", reason="transformers before 5.23 slices models in another way"
)
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GPTQ = Gptq(zero_reading="word_plus_one", group_size=32, g_idx_length=128)
GPTQ_CONFIG = {**GPTQMODEL, "bits": 4, "group_size": 32, "sym": True}
BLOCK = Fp8(strategy="block", block_structure=(32, 32), scale_name="weight_scale_inv")
GATHERED = {
    "model.layers.*.mlp.gate_proj": "colwise_gather_output",
    "model.layers.*.mlp.up_proj": "colwise_rep",
    "model.layers.*.mlp.down_proj": "rowwise_split_input",
}
TOLERANCE = 4e-6
"""Largest error relative to the largest logit.

Slices along the input add the same float32 products in another order. After the 2 to 4 layers of these
models, this changes some units in the last place (2**-23).
"""
EXACT = ("gptq", "fp8-block", "fp8-channel")
EQUAL = (
    *EXACT,
    "act-order, biases",
    "within a block",
    "tied",
    "mixtral",
    "gathered",
    "shared expert",
    "pack-quantized",
    "gguf",
    "gguf, tied",
    "gguf experts",
)


def write_gguf(folder: Path, name: str, kinds=("Q8_0", "Q4_0", "BF16"), **options) -> str:
    return str(write_model(folder, name, make_model(name, **options), kinds))


def write(folder: Path, weight_format, config: dict, change=None, **options) -> str:
    """Writes a tiny Llama, with tensors edited by `change` and config values from `options`."""
    tensors = tiny_models.model_tensors(weight_format)
    if change is not None:
        change(tensors)
    tiny_models.write_model(folder, tensors, config)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | options))
    return str(folder)


def scatter(tensors: dict) -> None:
    """Adds act-order and a bias to every layer."""
    generator = torch.Generator().manual_seed(9)
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = tensors[name][torch.randperm(tensors[name].numel(), generator=generator)]
        module = name.removesuffix("g_idx")
        tensors[f"{module}bias"] = torch.randn(
            tensors[f"{module}scales"].shape[1], generator=generator
        ).half()


def untie(tensors: dict) -> None:
    del tensors["lm_head.weight"]


def poison(tensors: dict) -> None:
    """Sets a scale that the second of two ranks holds to NaN."""
    tensors["model.layers.1.mlp.up_proj.weight_scale"][200] = float("nan")


def relabel(tensors: dict) -> None:
    """Stores zero points as in GPTQ v1 for one rank's columns, and as in v2 for the other's."""
    tensors["model.layers.1.mlp.up_proj.qzeros"][:, 16:] = -0x77777778


def write_moe(folder: Path, id: str) -> str:
    scheme = next(scheme for scheme in moe_models.SCHEMES if scheme.id == id)
    return str(moe_models.write(scheme, moe_models.is_quantized(scheme)).save(folder))


def torchrun(script: Path, *arguments: object) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TQDM_DISABLE": "1",
    }
    done = subprocess.run(
        [*launcher, str(script), *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tensor-parallel")


@pytest.fixture(scope="module")
def paths(folder) -> dict[str, str]:
    channel = Fp8(strategy="channel")
    coarse = Fp8(strategy="block", block_structure=(48, 80), scale_name="weight_scale_inv")
    made = {
        "gptq": write(folder / "gptq", GPTQ, GPTQ_CONFIG),
        "fp8-block": write(
            folder / "fp8-block", BLOCK, {"quant_method": "fp8", "weight_block_size": [32, 32]}
        ),
        "fp8-channel": write(folder / "fp8-channel", channel, compressed_tensors("channel")),
        "act-order, biases": write(
            folder / "act-order",
            GPTQ,
            {**GPTQ_CONFIG, "desc_act": True},
            scatter,
            attention_bias=True,
            mlp_bias=True,
        ),
        "within a block": write(
            folder / "coarse", coarse, {"quant_method": "fp8", "weight_block_size": [48, 80]}
        ),
        "tied": write(
            folder / "tied", channel, compressed_tensors("channel"), untie, tie_word_embeddings=True
        ),
        "mixtral": write_moe(folder / "mixtral", "mixtral w1 w2 w3, gptq"),
        "shared expert": write_moe(folder / "shared", "qwen2 with a shared expert, fp8 blocks"),
        "pack-quantized": write_moe(folder / "pack-quantized", "qwen3 by expert, pack-quantized"),
        "fused experts": write_moe(folder / "fused", "mixtral fused gate_up, fp8"),
        "bitsandbytes": write_moe(folder / "bitsandbytes", "qwen3 by expert, bitsandbytes"),
        "one head": write(
            folder / "heads",
            channel,
            compressed_tensors("channel"),
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
        ),
        "gguf": write_gguf(folder / "gguf", "llama-biased", intermediate_size=128),
        "gguf, tied": write_gguf(folder / "gguf-tied", "gemma3", ("Q8_0",), intermediate_size=128),
        "gguf experts": write_gguf(folder / "gguf-experts", "qwen3moe", moe_intermediate_size=64),
        "within a block of ggml": write_gguf(folder / "gguf-blocks", "llama", ("Q8_0",)),
        "poisoned": write(folder / "poisoned", channel, compressed_tensors("channel"), poison),
        "two readings": write(folder / "readings", GPTQ, GPTQ_CONFIG, relabel),
    }
    others = ("gathered", "rule for a weight", "fused rule", "not there")
    again = {"other head": made["fp8-channel"], "rule for an embedding": made["gguf"]}
    return made | dict.fromkeys(others, made["gptq"]) | again


@pytest.fixture(scope="module")
def results(folder, paths) -> list[dict]:
    """Returns the results of both ranks. One launch runs all cases."""
    details = {
        "gptq": {"saves": True, "standalone": True},
        "fp8-block": {"saves": True, "copies": True},
        "fp8-channel": {"saves": True},
        "not there": {"elsewhere": str(folder / "nowhere"), "standalone": True},
        "other head": {"elsewhere": paths["one head"]},
        "gathered": {"tp_plan": GATHERED},
        "rule for a weight": {"tp_plan": {"model.layers.*.mlp.up_proj.weight": "colwise"}},
        "fused rule": {"tp_plan": {"model.layers.*.mlp.up_proj": "packed_colwise"}},
        "mixtral": {"saves": True},
        "gguf": {"saves": True},
        "rule for an embedding": {"tp_plan": {"model.embed_tokens": "embedding_rowwise"}},
    }
    cases = [{"id": id, "path": path, **details.get(id, {})} for id, path in paths.items()]
    (folder / "cases.json").write_text(json.dumps(cases))
    torchrun(Path(__file__).parent / "tp_worker.py", "--cases", folder / "cases.json", "--out", folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", EQUAL)
def test_slices_are_bit_for_bit_those_of_the_whole_layers(case, results):
    for found in results:
        assert found[case]["modules"]["cut"] > 0
        assert found[case]["modules"]["weights"] == found[case]["modules"]["outputs"] == []


@pytest.mark.parametrize("case", EQUAL)
def test_two_ranks_compute_what_one_process_does(case, results):
    for found in results:
        assert found[case]["tokens"] is True
        assert found[case]["logits"] < TOLERANCE
        assert found[case]["gradient"] < TOLERANCE


def expected_nbytes(path: str) -> tuple[int, int]:
    """Returns the expected bytes (read, held) of one rank.

    They are half of all bytes, except for the index of GPTQ, and for scales of whole rows if the input is
    sliced.
    """
    read = held = 0
    for name, tensor in tiny_models.stored_tensors(Path(path)).items():
        module, _, local = name.rpartition(".")
        if not module.endswith("_proj"):
            continue
        is_row = module.endswith(("o_proj", "down_proj"))
        if local == "g_idx":
            read, held = read + tensor.nbytes, held + (0 if is_row else tensor.nbytes)
            continue
        nbytes = tensor.nbytes if is_row and local == "weight_scale" else tensor.nbytes // 2
        read, held = read + nbytes, held + nbytes
    return read, held


@pytest.mark.parametrize("case", EXACT)
def test_each_rank_reads_and_holds_its_slices_alone(case, results, paths):
    for found in results:
        assert (found[case]["read"], found[case]["parts"]) == expected_nbytes(paths[case])


@pytest.mark.parametrize("case", [*EXACT, "mixtral"])
def test_a_shared_model_is_saved_whole_and_its_packed_bytes_are_those_of_the_source(
    case, results, folder, paths
):
    source, saved = (
        tiny_models.stored_tensors(Path(path)) for path in (paths[case], folder / f"saved-{case}")
    )
    assert source.keys() == saved.keys()
    for name, tensor in source.items():
        is_quantized = "_proj." in name or "experts." in name
        assert not is_quantized or saved[name].dtype == tensor.dtype, name
        assert torch.equal(saved[name].to(tensor.dtype).view(torch.uint8), tensor.view(torch.uint8)), name
    config = json.loads((folder / f"saved-{case}" / "config.json").read_text())
    assert (
        config["quantization_config"]
        == json.loads((Path(paths[case]) / "config.json").read_text())["quantization_config"]
    )
    assert "distributed_config" not in config


def test_a_shared_gguf_file_is_saved_as_its_bytes(results, folder, paths):
    saved = (folder / "saved-gguf" / "model.gguf").read_bytes()
    assert saved == (Path(paths["gguf"]) / "model.gguf").read_bytes()


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("fused experts", "experts.0.gate_up_proj; found: gate and up projections fused into one"),
        (
            "bitsandbytes",
            "hfq does not support tensor parallelism for bitsandbytes nf4 layers; tensor: model.layers.0.",
        ),
        (
            "rule for a weight",
            "model.layers.0.mlp.up_proj; expected: a rule for the layer; found: a rule for its weight",
        ),
        (
            "one head",
            "tensor: model.layers.0.self_attn.k_proj; found: 1 heads; expected: a multiple of 2 ranks",
        ),
        (
            "two readings",
            "tensor: model.layers.1.mlp.up_proj; expected: {}, as on rank 0; found: {'zero_reading': "
            "'stored'}",
        ),
        ("fused rule", "found: tp_plan's 'packed_colwise' for a quantized QuantizedLinear"),
        ("rule for an embedding", "found: tp_plan's 'embedding_rowwise' for a quantized QuantizedEmbedding"),
        (
            "within a block of ggml",
            "tensor: model.layers.0.mlp.down_proj; expected: a cut between blocks of 32 weights; found: input channels",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name_on_every_rank(case, error, results):
    for found in results:
        lines = [line.strip() for line in found[case]["text"].splitlines()]
        assert all(any(part in line for line in lines) for part in error.split("; ")), found[case]["text"]
        assert "Nothing was loaded" in lines[0]


def test_what_one_rank_finds_all_ranks_are_told(results):
    first, second = (found["poisoned"]["text"] for found in results)
    assert "Another rank of this run failed. Nothing was loaded." in first
    assert "A scale is not finite. Nothing was loaded.; " in first
    assert "tensor: model.layers.1.mlp.up_proj.weight_scale" in second
    assert "[72, 0]" in second  # row 200 of 256


def test_a_rank_that_fails_before_it_has_met_the_others_ends_all_and_is_named(results):
    """Missing files fail before transformers creates its meshes, and a wrong config afterwards."""
    for case, cause in {
        "not there": "nowhere",
        "other head": "hfq cannot cut a quantized layer in the way that tp_plan requires",
    }.items():
        first, second = (found[case]["text"] for found in results)
        assert "Another rank of this run failed. Nothing was loaded." in first
        assert "rank: 1" in first
        assert cause in first
        assert cause in second.replace("\n", " ")
        assert "Another rank" not in second


def test_a_shared_model_is_not_copied(results):
    for found in results:
        assert "A model that several ranks share cannot be copied." in found["fp8-block"]["copy"]
        assert "cut for 2 ranks" in found["fp8-block"]["copy"]


def test_the_plan_of_a_loaded_model_is_its_own(results):
    rules = results[0]["mixtral"]["rules"]
    assert rules["model.layers.*.mlp.experts.gate_up_proj"] == "packed_colwise"
    assert not [name for name in rules if name.endswith("flat_buffer")]


def test_the_example_generates_on_two_ranks(results, folder):
    held, tensors = 237_184, tiny_models.stored_tensors(ROOT / "tests" / "data" / "tiny-llama-gptq")
    stored = sum(tensor.nbytes for name, tensor in tensors.items() if "_proj." in name)
    printed = [(folder / f"example{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    assert [lines[0] for lines in printed] == [
        f"rank {rank} of 2: {held:,} of {stored:,} quantized bytes" for rank in (0, 1)
    ]
    assert printed[0][1].startswith("The return value is")
