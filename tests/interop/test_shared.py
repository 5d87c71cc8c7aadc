"""Tests of checkpoints from other projects' tools next to the repository, if present."""

import hashlib
import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hfq import HfqConfig
from hfq.checkpoint import Checkpoint
from hfq.errors import HfqError
from hfq.loading.saving import SIDE_FILES
from hfq.modules.experts import QuantizedExperts
from tests.support import tiny_models

safetensors_torch = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.skipif(
    not tiny_models.SHARED.is_dir(), reason="no ../shared/checkpoints next to the repository"
)


READ = [tiny_models.marked_by_needs(path) for path in tiny_models.shared_checkpoints()]


def placements(path: Path) -> dict[str, dict]:
    """Returns device maps, of which "half" puts the last layer on disk, or those of two stacks."""
    if is_seq2seq(path):
        half = {"": "cpu", "encoder.block.1": "disk", "decoder.block.1": "disk", "lm_head": "disk"}
        return {"cpu": {"": "cpu"}, "half": half, "disk": {"": "disk"}}
    names = (re.match(r"(?:model\.)?layers\.(\d+)\.", name) for name in Checkpoint.open(path).tensors)
    last = max(int(found[1]) for found in names if found)
    half = {"": "cpu", f"model.layers.{last}": "disk", "model.norm": "disk"}
    return {"cpu": {"": "cpu"}, "half": half, "disk": {"": "disk"}}


def is_seq2seq(path: Path) -> bool:
    return (path / "reference_seq2seq.safetensors").is_file()


def load(path, **options):
    """Loads a folder, or skips the test if the error has a word of the folder's may_refuse.json."""
    config = HfqConfig(quantize_activations=False)
    try:
        return (AutoModelForSeq2SeqLM if is_seq2seq(path) else AutoModelForCausalLM).from_pretrained(
            path, quantization_config=config, **{"dtype": torch.float32, **options}
        )
    except HfqError as error:
        file = path / "may_refuse.json"
        words = json.loads(file.read_text()) if file.is_file() else []
        text = f"{error.message} {error.found}".lower()  # the name of the folder is no reason
        if not any(word.lower() in text for word in words):
            raise
        pytest.skip(f"{path.name} is named as unsupported: {error.message}")


def logits(model, reference):
    with torch.no_grad():
        return model(
            **{name: tokens for name, tokens in reference.items() if name.endswith("input_ids")}
        ).logits


def stored(folder: Path) -> dict[str, object]:
    """Returns the tensors of a folder as digests, or the bytes of its GGUF files."""
    return tiny_models.gguf_bytes(folder) or tiny_models.digests(folder)


@pytest.mark.parametrize("path", READ)
def test_the_logits_are_those_of_the_exactly_dequantized_weights_in_every_placement(path):
    kind = "seq2seq" if is_seq2seq(path) else "weightonly"
    reference = safetensors_torch.load_file(path / f"reference_{kind}.safetensors")
    expected = reference["logits_fp32_weightonly"]
    maps = placements(path)
    found = {key: logits(load(path, device_map=device_map), reference) for key, device_map in maps.items()}
    # float32 sums in another order than the reference allow 1e-5 relative L2.
    assert (found["cpu"] - expected).norm() <= 1e-5 * expected.norm()
    assert all(torch.equal(found["cpu"], other) for other in found.values())


@pytest.mark.parametrize("path", [path for path in READ if path.values[0].parent == tiny_models.SHARED_2026])
def test_the_weights_are_the_exactly_dequantized_ones(path):
    expected = json.loads((path / "expected_weights_sha256.json").read_text())
    model = load(path, device_map={"": "cpu"})
    experts = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedExperts)}
    found = {}
    for name in expected:
        owner, _, local = in_model(name).rpartition(".")
        if owner in experts:
            layers = [
                [layer.weight for key, layer in each.items() if key[:2] in local] for each in experts[owner]
            ]
            found[name] = torch.stack([torch.cat(parts) for parts in layers])
        else:
            found[name] = getattr(model.get_submodule(owner), local)
    different = {
        name
        for name, digest in expected.items()
        if digest != hashlib.sha256(as_bytes(found[name])).hexdigest()
    }
    assert {
        name for name in different if not name.endswith("A_log")
    } == set()  # a logarithm, see its own test


def in_model(name: str) -> str:
    """Returns the name in hfq's model of a weight of an expert of Switch Transformers; others keep theirs."""
    found = re.fullmatch(r"(.*\.experts)\.expert_(\d+)\.(wi|wo)\.weight", name)
    return f"{found[1]}.{found[2]}.{'up' if found[3] == 'wi' else 'down'}_proj.weight" if found else name


def as_bytes(weight: torch.Tensor) -> bytes:
    return weight.detach().float().contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    "placement", ["half", *(pytest.param(other, marks=pytest.mark.slow) for other in ("cpu", "disk"))]
)
@pytest.mark.parametrize("path", READ)
def test_saving_gives_back_every_byte_and_the_config(path, placement, tmp_path):
    model = load(path, device_map=placements(path)[placement], dtype="auto")
    model.save_pretrained(tmp_path)
    assert stored(tmp_path) == stored(path)
    saved = json.loads((tmp_path / "config.json").read_text())
    source = AutoConfig.from_pretrained(path) if (path / "config.json").is_file() else None
    assert saved.get("quantization_config") == getattr(source, "quantization_config", None)
    for side_file in SIDE_FILES:
        if (path / side_file).is_file():
            assert (tmp_path / side_file).read_bytes() == (path / side_file).read_bytes()


@pytest.mark.parametrize("path", READ)
def test_nothing_is_inflated(path):
    model = load(path, device_map={"": "cpu"})
    held = {tensor.data_ptr(): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}
    loading = model.hf_quantizer.loading
    quantized = {info.name: info for module in loading.quantized.values() for info in module.infos.values()}
    floats = loading.match.unquantized.values()
    stored = sum(info.nbytes for info in quantized.values())
    stored += sum(math.prod(info.shape) * torch.float32.itemsize for info in floats)
    assert sum(held.values()) <= 1.02 * stored


def test_a_folder_that_may_be_refused_is_skipped_by_a_word_of_the_error_alone(tmp_path):
    tensors = {f"model.layers.{layer}.mlp.up_proj.B": torch.zeros(8, dtype=torch.int32) for layer in (0, 1)}
    path = tiny_models.write_model(tmp_path / "qqq", tensors, {"quant_method": "qqq"})
    with pytest.raises(HfqError, match="QQQ is not supported"):
        load(path)
    (path / "may_refuse.json").write_text('["marlin", "model.safetensors"]')
    with pytest.raises(HfqError, match="QQQ is not supported"):
        load(path)
    (path / "may_refuse.json").write_text('["QQQ"]')
    with pytest.raises(pytest.skip.Exception, match="QQQ is not supported"):
        load(path)
