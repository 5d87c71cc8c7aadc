"""Tests of the public names of the Python API, and of the absence of old names."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import hfq
from hfq.errors import HfqError
from hfq.kernels.registry import KERNELS
from hfq.placement.plan import Plan, PlanEntry
from hfq.recipes.recipe import METHODS
from hfq.runtime.report import OffloadReport

ROOT = Path(__file__).parents[1]
OPTIONS = {  # old: new
    "method": "quantize_weights",
    "activations": "quantize_activations",
    "outlier_threshold": "llm_int8_threshold",
    "backing": "cpu_memory",
    "stream": "disk_io",
    "verify": "disk_checksum",
    "expert_cache_nbytes": "expert_cache_size",
    "execute_on": "execute_cpu_layers_on",
    "load": "reader_ranks",
    "nvme": "nvme_source",
}
VALUES = {  # option: (default and other values), removed values
    "cpu_memory": (("auto", "mmap", "private", "shared"), ("mapped", "arena")),
    "disk_io": (("auto", "direct", "buffered"), ("mmap",)),
    "disk_checksum": (("off", "first", "always"), ("auto",)),
    "execute_cpu_layers_on": (("accelerator", "cpu", "auto"), ("home",)),
    "reader_ranks": (("all", "rank0"), ("ranges", "broadcast")),
    "nvme_source": (("checkpoint", "swap_files"), ("in_place", "swap")),
    "quantize_output_head": ((None, "fp8", "int8"), ("e4m3", "w8a16")),
}
RECIPE = {
    "num_bits": "bits",
    "symmetric": "sym",
    "act_order": "desc_act",
    "group_order": "act_group_aware",
    "damping": "damp_percent",
    "recovery": "distill_steps",
}
TOP_LEVEL = {
    "take_over": "pretrained_config",
    "layer_major": "run_batches",
    "verify": "compare",
    "prepare_for_training": None,
    "FORMATS": None,
    "Format": None,
    "Plan": None,
    "Checkpoint": None,
    "HfqQuantizer": None,
}
OFFLOAD_REPORT = {
    "blocks": "units",
    "ring_nbytes": "buffer_nbytes",
    "visits": "unit_forwards",
    "mispredicts": "prefetch_misses",
    "apart": "buffer_overflows",
    "waited_seconds": "stall_seconds",
    "limit": "disk_bandwidth",
}


def test_the_top_level_holds_the_config_the_functions_and_the_errors():
    errors = {"CheckpointError", "FormatError", "HfqError", "PlacementError", "SetupError"}
    functions = {
        "compare",
        "evaluate",
        "perplexity",
        "pretrained_config",
        "quantize",
        "record_routing",
        "report",
    }
    others = {"HfqConfig", "OffloadedCache", "Recipe", "fms", "run_batches", "timeline"}
    assert set(hfq.__all__) == others | functions | errors
    for name in hfq.__all__:
        assert getattr(hfq, name) is not None


@pytest.mark.parametrize(("old", "new"), TOP_LEVEL.items())
def test_no_old_name_is_at_the_top_level(old, new):
    assert not hasattr(hfq, old)
    assert new is None or callable(getattr(hfq, new))


@pytest.mark.parametrize(("old", "new"), OPTIONS.items())
def test_an_old_option_is_unknown_and_the_new_one_is_keyword_only(old, new):
    parameters = inspect.signature(hfq.HfqConfig.__init__).parameters
    assert parameters[new].kind is inspect.Parameter.KEYWORD_ONLY
    with pytest.raises(hfq.SetupError, match=f"no option '{old}'"):
        hfq.HfqConfig(**{old: None})


@pytest.mark.parametrize("option", VALUES)
def test_options_have_their_values_and_no_old_ones(option):
    values, old = VALUES[option]
    assert getattr(hfq.HfqConfig(), option) == values[0]
    for value in values:
        assert getattr(hfq.HfqConfig(**{option: value}), option) == value
    for value in old:
        with pytest.raises(hfq.SetupError, match=f"{option}='{value}' is not valid"):
            hfq.HfqConfig(**{option: value})


def test_a_config_shows_its_options_and_nothing_else():
    config = hfq.HfqConfig(quantize_weights="fp8", expert_cache_size="4GiB")
    assert (config.recipe, config.expert_cache_nbytes) == (hfq.Recipe("fp8"), 4 << 30)
    shown = re.findall(r"(\w+)=", repr(hfq.HfqConfig()))
    assert shown == list(inspect.signature(hfq.HfqConfig.__init__).parameters)[1:-1]
    text = (ROOT / "docs" / "reference" / "options.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| [\w -]+ \| `(\w+)` \|", text, re.MULTILINE) == shown
    assert not {"source", "options", "with_source"} & {name for name in dir(config) if name[0] != "_"}


@pytest.mark.parametrize(("old", "new"), RECIPE.items())
def test_a_recipe_has_the_names_of_gptq_config(old, new):
    assert new in {field.name for field in fields(hfq.Recipe)}
    with pytest.raises(TypeError, match=old):
        hfq.Recipe("gptq", **{old: None})


def test_methods_and_kernels_have_their_names():
    assert {"w4a16", "w8a16"} <= METHODS.keys()
    assert "glm" not in METHODS
    assert {"cpp", "torch", "triton_fp8"} <= KERNELS.keys()
    assert not {"native", "panels", "triton-fp8"} & KERNELS.keys()


def test_quantize_and_run_batches_have_their_parameters():
    assert list(inspect.signature(hfq.quantize).parameters) == [
        "model",
        "recipe",
        "output_dir",
        "dataset",
        "num_calibration_samples",
        "max_seq_length",
        "modules_to_not_convert",
        "on_progress",
        "trust_remote_code",
    ]
    assert list(inspect.signature(hfq.run_batches).parameters) == ["model", "batches", "fn", "max_concurrent"]


def test_results_have_their_fields():
    assert [field.name for field in fields(PlanEntry)][1:3] == ["device", "execution_device"]
    assert {"devices", "onloaded_nbytes"} <= Plan(()).to_dict().keys()
    names = {field.name for field in fields(OffloadReport)}
    assert set(OFFLOAD_REPORT.values()) <= names
    assert not OFFLOAD_REPORT.keys() & names


def test_errors_have_a_message_and_are_no_builtin_ones():
    error = HfqError("It failed.", fix="Do this.")
    assert error.message == "It failed."
    assert not hasattr(error, "what")
    for name in ("CheckpointError", "FormatError", "PlacementError", "SetupError"):
        assert not issubclass(getattr(hfq, name), (ValueError, OSError, RuntimeError))


def test_extras_are_named_by_their_task():
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    extras = set(re.findall(r'^        "(\w+)": ', text, re.MULTILINE))
    assert {"quantize", "plots", "compiler", "peft", "deepspeed", "fms", "triton"} <= extras
    assert not {"optimum", "bench"} & extras
