"""Values that a GGUF file stores as functions of the model's, or in another order."""

import pytest
import torch

from hfq.formats.gguf.stored_values import model_values, stored_values
from hfq.tensor_spec import Blocks, StoredOrder

ORDER = StoredOrder(2, 2, 3, 2, 1)


@pytest.mark.parametrize("function", [None, "plus one", "minus exponential"])
@pytest.mark.parametrize("rows", [None, ORDER])
def test_the_stored_values_are_the_inverse(function, rows):
    value = torch.arange(1.0, 15.0) / 8
    blocks = Blocks("F32", rows=rows, function=function)
    stored = stored_values(value, blocks)
    assert torch.allclose(model_values(stored, blocks), value, rtol=1e-6)
    assert torch.equal(stored, value) == (function is None and rows is None)


def test_a_file_stores_rows_as_its_order_says():
    """Elements from 2 on are [outer 2, first 3, second 2] in the file, and [2, 2, 3] in the model."""
    model = torch.tensor([100, 101, 0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32])
    stored = torch.tensor([100, 101, 0, 10, 1, 11, 2, 12, 20, 30, 21, 31, 22, 32])
    assert torch.equal(stored_values(model, Blocks("F32", rows=ORDER)), stored)
    assert torch.equal(model_values(stored, Blocks("F32", rows=ORDER)), model)


def test_tensors_of_other_files_are_unchanged():
    value = torch.arange(3.0)
    assert model_values(value, None) is value
    assert stored_values(value, None) is value
