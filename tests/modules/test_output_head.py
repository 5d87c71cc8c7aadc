"""The output head of a quantized model: its product of few rows, gradients, and its replacement."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hfq.kernels.cpp import dense
from hfq.modules.output_head import OutputHead, replace_head


@pytest.fixture
def head(native):
    torch.manual_seed(0)
    made = nn.Linear(64, 37, bias=False).bfloat16()
    made.__class__ = OutputHead
    return made


def test_few_rows_have_the_librarys_bits_with_and_without_gradients(head):
    rows = torch.randn(2, 3, 64).bfloat16()
    expected = dense.linear(rows, head.weight.data)
    with torch.no_grad():
        assert torch.equal(head(rows), expected)
    rows.requires_grad_()
    found = head(rows)
    assert torch.equal(found, expected)
    found.float().square().sum().backward()
    grad = (2 * expected.float()).bfloat16()
    assert torch.equal(rows.grad, grad @ head.weight)
    assert torch.equal(head.weight.grad, grad.flatten(0, 1).t() @ rows.flatten(0, 1))


def test_all_other_calls_are_those_of_torch(head):
    def equals_torch(rows):
        return torch.equal(head(rows), nn.functional.linear(rows, head.weight))

    with torch.no_grad():
        assert equals_torch(torch.randn(dense.MOST_ROWS + 1, 64).bfloat16())
        assert equals_torch(torch.randn(0, 64).bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert equals_torch(torch.randn(2, 64))
        exported = torch.jit.trace(head, torch.randn(2, 64).bfloat16(), check_trace=False)
        assert "_Multiply" not in str(exported.inlined_graph)
        head.float()
        assert equals_torch(torch.randn(2, 64))


def test_it_is_copied_and_pickled(head):
    rows = torch.randn(1, 64).bfloat16()
    with torch.no_grad():
        expected = head(rows)
        assert torch.equal(copy.deepcopy(head)(rows), expected)
        assert torch.equal(pickle.loads(pickle.dumps(head))(rows), expected)


class _Model:
    def __init__(self, head):
        self.head = head

    def get_output_embeddings(self):
        return self.head


def test_only_a_plain_head_without_a_bias_is_replaced():
    plain, biased, wrapped = nn.Linear(4, 3, bias=False), nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
    wrapped.forward = wrapped.forward
    for head in (plain, biased, wrapped, None, nn.Identity()):
        replace_head(_Model(head))
    replace_head(object())
    assert type(plain) is OutputHead
    assert type(biased) is type(wrapped) is nn.Linear
