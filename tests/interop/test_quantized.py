"""Tests that plain readers load the output of `hfq.quantize` with equal weights.

Logits are equal within the readers' rounding.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfq
from hfq import HfqConfig, Recipe
from hfq.formats import FORMATS
from hfq.modules.linear import QuantizedLinear
from tests.support import tiny_models
from tests.support.models import load

pytestmark = pytest.mark.peers

SOURCE = tiny_models.DATA / "tiny-llama"
TOKENS = torch.arange(1, 65)[None]
RECIPES = [
    {"method": "gptq", "bits": 4, "group_size": 64},
    {"method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    {"method": "gptq", "bits": 2, "group_size": 32, "sym": False},
    {"method": "awq", "bits": 4, "group_size": 64},
    {"method": "awq", "bits": 3, "group_size": 32, "modules_to_not_convert": ["model.layers.1.mlp"]},
    {"method": "rtn", "bits": 4, "modules_to_not_convert": ["model.layers.1.self_attn.o_proj"]},
]


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.float()


def dequantized(layer):
    if "Awq" not in type(layer).__name__:
        return layer.dequantize_weight()
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    return dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, layer.bits, layer.group_size)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_gptqmodel_reads_what_hfq_quantized(recipe, tmp_path):
    from gptqmodel import BACKEND, GPTQModel

    calibration = list(torch.randint(3, 1536, (4, 64), generator=torch.Generator().manual_seed(0)))
    hfq.quantize(
        SOURCE,
        Recipe(**{name: value for name, value in recipe.items() if name != "modules_to_not_convert"}),
        output_dir=tmp_path / "it",
        dataset=calibration,
        num_calibration_samples=4,
        max_seq_length=64,
        modules_to_not_convert=recipe.get("modules_to_not_convert"),
    )
    peer = GPTQModel.load(str(tmp_path / "it"), backend=BACKEND.TORCH, device="cpu").model
    model, checked = load(tmp_path / "it"), 0
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            weight = dequantized(peer.get_submodule(name)).t()
            found = module.weight_format.dequantize(module.stored_tensors(), weight.dtype)
            worst = (found.float() - weight.float()).abs().max()
            assert worst <= 2 * torch.finfo(weight.dtype).eps * weight.float().abs().max(), name
            checked += 1
    assert checked == 28 - sum(
        3 if name.endswith("mlp") else 1 for name in recipe.get("modules_to_not_convert", ())
    )
    expected = logits(model)
    assert (logits(peer) - expected).norm() < 0.02 * expected.norm()  # the peer computes in 16 bits


def test_transformers_reads_the_awq_that_hfq_wrote(tmp_path):
    calibration = list(torch.randint(3, 1536, (4, 64), generator=torch.Generator().manual_seed(0)))
    recipe = Recipe("awq", group_size=64)
    hfq.quantize(
        SOURCE,
        recipe,
        output_dir=tmp_path / "it",
        dataset=calibration,
        num_calibration_samples=4,
        max_seq_length=64,
        modules_to_not_convert=["model.layers.2.self_attn.o_proj"],
    )
    expected = logits(load(tmp_path / "it"))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "it", dtype=torch.bfloat16)
    assert not [module for module in stock.modules() if type(module).__module__.startswith("hfq")]
    assert type(stock.model.layers[2].self_attn.o_proj) is torch.nn.Linear
    assert (logits(stock) - expected).norm() < 0.02 * expected.norm()


def test_transformers_reads_the_fp8_that_hfq_wrote(tmp_path):
    hfq.quantize(SOURCE, Recipe("fp8"), output_dir=tmp_path / "it")
    expected = logits(load(tmp_path / "it"))
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path / "it", dtype=torch.bfloat16
    )  # on a CPU, transformers dequantizes to this dtype
    assert (logits(stock) - expected).norm() < 0.02 * expected.norm()


def test_compressed_tensors_reads_the_fp8_that_hfq_wrote(tmp_path):
    source = tiny_models.write_model(tmp_path / "floats", tiny_models.model_tensors(FORMATS["dense"]()), None)
    recipe = Recipe("fp8")
    hfq.quantize(source, recipe, output_dir=tmp_path / "it", modules_to_not_convert=["gate_proj"])
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "it", dtype=torch.float32)
    tokens = torch.arange(1, 25)[None]
    with torch.no_grad():
        expected = stock(tokens).logits
        found = load(tmp_path / "it", quantize_activations=True)(tokens).logits
    # Both sides use float32. Products over panels may sum in another order, which can change a rounding of
    # FP8.
    assert (found - expected).norm() <= 1e-3 * expected.norm()


OUTPUTS = [{"method": "mxfp4"}, {"method": "w8a8"}, {"method": "w8a16"}, {"method": "w4a16"}]


@pytest.mark.parametrize("recipe", OUTPUTS, ids=str)
def test_compressed_tensors_reads_further_outputs_of_hfq(recipe, tmp_path):
    """A model that is quantized on load and saved equals the output of `hfq.quantize`.

    tests/loading/quantize_on_load/test_quantizing_loader.py checks this.
    """
    model = AutoModelForCausalLM.from_pretrained(
        SOURCE, quantization_config=HfqConfig(quantize_weights=recipe), dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "it")
    dtype = (
        torch.bfloat16 if recipe["method"] == "mxfp4" else torch.float32
    )  # compressed-tensors always decompresses MXFP4 to bfloat16
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "it", dtype=dtype)
    found = logits(stock)
    packed = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(packed) == 28
    for name, module in packed.items():
        assert torch.equal(module.weight, stock.get_submodule(name).weight.float()), name
    # Another order of sums can change the int8 code of an activation. The reference kernel sums in the same
    # order as the reader.
    options = {"quantize_activations": True, "kernel": "reference"} if recipe["method"] == "w8a8" else {}
    expected = logits(load(tmp_path / "it", **options))
    # Both sides use float32, and may sum in another order. For MXFP4, the reader computes in 16 bits.
    assert (found - expected).norm() <= (1e-3 if dtype == torch.float32 else 0.02) * expected.norm()
