"""Tests that models under ZeRO-3 are bit-identical to unsharded models.

Two CPU ranks are forks of one process; tests/configs/test_launches.py runs the `deepspeed` command.
"""

import pytest

from tests.support import tiny_models
from tests.support.zero_launch import check_exact, launch, once, shared_folder
from tests.support.zero_models import write_format, write_mixtral, write_own_code, write_reading

POISONED = "model.layers.1.mlp.up_proj.weight_scale_inv"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("zero3")


@pytest.fixture(scope="module")
def sources(folder):
    """Returns the checkpoint folders by name."""
    paths = {
        name: write_format(folder / name, name) for name in ("gptq4", "fp8-block", "fp8-tensor-0-dim", "int8")
    }
    paths["tied"] = write_format(folder / "tied", "nf4", is_tied=True)
    paths["poisoned"] = write_format(folder / "poisoned", "fp8-block", poisoned=POISONED)
    paths["mixtral"] = write_mixtral(folder / "mixtral")
    paths["own code"] = write_own_code(folder / "own-code", "gptq4")
    return paths


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder of the run, which all test processes share."""
    return shared_folder(tmp_path_factory) / "zero3-run"


@pytest.fixture(scope="module")
def results(folder, sources, run, tmp_path_factory):
    """Returns the results of both ranks."""
    mamba, details = write_reading(folder / "mamba", "mamba")
    cases = [
        {"id": "none", "checkpoint": sources["gptq4"], "shard_device": "none", "saves": True, "early": True},
        {"id": "in place", "checkpoint": sources["gptq4"], "shard_device": "nvme", "saves": True},
        {"id": "cpu", "checkpoint": sources["fp8-block"], "shard_device": "cpu"},
        {
            "id": "0-dim in place, direct",
            "checkpoint": sources["fp8-tensor-0-dim"],
            "shard_device": "nvme",
            "options": {"disk_io": "direct"},
        },
        {"id": "int8 on cpu", "checkpoint": sources["int8"], "shard_device": "cpu"},
        {"id": "tied", "checkpoint": sources["tied"], "shard_device": "none", "saves": True},
        {
            "id": "mixtral",
            "checkpoint": sources["mixtral"],
            "shard_device": "nvme",
            "differs": True,
            "saves": True,
        },
        {
            "id": "reads weights",
            "checkpoint": mamba,
            "shard_device": "none",
            **details,
            "options": {"quantize_activations": False},
        },
        {"id": "lacks internals", "checkpoint": sources["gptq4"], "shard_device": "none", "lacks": True},
        {
            "id": "broadcast",
            "checkpoint": sources["own code"],
            "elsewhere": str(folder / "nowhere" / "own-code"),
            "shard_device": "cpu",
            "options": {"reader_ranks": "rank0"},
            "arguments": {"trust_remote_code": True},
        },
        {"id": "whole", "checkpoint": sources["fp8-block"], "whole": True},
        {"id": "poisoned", "checkpoint": sources["poisoned"], "shard_device": "none", "fails": True},
        {
            "id": "another model",
            "checkpoint": sources["gptq4"],
            "elsewhere": sources["int8"],
            "shard_device": "none",
            "fails": True,
        },
        {
            "id": "not there",
            "checkpoint": sources["gptq4"],
            "elsewhere": str(folder / "nowhere"),
            "shard_device": "none",
            "fails": True,
        },
        {"id": "trains on cpu", "checkpoint": sources["gptq4"], "shard_device": "cpu", "trains": True},
        {
            "id": "trains in place",
            "checkpoint": sources["gptq4"],
            "shard_device": "nvme",
            "trains": True,
            "recomputes": True,
            "resumes": True,
        },
        {"id": "trains mixtral", "checkpoint": sources["mixtral"], "shard_device": "none", "trains": True},
    ]
    return once(tmp_path_factory, "zero3", lambda: launch(run, cases, ranks=2))


@pytest.mark.parametrize("case", ["none", "cpu", "int8 on cpu", "tied", "reads weights"])
def test_each_rank_reads_and_holds_its_part_and_all_compute_the_same(case, results):
    for found in results:
        check_exact(found[case], ranks=2)
        assert found[case]["written"] == 0


def test_a_tied_head_is_the_embedding_and_rests_once(results):
    for found in results:
        heads = {
            case: {"lm_head.weight", "model.embed_tokens.weight"} & set(found[case]["dense_names"])
            for case in ("none", "tied")
        }
        assert heads == {
            "none": {"lm_head.weight", "model.embed_tokens.weight"},
            "tied": {"model.embed_tokens.weight"},
        }


@pytest.mark.parametrize("case", ["in place", "0-dim in place, direct", "mixtral"])
def test_shards_that_stay_in_the_checkpoint_are_read_for_each_forward_and_written_never(case, results):
    for found in results:
        check_exact(found[case], ranks=2, is_read=False)
        assert found[case]["written"] == 0
        assert (
            found[case]["packed_read"] < 0.6 * found[case]["packed_shard"]
        )  # loading reads only the small tensors, to check them
        passes = 3 + 3  # forwards and generated tokens
        assert found[case]["swapped_in"] >= 0.9 * passes * found[case]["packed_shard"]
        assert "swap buffers" in found[case]["line"]


@pytest.mark.parametrize("case", ["none", "in place", "tied", "mixtral"])
def test_a_gathered_model_is_saved_as_the_bytes_that_were_loaded(case, results, run, sources):
    source = tiny_models.digests(sources["gptq4" if case in ("none", "in place") else case])
    saved = tiny_models.digests(run / case / "saved")
    assert all(found[case]["gathered_equals_file"] for found in results)
    if case == "mixtral":  # its unquantized tensors are stored in float32 and loaded in bfloat16
        source, saved = (
            {n: d for n, d in digests.items() if "q" in n.rpartition(".")[2]} for digests in (source, saved)
        )
        assert len(source) > 60
    assert saved == source


def test_the_report_says_what_a_rank_holds(results):
    for rank, found in enumerate(results):
        assert f"device (shard {rank} of 2): 108,800 B" in found["none"]["report"]


def test_a_model_that_is_used_without_the_engine_or_copied_says_so(results):
    for found in results:
        called, layer, weight, copied = found["none"]["early"]
        assert called.startswith(
            "PlacementError: A model that is sharded by ZeRO-3 was called without DeepSpeed's engine"
        )
        assert layer.startswith("PlacementError: model.layers.0.self_attn.q_proj is sharded by ZeRO-3")
        assert weight.startswith(
            "PlacementError: A parameter is offloaded and cannot be read directly by matmul."
        )
        assert copied.startswith("SetupError: A model that several ranks share cannot be copied.")
        assert all("Fix:" in text for text in found["none"]["early"])


def test_an_engine_that_would_cast_packed_tensors_is_refused_by_name(results):
    """Stage 2 casts the float32 scales of FP8 blocks, and stage 3 partitions by value."""
    for found in results:
        stage_2, stage_3 = found["whole"]["plain"]
        assert stage_2.startswith(
            "SetupError: DeepSpeed would cast quantized tensors that are not in a flat buffer. No engine was "
            "created."
        )
        assert 'HfqConfig(cpu_memory="private")' in stage_2
        assert stage_3.startswith("SetupError: Every rank has loaded the whole model")
        assert "zero3_init_flag: true" in stage_3


def test_a_model_that_is_loaded_while_a_config_of_stage_2_is_alive_is_exact(results):
    for found in results:
        assert found["whole"]["held"] == ["flat_buffer"]
        assert found["whole"]["logits_equal"] == [True] * 3


def test_with_another_deepspeed_each_rank_reads_all_and_results_are_the_same(results):
    for found in results:
        check_exact(found["lacks internals"], ranks=2, is_read=False)
        assert found["lacks internals"]["packed_read"] == found["lacks internals"]["packed_total"]


def test_rank_0_deals_out_what_others_do_not_have(results):
    for rank, found in enumerate(results):
        check_exact(found["broadcast"], ranks=2, is_read=False)
        assert found["broadcast"]["packed_read"] == (0 if rank else found["broadcast"]["packed_total"])
        own, of_rank_0 = found["broadcast"]["class"], results[0]["broadcast"]["class"]
        assert own.startswith("transformers_modules.own_hyphen_code.")
        assert own.endswith(".modeling_own.OwnForCausalLM")
        assert own == of_rank_0


def test_one_damaged_scale_ends_all_ranks_and_is_named(results):
    own, other = sorted(
        (found["poisoned"]["error"] for found in results), key=lambda text: "Another rank" in text
    )
    assert own.startswith("FormatError: A scale is not finite")
    assert other.startswith("PlacementError: Another rank of this run failed")
    assert POISONED in own
    assert POISONED in other


def test_a_rank_that_cannot_open_its_files_ends_all_ranks_and_is_named(results):
    first, second = (found["not there"]["error"] for found in results)
    assert first.startswith("PlacementError: Another rank of this run failed")
    assert "rank: 1" in first
    assert "/nowhere" in first
    assert not second.startswith("PlacementError")
    assert "/nowhere" in second


def test_ranks_that_mean_different_models_find_out_before_they_share_anything(results):
    for found in results:
        assert "The ranks of this run plan different models" in found["another model"]["error"]
        assert "rank: 1" in found["another model"]["error"]
        assert "sizes of the checkpoint's files" in found["another model"]["error"]


@pytest.mark.parametrize("case", ["trains on cpu", "trains in place", "trains mixtral"])
def test_gradients_flow_through_packed_layers_and_change_none_of_their_bytes(case, results):
    for found in results:
        assert "error" not in found[case], found[case]["trace"]
        losses = found[case]["losses"]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.5 * losses[0]
        assert found[case]["gathered_equals_file"]
    assert results[0][case]["losses"] == results[1][case]["losses"]


def test_training_is_the_same_wherever_shards_rest_and_with_recomputation(results):
    assert results[0]["trains in place"]["losses"] == results[0]["trains on cpu"]["losses"]


def test_a_checkpoint_of_deepspeed_holds_no_packed_rows_and_continues_the_curve(results):
    for found in results:
        assert found["trains in place"]["resumed"] == found["trains in place"]["losses"][2:]
        own_code = 41_070  # zero_to_fp32.py and zero_to_torch.py of DeepSpeed 0.19.8
        assert found["trains in place"]["saved_nbytes"] - own_code < 1.2 * found["none"]["packed_total"]
