"""Tests of BitNet against loops over bits, with scales that divide and that multiply."""

import numpy as np
import pytest
import torch

from hfq import FormatError
from hfq.formats.bitnet import BitNet
from tests.support.tiny_models import described

CONFIG = {"quant_method": "bitnet", "modules_to_not_convert": None}
MULTIPLIED = CONFIG | {"linear_class": "autobitlinear", "quantization_mode": "offline"}


def random_layer(rows: int, columns: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    return {"weight": packed, "weight_scale": torch.tensor([3.1]).bfloat16()}


@pytest.mark.parametrize(
    ("config", "is_divided"), [(CONFIG, True), (MULTIPLIED, False)], ids=["divided", "multiplied"]
)
@pytest.mark.parametrize("size", [(4, 3), (20, 16), (8, 1)], ids=str)
def test_the_weight_is_that_of_the_loops(config, is_divided, size):
    tensors = random_layer(size[0] // 4, size[1])
    found = BitNet.detect("m", described("m", tensors), config)
    bytes_, scale = tensors["weight"].tolist(), tensors["weight_scale"].float().numpy()[0]
    expected = np.empty(size, dtype=np.float32)
    for n in range(size[0]):
        quarter, row = divmod(n, len(bytes_))
        for k in range(size[1]):
            value = np.float32((bytes_[row][k] >> 2 * quarter & 3) - 1)
            expected[n, k] = value / scale if is_divided else value * scale
    specs = {spec.name: spec.shape for spec in found.tensor_specs(size[1], size[0])}
    assert specs["weight"] == tensors["weight"].shape
    assert torch.equal(found.resolve("m", tensors).dequantize(tensors), torch.from_numpy(expected))
    for start in range(size[0]):
        for stop in range(start + 1, size[0] + 1):
            panel = torch.full((stop - start, size[1]), float("nan"))
            found.dequantize_into(panel, tensors, start)
            assert torch.equal(panel, torch.from_numpy(expected[start:stop]))


def test_ternary_weights_are_kept_by_quantizing():
    weight = torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, -1.0], [-1.0, 0.0, 1.0], [-1.0, 1.0, 1.0]])
    for found in (BitNet(), BitNet(is_divided=False)):
        assert torch.equal(found.dequantize(found.quantize(weight)).sign(), weight)


def test_a_scale_of_zero_is_refused_if_it_divides():
    tensors = random_layer(2, 8) | {"weight_scale": torch.zeros(1)}
    with pytest.raises(FormatError, match=r"(?s)not positive. Nothing was loaded.*m.weight_scale"):
        BitNet().resolve("m", tensors)
    assert not BitNet(is_divided=False).resolve("m", tensors).dequantize(tensors).any()


@pytest.mark.parametrize(
    "change", [{"linear_class": "bitlinear2"}, {"linear_class": 0}, {"use_rms_norm": True}], ids=str
)
def test_options_that_change_the_layer_are_refused(change):
    with pytest.raises(FormatError, match=f"{next(iter(change))} in quantization_config is not supported"):
        BitNet.detect("m", described("m", random_layer(2, 8)), CONFIG | change)


def test_a_size_that_no_four_rows_divide_is_refused():
    with pytest.raises(FormatError, match="BitNet cannot hold a layer of this output size"):
        BitNet().tensor_specs(8, 6)
