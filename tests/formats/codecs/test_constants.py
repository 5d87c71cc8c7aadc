"""Tests of tables that every device holds once."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hfq.formats.codecs.constants import constant

CPU = torch.device("cpu")


def test_a_table_is_made_once():
    assert constant((1.0, 2.0), CPU) is constant((1.0, 2.0), CPU)
    assert constant((1.0, 2.0), CPU).tolist() == [1, 2]
    assert constant((1.0, 3.0), CPU).tolist() == [1, 3]


def test_a_table_is_float32_whatever_the_default_is():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert constant((0.1, 4.0), CPU).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_a_table_of_inference_mode_serves_autograd():
    with torch.inference_mode():
        table = constant((1.0, 5.0), CPU)
    weight = torch.ones(2, requires_grad=True)
    (weight * table).sum().backward()
    assert weight.grad.tolist() == [1, 5]


def test_a_fake_table_is_not_kept():
    with FakeTensorMode():
        constant((1.0, 6.0), CPU)
    assert constant((1.0, 6.0), CPU).tolist() == [1, 6]
