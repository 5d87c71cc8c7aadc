"""Unquantized tensors: norms and permuted biases are converted once, and the rest stays in the file."""

import pytest
import torch

from hfq import HfqConfig
from tests.support.gguf_models import make_model, write_model
from tests.support.models import logits

TOKENS = torch.tensor([[1, 5, 9, 30, 7, 3]])
PLACEMENTS = {
    "cpu": {"": "cpu"},
    "half": {"": "cpu", "model.layers.1": "disk", "model.norm": "disk"},
    "disk": {"": "disk"},
}


def load(folder, device_map=None, dtype=torch.float32, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=HfqConfig(**options), device_map=device_map, dtype=dtype
    )


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    model = make_model("gemma3")
    return write_model(tmp_path_factory.mktemp("gemma3"), "gemma3", model), model


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("options", [{}, {"cpu_memory": "private"}], ids=str)
def test_norms_are_converted_in_every_placement(gemma, placement, options):
    folder, model = gemma
    found = load(folder, PLACEMENTS[placement], **options)
    expected = logits(model, TOKENS)
    assert (logits(found, TOKENS) - expected).norm() <= 1e-5 * expected.norm()
    assert torch.equal(logits(found, TOKENS), logits(load(folder), TOKENS))


def test_only_what_differs_takes_memory(gemma):
    loading = load(gemma[0]).hf_quantizer.loading
    converted = {
        info.name for info in loading.checkpoint.tensors.values() if not info.range.file.endswith(".gguf")
    }
    assert converted == {name for name in loading.checkpoint.tensors if "norm" in name}
    assert {info.dtype for name, info in loading.checkpoint.tensors.items() if name in converted} == {"F32"}


def test_unquantized_weights_are_views_of_the_file(tmp_path):
    folder = write_model(tmp_path, "qwen2", make_model("qwen2"), ("F32",))
    model = load(folder)
    names = {
        name for name, parameter in model.named_parameters() if parameter in model.hf_quantizer.loading.mapped
    }
    assert names == dict(model.named_parameters()).keys()


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("Q8_0",), torch.float32),
        (("BF16",), torch.bfloat16),
        (("F16",), torch.float16),
        (("F32",), torch.float32),
    ],
)
def test_the_dtype_without_a_request_is_that_of_the_file(tmp_path, kinds, expected):
    folder = write_model(tmp_path, "qwen2", make_model("qwen2"), kinds)
    config = (folder / "config.json").read_text()
    assert '"dtype": "float32"' in config
    (folder / "config.json").write_text(config.replace('"dtype": "float32",', ""))
    assert load(folder, dtype="auto").dtype == expected
    assert load(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("alignment", [1, 2, 64])
def test_tensors_may_lie_at_any_address(tmp_path, alignment):
    from hfq.checkpoint.gguf.header import read_gguf_header
    from tests.support.checkpoint_files import stored_bytes
    from tests.support.gguf_files import write_gguf

    folder = write_model(tmp_path, "llama-biased", make_model("llama-biased"), ("BF16", "Q4_0"))
    header = read_gguf_header(folder / "model.gguf")
    tensors = {
        name: (info.blocks.type, shape_of(info), stored_bytes(info)) for name, info in header.tensors.items()
    }
    expected = logits(load(folder), TOKENS)
    write_gguf(folder / "model.gguf", scalars(header), tensors, alignment)
    for device_map in (None, {"": "disk"}):
        assert torch.equal(logits(load(folder, device_map), TOKENS), expected)


def scalars(header):
    """Returns the metadata without arrays."""
    return {key: value for key, value in header.keys.items() if isinstance(value, (int, float, str))}


def shape_of(info):
    from hfq.checkpoint.gguf.block_types import block_type

    kind = block_type(info.blocks.type)
    return info.shape if kind.dtype != "U8" else (*info.shape[:-1], info.shape[-1] // kind.nbytes * kind.size)
