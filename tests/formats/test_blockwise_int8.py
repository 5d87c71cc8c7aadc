"""Tests of int8 with a scale for each block against loops over weights."""

import numpy as np
import pytest
import torch

from hfq import FormatError
from hfq.formats.blockwise_int8 import BlockwiseInt8
from tests.support.tiny_models import described

CONFIG = {"quant_method": "blockwise_int8", "activation_scheme": "dynamic"}


def random_layer(size: tuple[int, int], block: tuple[int, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size[0])
    grid = -(-size[0] // block[0]), -(-size[1] // block[1])
    return {
        "weight": torch.randint(-128, 128, size, generator=generator).to(torch.int8),
        "weight_scale_inv": torch.randn(grid, generator=generator),
    }


@pytest.mark.parametrize(
    ("size", "block"),
    [((5, 32), (3, 16)), ((4, 7), (4, 7)), ((9, 33), (4, 10)), ((2, 3), (128, 128))],
    ids=str,
)
def test_the_weight_is_that_of_the_loops(size, block):
    tensors = random_layer(size, block)
    found = BlockwiseInt8.detect("m", described("m", tensors), CONFIG | {"weight_block_size": list(block)})
    codes, scale = tensors["weight"].numpy(), tensors["weight_scale_inv"].numpy()
    expected = np.empty(size, dtype=np.float32)
    for n in range(size[0]):
        for k in range(size[1]):
            expected[n, k] = np.float32(codes[n, k]) * scale[n // block[0], k // block[1]]
    specs = {spec.name: spec.shape for spec in found.tensor_specs(size[1], size[0])}
    assert specs["weight_scale_inv"] == scale.shape
    assert torch.equal(found.resolve("m", tensors).dequantize(tensors), torch.from_numpy(expected))
    for start in range(size[0]):
        panel = torch.full((size[0] - start, size[1]), float("nan"))
        found.dequantize_into(panel, tensors, start)
        assert torch.equal(panel, torch.from_numpy(expected[start:]))


@pytest.mark.parametrize("block", [None, [128], [0, 128], "128"])
def test_a_config_without_the_size_of_blocks_is_refused(block):
    tensors = described("m", random_layer((4, 4), (2, 2)))
    with pytest.raises(FormatError, match="weight_block_size in quantization_config is not supported"):
        BlockwiseInt8.detect("m", tensors, CONFIG | {"weight_block_size": block})


def test_activations_that_hfq_does_not_round_are_described():
    found = BlockwiseInt8.detect(
        "m", described("m", random_layer((4, 4), (2, 2))), CONFIG | {"weight_block_size": [2, 2]}
    )
    assert (found.scheme.strategy, found.scheme.group_size, found.scheme.dtype) == (
        "group",
        2,
        "int8 of each group",
    )
