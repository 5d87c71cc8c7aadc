"""Tests that other projects' readers load checkpoints saved by hfq, and ignore hfq's import."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfq import HfqConfig
from hfq.checkpoint import Checkpoint
from hfq.convert import convert_checkpoint
from tests.support import tiny_models

pytestmark = pytest.mark.peers

PLACEMENTS = {"cpu": {"": "cpu"}, "half": {"": "cpu", "model.layers.1": "disk"}, "disk": {"": "disk"}}
GPTQ = tiny_models.DATA / "tiny-llama-gptq"


def shared(*parts: str) -> list:
    if not tiny_models.SHARED.is_dir():
        return []
    names = sorted(path.name for path in tiny_models.SHARED.iterdir())
    return [
        tiny_models.SHARED / name
        for name in names
        if any(part in name for part in parts) and "mixtral" not in name
    ]


CT = shared("ct-fp8", "ct-w8a8")
GPTQS = [GPTQ, *shared("gptq-w", "gptq-dynamic")]


def identity(path) -> str:
    return path.name


def load(path, **options):
    config = HfqConfig(quantize_activations=options.pop("quantize_activations", False))
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, **{"dtype": "auto", **options}
    )


@pytest.mark.parametrize("path", [GPTQS[0], *CT[:1]], ids=identity)
def test_a_stock_load_is_the_same_with_and_without_hfq(stock_digest, path):
    assert stock_digest(path) == stock_digest(path, "hfq")


# The GPTQ reader of transformers does not support `dynamic` overrides. The gptqmodel test below covers them.
STOCK_READABLE = [path for path in [*GPTQS, *CT] if "dynamic" not in path.name]


@pytest.mark.parametrize("path", STOCK_READABLE, ids=identity)
def test_a_stock_reader_loads_what_hfq_saved(stock_digest, path, tmp_path):
    expected = stock_digest(path)
    for placement, device_map in PLACEMENTS.items():
        load(path, device_map=device_map).save_pretrained(tmp_path / placement)
    digests = [tiny_models.digests(tmp_path / placement) for placement in PLACEMENTS]
    assert digests[0] == digests[1] == digests[2]
    assert stock_digest(tmp_path / "disk") == expected


@pytest.mark.parametrize("targets", [("gptq_v2",), ("pack-quantized", "gptq")])
def test_gptqmodel_gives_the_same_logits_of_what_was_converted(stock_digest, tmp_path, targets):
    path = GPTQ
    for to in targets:
        convert_checkpoint(Checkpoint.open(path), tmp_path / to, to)
        path = tmp_path / to
    assert stock_digest(path) == stock_digest(GPTQ)


@pytest.mark.parametrize("path", CT, ids=identity)
def test_activations_are_quantized_as_compressed_tensors_does(path):
    tokens = torch.arange(1, 25)[None]
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = stock(tokens).logits
        found = load(path, dtype=torch.float32, quantize_activations=True)(tokens).logits
    # Both sides use float32. Products over panels may sum in another order, which can change a rounding of
    # FP8.
    assert (found - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("path", GPTQS, ids=identity)
def test_gptqmodel_reads_the_weights_that_hfq_saved_from_disk(path, tmp_path):
    """gptqmodel dequantizes in float16, one rounding away from hfq's float32."""
    from gptqmodel import BACKEND, GPTQModel

    from hfq.modules.linear import QuantizedLinear

    load(path, device_map={"": "disk"}).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(path).save_pretrained(tmp_path)
    peer = GPTQModel.load(str(tmp_path), backend=BACKEND.TORCH, device="cpu").model
    checked = 0
    for name, module in load(path).named_modules():
        if isinstance(module, QuantizedLinear):
            other = peer.get_submodule(name)
            weight = other.dequantize_weight().t()
            found = module.weight_format.dequantize(module.stored_tensors(), weight.dtype)
            worst = (found.float() - weight.float()).abs().max()
            assert worst <= 2 * torch.finfo(weight.dtype).eps * weight.float().abs().max(), name
            checked += 1
    assert checked >= 14
