"""Contract tests of GGUF files, with blocks of every type: the same as those of the other formats."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import CheckpointError, FormatError, HfqConfig
from hfq.checkpoint import Checkpoint
from hfq.checkpoint.gguf.block_types import BLOCK_TYPES
from hfq.cli.inspect import inspect_checkpoint
from tests.contract.test_contract_model import PLACEMENTS, TOKENS
from tests.support.gguf_models import write_random_llama
from tests.support.models import logits

KINDS = [kind.name for kind in BLOCK_TYPES.values() if kind.dtype == "U8"]
FEW = ("Q4_0", "Q4_K", "IQ3_S")
"""Types of the fast tests: one of each file of decoders."""


@pytest.fixture(
    scope="module",
    params=[kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def folder(request, tmp_path_factory):
    return write_random_llama(tmp_path_factory.mktemp(request.param), request.param)


def load(folder, device_map=None, **options):
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=HfqConfig(**options), device_map=device_map, dtype=torch.float32
    )


@pytest.fixture(scope="module")
def resident(folder):
    model = load(folder)
    found = logits(model, TOKENS % 64)
    assert found.isfinite().all()
    assert found.std() > 0.01
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_gives_the_same_logits(folder, resident, placement):
    model = load(folder, PLACEMENTS[placement])
    assert torch.equal(logits(model, TOKENS % 64), resident)
    assert torch.equal(logits(model, TOKENS % 64), resident)


@pytest.mark.parametrize(
    "options", [{"cpu_memory": "mmap"}, {"cpu_memory": "private"}, {"disk_io": "direct"}], ids=str
)
def test_every_kind_of_memory_and_reading_gives_the_same_logits(folder, resident, options):
    device_map = {"": "disk"} if "disk_io" in options else None
    assert torch.equal(logits(load(folder, device_map, **options), TOKENS % 64), resident)


def test_the_logits_are_those_of_the_dequantized_weights(folder, resident):
    model = load(folder)
    weights = {
        f"{name}.weight": module.weight for name, module in model.hf_quantizer.loading.quantized.items()
    }
    assert len(weights) == 16
    norms = {name: tensor for name, tensor in model.state_dict().items() if "norm" in name}
    plain = AutoModelForCausalLM.from_config(model.config)
    plain.load_state_dict({**weights, **norms})
    assert (logits(plain, TOKENS % 64) - resident).norm() <= 1e-5 * resident.norm()


def test_weights_stay_as_stored(folder):
    modules = load(folder).hf_quantizer.loading.quantized.values()
    stored = sum(info.nbytes for module in modules for info in module.infos.values())
    assert sum(parameter.nbytes for module in modules for parameter in module.parameters()) == stored
    report = inspect_checkpoint(Checkpoint.open(folder))
    kind = next(module.weight_format.type for module in modules)
    assert report["formats"] == {f"gguf {kind.name}": 16}
    assert report["bits_per_quantized_weight"] == round(kind.bits, 3)


@pytest.mark.parametrize("placement", ["cpu", "disk"])
def test_saving_gives_back_the_bytes(folder, resident, placement, tmp_path):
    load(folder, PLACEMENTS[placement]).to(torch.bfloat16).save_pretrained(tmp_path)
    assert (tmp_path / "model.gguf").read_bytes() == (folder / "model.gguf").read_bytes()
    assert torch.equal(logits(load(tmp_path), TOKENS % 64), resident)


@pytest.mark.parametrize("size", ["half", "last byte"])
def test_a_truncated_file_is_refused(folder, size, tmp_path):
    raw = (folder / "model.gguf").read_bytes()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.gguf").write_bytes(raw[: len(raw) // 2 if size == "half" else -1])
    with pytest.raises(CheckpointError, match="it is truncated by"):
        load(tmp_path)


def test_a_layer_of_another_size_is_refused(folder, tmp_path):
    write_random_llama(tmp_path, "Q8_0", intermediate_size=768)
    with pytest.raises(
        FormatError, match=r"(?s)mlp\.gate_proj\.weight: expected U8 \[768, 272\], found U8 \[512, 272\]"
    ):
        load(tmp_path)
