"""Tests of IBM's Foundation Model Stack on quantized weights, against transformers' logits.

Models load through `hfq.fms.load` and through FMS's `get_model`.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import hfq
from hfq import HfqConfig
from hfq.errors import FormatError, HfqError, PlacementError, SetupError
from hfq.modules.concat_linear import ConcatLinear
from hfq.modules.quantized_module import QuantizedModule
from tests.interop import fms_models

pytest.importorskip("fms", reason="ibm-fms is not installed (pip install hfq[fms])")
pytestmark = pytest.mark.peers

ROOT = Path(__file__).parents[2]
TOKENS = torch.tensor([[3, 5, 7, 11, 13, 2], [4, 9, 30, 31, 8, 6]])
"""Tokens whose number differs from 2 and 8, the numbers of key heads. See `test_stock_fms.py`."""
CONFIG = HfqConfig(kernel="reference")
TOLERANCE = 5e-6
"""Relative L2 in float32.

FMS computes attention, RoPE, and norms in another order of operations than transformers.
"""

MAMBA = {
    "bamba": r"(?s)has not been compared.*found: bamba",
    "granite_moe_hybrid with Mamba": "mamba.A_log: stored, but FMS's model has no such tensor",
}
"""Models of `OTHERS` that `load` does not support, with its error messages."""


def identity(case) -> str:
    return "-".join(map(str, case)) if isinstance(case, tuple) else str(case)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fms")


@pytest.fixture(scope="module")
def paths(folder) -> dict[tuple, Path]:
    """Checkpoint of each (architecture, format, key heads), made on first use."""

    class Paths(dict):
        def __missing__(self, case: tuple) -> Path:
            self[case] = fms_models.write(folder / identity(case), *case)
            return self[case]

    return Paths()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        found = model(TOKENS)
    return found.logits if hasattr(found, "logits") else found[0] if isinstance(found, tuple) else found


def reference(path: Path, cls=AutoModelForCausalLM) -> torch.Tensor:
    return logits(cls.from_pretrained(path, quantization_config=CONFIG, dtype=torch.float32).eval())


def load(path: Path, **options):
    return hfq.fms.load(path, **{"data_type": torch.float32, "config": CONFIG, **options})


def get_model(path: Path, **options):
    from fms.models import get_model

    hfq.fms.register(CONFIG)
    with contextlib.redirect_stdout(io.StringIO()):
        return get_model(
            "hf_pretrained", model_path=str(path), **{"data_type": torch.float32, **options}
        ).eval()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def packed_of(model) -> dict[str, QuantizedModule]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedModule)}


@pytest.mark.parametrize(
    "case", [*fms_models.PARITY, ("mistral", "gptq-asym", 2), ("mistral", "fp8-tensor", 2)], ids=identity
)
def test_logits_are_those_of_transformers_through_both_doors(case, paths):
    expected, model = reference(paths[case]), load(paths[case])
    found = logits(model)
    print(f"relative error {error(found, expected):.2g}")
    assert error(found, expected) <= TOLERANCE
    assert len(packed_of(model)) == 14
    assert not [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    other = get_model(paths[case], linear_config={"linear_type": "hfq"})
    assert len(packed_of(other)) == 14
    assert torch.equal(logits(other), found)


def test_the_code_of_the_page_runs(paths):
    code = re.search(
        r"```python\n(.*?)```",
        (ROOT / "docs" / "how_to" / "use_ibm_fms.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )[1]
    path, names = paths["llama", "gptq-sym", 8], {}
    exec(code.replace("path/to/checkpoint", str(path)), names)
    assert names["logits"].shape == (1, 6, 128)
    assert len(packed_of(names["model"])) == 14


@pytest.mark.parametrize("case", fms_models.PARITY[3::7], ids=identity)
def test_fused_layers_compute_the_same(case, paths):
    model = load(paths[case], fused_weights=True)
    assert sum(isinstance(module, ConcatLinear) for module in model.modules()) == 4
    assert torch.equal(logits(model), logits(load(paths[case])))


@pytest.mark.parametrize("format", ["dense", "gptq-asym", "fp8-channel"])
@pytest.mark.parametrize("name", [name for name in fms_models.OTHERS if name not in MAMBA])
def test_what_else_fms_maps(name, format, folder):
    path = fms_models.write_other(folder / f"{name}-{format}", name, format)
    model = load(path)
    assert bool(packed_of(model)) == (format != "dense")
    assert (
        error(logits(model), reference(path, getattr(transformers, fms_models.OTHERS[name][0]))) <= TOLERANCE
    )


@pytest.mark.parametrize("format", ["gptq-asym", "fp8-block"])
@pytest.mark.parametrize("name", MAMBA)
def test_models_with_mamba_layers_go_through_transformers(name, format, folder):
    path = fms_models.write_other(folder / f"{name}-{format}", name, format)
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=CONFIG, dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_config(model.config).eval()
    packed = packed_of(model)
    assert {name.rpartition(".")[2] for name in packed} >= {"in_proj", "out_proj", "q_proj"}
    state = {
        name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in packed
    }
    state |= {f"{name}.weight": module.dequantize() for name, module in packed.items()}
    plain.load_state_dict(state)
    assert torch.equal(logits(model), logits(plain))
    with pytest.raises(HfqError, match=MAMBA[name]):
        load(path)


def test_packed_bytes_are_the_checkpoints_and_only_reordered_rows_are_copied(paths):
    path = paths["llama", "gptq-asym", 2]
    stock, model = (
        AutoModelForCausalLM.from_pretrained(path, quantization_config=CONFIG),
        load(path, data_type=torch.bfloat16),
    )
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "dense": "o_proj"}
    maps = _mapped(path)
    for name, module in packed_of(model).items():
        layer, local = re.search(r"layers\.(\d+).*\.(\w+)$", name).groups()
        tensors = module.stored_tensors()
        is_reordered = local in ("query", "key")
        assert {tensor.dtype for tensor in tensors.values()} <= {torch.int32, torch.float16}
        assert any(start <= tensors["qweight"].data_ptr() < stop for start, stop in maps) != is_reordered
        if local in names and not is_reordered:
            other = stock.get_submodule(f"model.layers.{layer}.self_attn.{names[local]}").stored_tensors()
            assert all(torch.equal(tensor, other[key]) for key, tensor in tensors.items())
        assert not any(parameter.requires_grad for parameter in module.parameters())
    assert model.head.weight.dtype == torch.bfloat16


def _mapped(path: Path) -> list[tuple[int, int]]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    return [tuple(int(part, 16) for part in line[0].split("-")) for line in lines]


def test_a_data_type_reaches_no_packed_tensor_of_get_model(paths):
    model = get_model(
        paths["granite", "fp8-channel", 2], data_type="bfloat16", linear_config={"linear_type": "hfq"}
    )
    exact = load(paths["granite", "fp8-channel", 2])
    for name, module in packed_of(model).items():
        expected = exact.get_submodule(name).stored_tensors()
        assert all(
            torch.equal(tensor.view(torch.uint8), expected[key].view(torch.uint8))
            for key, tensor in module.stored_tensors().items()
        )
    assert model.base_model.dec_norm.weight.dtype == torch.bfloat16


def test_a_quantized_checkpoint_needs_no_linear_config_and_others_stay_stock(paths):
    assert packed_of(get_model(paths["llama", "gptq-sym", 8]))
    plain = get_model(paths["llama", "dense", 2], fused_weights=False)
    assert not packed_of(plain)
    assert torch.equal(logits(plain), logits(load(paths["llama", "dense", 2])))


def test_biases_and_tied_heads(folder):
    path = fms_models.write(folder / "bias", "llama", "gptq-asym", 2, has_bias=True, tie_word_embeddings=True)
    model = load(path)
    assert model.head.weight is model.base_model.embedding.weight
    assert error(logits(model), reference(path)) <= TOLERANCE


@pytest.fixture(scope="module")
def shared(folder, paths) -> dict[str, tuple[Path, torch.Tensor, int]]:
    """Cases for two ranks: path, logits of one process, and bytes of its codes."""
    made = {identity(case): paths[case] for case in fms_models.PARITY}
    made["bias"] = fms_models.write(folder / "biases", "llama", "gptq-asym", 2, has_bias=True)
    made["one key head"] = fms_models.write(folder / "one", "granite", "fp8-block", 1)
    made["dense"] = fms_models.write(folder / "dense", "llama", "dense", 2, has_bias=True)
    found = {}
    for id, path in made.items():
        model = load(path)
        codes = [
            module.stored_tensors()[module.weight_format.codes_name] for module in packed_of(model).values()
        ]
        found[id] = path, logits(model), sum(tensor.nbytes for tensor in codes)
    return found


@pytest.fixture(scope="module")
def ranks(folder, shared) -> list[dict]:
    """Results of both ranks from one launch that runs all cases."""
    cases = {
        id: (str(path), TOKENS, expected, bool(nbytes)) for id, (path, expected, nbytes) in shared.items()
    }
    torch.save(cases, folder / "cases.pt")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HFQ_DISABLE_CPP": "1",
    }
    command = [sys.executable, str(ROOT / "tests" / "interop" / "fms_worker.py")]
    started = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder)],
            env=environment,
            stdout=-1,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(text[-3000:] for text in printed)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", [*map(identity, fms_models.PARITY), "bias", "one key head"])
def test_two_ranks_compute_what_one_process_does(case, ranks, shared):
    whole = shared[case][2]
    if case == "one key head":
        whole += 2 * 2 * 32 * 256  # the key and value layers of both decoder layers, which both ranks hold
    for rank in ranks:
        for door in ("load", "registry"):
            assert rank[case][door]["error"] <= TOLERANCE
            assert rank[case][door]["held"] == whole // 2


def test_dense_layers_are_cut_too(ranks):
    assert all(rank["dense"]["load"]["error"] <= TOLERANCE for rank in ranks)


def test_a_missing_tensor_is_named(folder, paths):
    import safetensors.torch as safetensors

    path = fms_models.write(folder / "missing", "llama", "fp8-tensor", 2)
    tensors = safetensors.load_file(path / "model.safetensors")
    del tensors["model.layers.1.input_layernorm.weight"]
    safetensors.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    for door in (load, get_model):
        with pytest.raises(FormatError, match=r"model.layers.1.input_layernorm.weight: missing"):
            door(path)


def test_what_fms_cannot_do_is_refused_by_name(folder, paths):
    path = paths["llama", "fp8-channel", 2]
    with pytest.raises(SetupError, match="distributed_strategy='fsdp' is not supported"):
        load(path, distributed_strategy="fsdp")
    with pytest.raises(SetupError, match="requires a process group"):
        load(path, distributed_strategy="tp")
    with pytest.raises(SetupError, match="is not a float dtype"):
        load(path, data_type="int8")
    with pytest.raises(SetupError, match="requires a local folder"):
        load("ibm-granite/granite-3.1-8b-base")
    with pytest.raises(SetupError, match="requires a quantized checkpoint"):
        get_model(paths["llama", "dense", 2], linear_config={"linear_type": "hfq"})
    scaled = fms_models.write(
        folder / "scaled",
        "granite",
        "fp8-channel",
        2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )
    with pytest.raises(SetupError, match="ignore this model's RoPE parameters"):
        load(scaled)
    unknown = fms_models.write(
        folder / "gemma", "llama", "dense", 2, architectures=["GemmaForCausalLM"], model_type="gemma"
    )
    with pytest.raises(SetupError, match="FMS does not support this model"):
        load(unknown)


def test_an_architecture_that_nobody_compared_is_refused(paths, monkeypatch):
    from hfq.integrations.fms import fms_config

    monkeypatch.setattr(fms_config, "TESTED", ("granite",))
    for door in (load, get_model):
        with pytest.raises(SetupError, match=r"(?s)has not been compared.*found: llama"):
            door(paths["llama", "fp8-channel", 2])


def test_a_layer_that_is_never_filled_says_so(paths):
    with pytest.raises(PlacementError, match="used before its weights were loaded"):
        get_model(paths["llama", "fp8-channel", 2], device_type="meta")


def test_a_sliding_window_that_fms_does_not_know_is_refused(folder):
    path = fms_models.write(folder / "window", "mistral", "fp8-channel", 2, sliding_window=16)
    for door in (load, get_model):
        with pytest.raises(SetupError, match=r"(?s)does not support a sliding window.*sliding_window 16 of"):
            door(path)


@pytest.mark.parametrize("format", ["fp8-channel", "dense"])
def test_as_many_tokens_as_key_heads_are_refused_without_a_cache_and_right_with_one(paths, format):
    """Without a cache, FMS's attention mistakes tokens for heads. See `test_stock_fms.py`."""
    path, tokens = paths["llama", format, 2], TOKENS[:, :2]
    with torch.no_grad():
        for door in (
            (load, get_model) if format != "dense" else (load,)
        ):  # FMS itself loads unquantized models in `get_model`
            with pytest.raises(SetupError, match="would mistake tokens for heads"):
                door(path)(tokens)
        found = load(path)(tokens, use_cache=True)[0]
        stock = AutoModelForCausalLM.from_pretrained(path, quantization_config=CONFIG, dtype=torch.float32)
        assert error(found, stock(tokens).logits) <= TOLERANCE
