"""Contract tests of formats as pure functions of one module's tensors."""

import pytest
import torch

from hfq.checkpoint import Checkpoint
from hfq.formats import FORMATS, tensors_by_module
from hfq.formats.configs.source_config import detection_hints
from hfq.kernels import reference
from tests.support import tiny_models

OUT, IN = 128, 256
MODULE = "model.layers.0.mlp.down_proj"


@pytest.fixture
def weight():
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1)) * 0.1


@pytest.fixture
def module(detected):
    """Returns (format, tensors) of one module of the written checkpoint."""
    return detected[MODULE]


def packed(case, weight):
    """Returns (tensors, format) of a weight, with the format as detected."""
    tensors = case.format.quantize(weight)
    return tensors, tiny_models.settled(case.format, tensors, case.config, tuple(weight.shape), case.schema)


def test_quantize_makes_just_what_the_specs_say(case, checkpoint, module):
    detected, tensors = module
    specs = {spec.name: spec for spec in detected.tensor_specs(IN, OUT)}
    required = {name for name, spec in specs.items() if not spec.optional}
    assert required <= tensors.keys() <= specs.keys()
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == specs[name].shape
        assert tensor.dtype in tiny_models.dtypes_of(specs[name].dtypes)


def test_detection_reads_the_format_that_was_written(case, module):
    detected, tensors = module
    assert type(detected) is type(case.format)
    assert detected.describe() == (case.text or case.format.describe())
    assert detected.shape(tensors) == (OUT, IN)


def test_packing_saves_bytes(module):
    _, tensors = module
    assert sum(tensor.nbytes for tensor in tensors.values()) < 0.6 * OUT * IN * 2


def test_the_rounding_error_is_that_of_the_bits(case, weight):
    tensors, weight_format = packed(case, weight)
    error = (weight_format.dequantize(tensors) - weight).norm() / weight.norm()
    bits = int(weight_format.bits_per_code)  # without the scales in the blocks of GGUF
    # RTN of Gaussian weights: below 0.65 at 2 bits, and less than half for each further bit, up to the
    # mantissas of FP6 and FP8; QMoE's codes, of no fixed bits, have three values
    assert 0.001 < error < {0: 1.0, 1: 1.5, 2: 0.65, 3: 0.3, 4: 0.16, 5: 0.08, 6: 0.06, 8: 0.07}[bits]


def test_dequantizing_again_changes_nothing(case, weight):
    tensors, weight_format = packed(case, weight)
    once = weight_format.dequantize(tensors)
    assert torch.equal(once, weight_format.dequantize(case.format.quantize(weight)))
    assert torch.equal(once.bfloat16(), weight_format.dequantize(tensors, torch.bfloat16))


def test_panels_are_slices_of_the_whole(case, module):
    detected, tensors = module
    whole = detected.dequantize(tensors)
    panel = torch.full((40, IN), float("nan"))
    detected.dequantize_into(panel, tensors, 64)
    assert torch.equal(panel, whole[64:104])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_is_a_product_with_the_dequantized_weight(module, dtype):
    detected, tensors = module
    activations = torch.randn(3, 5, IN, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = activations @ detected.dequantize(tensors, dtype).t()
    found = reference.linear(activations, tensors, detected)
    assert found.dtype == dtype
    assert found.shape == (3, 5, OUT)
    # the weight is bit-identical, but a product over panels may sum in another order
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert (found - expected).float().norm() <= tolerance * expected.float().norm()


def test_a_damaged_scale_is_refused_by_name(case, module):
    detected, tensors = module
    name = next((spec.name for spec in detected.tensor_specs(IN, OUT) if spec.role == "scale"), None)
    if name is None:
        pytest.skip("its scales are in its blocks")
    damaged = tensors[name].clone()
    tiny_models.poison(damaged.view(-1), 0)
    with pytest.raises(Exception, match=rf"(?s)not finite. Nothing was loaded.*{MODULE}.{name}.*Fix:"):
        detected.resolve(MODULE, {**tensors, name: damaged})


def test_a_stack_of_layers_is_resolved_as_each_layer(case, module):
    detected, tensors = module
    small = {name: tensor for name, tensor in tensors.items() if name != detected.codes_name}
    stack = {name: torch.stack([tensor] * 3) for name, tensor in small.items()}
    expected = detected.resolve(MODULE, small)
    assert detected.resolve_stack(stack) == expected
    for spec in detected.tensor_specs(IN, OUT):
        if spec.role == "scale" and spec.name in small:
            damaged = stack[spec.name].clone()
            tiny_models.poison(damaged[1].view(-1), 0)
            assert detected.resolve_stack({**stack, spec.name: damaged}) is None


def test_no_other_format_claims_a_module(case, checkpoint):
    """Formats never overlap, so the order of detection has no effect."""
    opened = Checkpoint.open(checkpoint)
    hints = detection_hints(opened, case.config)
    for module, tensors in tensors_by_module(opened.tensors).items():
        claims = [name for name, kind in FORMATS.items() if kind.detect(module, tensors, hints) is not None]
        assert len(claims) <= 1, (module, claims)
