"""Small JSON results of every kind that `hfq plot` draws."""

import copy
import json

import pytest

PARTS = [
    "model.embed_tokens",
    *(f"model.layers.{n}.mlp.{name}" for n in range(3) for name in ("up", "down")),
    "lm_head",
]
MODULES = [
    {
        "module": name,
        "device": "disk" if ".2." in name or ".1." in name else "cpu",
        "execution_device": "cpu",
        "nbytes": 3000,
        "quantized_nbytes": 2000 * ("layers" in name),
    }
    for name in PARTS
]
SPANS = [
    ("read", "model.layers.1", -0.001, 0.001, 6000),
    ("pass", "", 0.0, 0.010, 0),
    ("other", "model.layers.0", 0.001, 0.002, 0),
    ("wait", "model.layers.1", 0.002, 0.003, 0),
    ("read", "model.layers.2", 0.003, 0.005, 2000),
    ("compute", "model.layers.1", 0.003, 0.006, 0),
    ("read", "model.layers.2", 0.004, 0.006, 4000),
    ("compute", "model.layers.2", 0.006, 0.009, 0),
    ("read", "model.layers.1", 0.0095, 0.012, 6000),
]
STREAM = {
    "mode": "direct",
    "units": 2,
    "pass_nbytes": 12000,
    "buffer_nbytes": 12288,
    "huge_page_nbytes": None,
    "passes": 3,
    "unit_forwards": 6,
    "prefetch_misses": 0,
    "buffer_overflows": 0,
    "nbytes_read": 36000,
    "read_seconds": 0.01,
    "stall_seconds": 0.003,
    "disk_bandwidth": None,
    "expert_hits": 0,
    "expert_misses": 0,
    "expert_nbytes": 0,
    "expert_cache_nbytes": 0,
    "read_bandwidth": 3.6e6,
    "share_of_disk_bandwidth": None,
}
SPEED = {
    "load_predicted_seconds": 0.1,
    "load_achieved_seconds": 0.2,
    "step_predicted_seconds": None,
    "step_achieved_seconds": 0.01,
    "dominant": "reads",
    "source": "limits",
}
RUN = {
    "model": {
        "path": "/models/a <b> & c",
        "class": "LlamaForCausalLM",
        "formats": "gptq",
        "dtype": "bfloat16",
        "device": "cpu",
        "hfq": "0.1.0",
    },
    "devices": [
        {"device": "cpu", "nbytes": 12000, "onloaded_nbytes": 0},
        {"device": "disk", "nbytes": 12000, "onloaded_nbytes": 12000},
    ],
    "offload": STREAM,
    "speed": SPEED,
    "outliers": None,
    "modules": MODULES,
    "timeline": {
        "units": ["model.layers.1", "model.layers.2"],
        "spans": [
            dict(zip(("track", "name", "start", "end", "nbytes"), span, strict=True)) for span in SPANS
        ],
    },
}
HOME = {
    "weights_nbytes": 12000,
    "buffer_nbytes": 500,
    "experts_nbytes": 0,
    "kv_cache_nbytes": 100,
    "activations_nbytes": 200,
    "total_nbytes": 12800,
    "capacity_nbytes": 14000,
}
PLAN = {
    "model": {"path": "m", "class": "LlamaForCausalLM", "formats": "", "file_nbytes": 24000, "layers": 3},
    "workload": {"batch": 1, "context": 16, "kv_dtype": "auto"},
    "machine": {"gpu_nbytes": [24000], "cpu_nbytes": 14000, "disk_nbytes": None, "is_this_machine": False},
    "devices": {"cpu": HOME, "disk": {**HOME, "capacity_nbytes": None}},
    "modules": MODULES,
    "prediction": {
        "load_seconds": 0.1,
        "step_seconds": 0.01,
        "tokens_per_second": 100.0,
        "dominant_term": "reads from disk",
        "source": "limits",
        "helps": [["a disk twice as fast", 200.0]],
    },
    "files": {},
}
BENCH = {
    "title": "ModelLoader",
    "facts": {"date": "today"},
    "targets": [{"what": "x", "value": 0.5, "bound": 1, "at_least": False, "verdict": "met"}],
    "tables": [
        {
            "title": "Time",
            "note": "Seconds.\n\n- a: `b`\n- c",
            "header": ["x", "s"],
            "rows": [["one", "1.5"], ["two", "-"]],
        }
    ],
    "chart": {
        "kind": "Chart",
        "title": "Bars",
        "groups": ["one", "two"],
        "series": {"a": [1.0, None], "b": [0.5, 2]},
        "line": 1.0,
        "scale": "linear",
    },
    "targets_note": "Medians.",
    "records": [],
}
POINTS = {
    "kind": "Scatter",
    "title": "Quality against size",
    "x": "bits",
    "y": "KL",
    "points": [["$a_b$", 4.0, 0.1], ["b", 8, 0.0]],
}
EVAL = {**BENCH, "title": "Quality", "targets": [], "chart": POINTS}
ZERO3 = {
    "zero3": {
        "ranks": 2,
        "per_rank": {"device": 7},
        "parts_per_rank": {"quantized weights": {"device": 5}, "KV cache": {"device": 2}},
    }
}
MACHINE = {"tokens_per_second": 9.0, "cost_of_a_million_tokens": 2.0, "dominant": "reads"}
CATALOG = {
    "catalog": [{"name": "a", "cost": 1.0, **MACHINE}, {"name": "b", "cost": 2.0, "refused": "does not fit"}]
}
LADDER = {
    "ladder": {
        "budget_nbytes": 10,
        "best": "fp8",
        "note": "By bits.",
        "rungs": [{"name": "fp8", "weights_nbytes": 5, "total_nbytes": 8}],
    }
}
BARE_PLAN = {name: PLAN[name] for name in ("model", "workload", "machine")}
RESULTS = {
    "run": RUN,
    "plan": PLAN,
    "bench": BENCH,
    "eval": EVAL,
    "zero3": BARE_PLAN | ZERO3,
    "catalog": BARE_PLAN | CATALOG,
    "ladder": BARE_PLAN | LADDER,
}


@pytest.fixture
def result():
    """result(kind) → a copy of a result that a test may change."""
    return lambda kind: copy.deepcopy(RESULTS[kind])


@pytest.fixture
def write(tmp_path):
    """write(name, value) → a JSON file. Text is written unchanged."""

    def write(name, value):
        file = tmp_path / f"{name}.json"
        file.write_text(value if isinstance(value, str) else json.dumps(value))
        return file

    return write
