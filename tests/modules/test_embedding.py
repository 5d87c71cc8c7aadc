"""QuantizedEmbedding looks up what nn.Embedding would in the dequantized table, and dequantizes no more rows
than it needs.
"""

import pytest
import torch
from torch import nn

from hfq import SetupError
from hfq.formats.awq import Awq
from hfq.formats.bitsandbytes import Bnb4Bit, BnbInt8
from hfq.formats.compressed_tensors import PackQuantized
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.formats.hqq import Hqq
from hfq.modules.embedding import QuantizedEmbedding
from hfq.modules.flat_buffer import FlatBuffer, map_tensors
from tests.support import tiny_models

FORMATS = {
    "fp8": Fp8(strategy="channel"),
    "gptq": Gptq(4, 32, False, "stored", g_idx_length=64),
    "awq": Awq(group_size=32),
    "int8": BnbInt8(scale_shape=(2,)),
    "pack-quantized asym": PackQuantized(num_bits=4, scale_shape=(1, 2), is_symmetric=False),
    "hqq": Hqq(num_bits=3, group_size=64),
}
SIZES = {"nf4 of an odd size": (Bnb4Bit(), (37, 33))} | {
    name: (weight_format, (96, 64)) for name, weight_format in FORMATS.items()
}
TOKENS = [
    torch.tensor([3]),
    torch.tensor(36),
    torch.tensor([[0, 36, 1], [1, 1, 0]]),
    torch.arange(36, -1, -1),
    torch.randint(0, 37, (2, 3, 4), generator=torch.Generator().manual_seed(1)),
    torch.tensor([5, 5], dtype=torch.int32),
]


@pytest.fixture(params=SIZES)
def table(request, store):
    """(a packed table, the dequantized one, its infos, its reader)."""
    weight_format, size = SIZES[request.param]
    tensors = weight_format.quantize(torch.randn(*size, generator=torch.Generator().manual_seed(2)))
    config = (
        {"quant_method": "awq", "group_size": 32}
        if request.param == "awq"
        else {"checkpoint_format": "gptq_v2", "sym": False}
    )
    found = tiny_models.settled(
        weight_format, tensors, config if request.param in ("awq", "gptq") else None, size
    )
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))  # all aligned
    infos, reader = store(tensors)
    module = QuantizedEmbedding("model.embed_tokens", *size, found, infos)
    module.hold(map_tensors(reader, infos))
    return module, found.dequantize(tensors), infos, reader


@pytest.mark.parametrize("tokens", TOKENS, ids=lambda tokens: str(list(tokens.shape)))
def test_a_look_up_is_that_of_the_dequantized_table(table, tokens):
    module, weight, _, _ = table
    found = module(tokens)
    assert found.shape == (*tokens.shape, weight.shape[1])
    assert torch.equal(found, nn.functional.embedding(tokens, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_rounded_once_to_the_dtype_of_the_model(table, dtype):
    module, weight, _, _ = table
    assert torch.equal(module.to(dtype)(TOKENS[2]), nn.functional.embedding(TOKENS[2], weight.to(dtype)))


def test_an_arena_gives_the_same_rows(table):
    module, weight, infos, reader = table
    module.hold_buffer(FlatBuffer.read(reader, infos))
    assert torch.equal(module(TOKENS[3]), weight[TOKENS[3]])


def test_every_row_is_the_row_of_its_token(table):
    module, weight, _, _ = table
    assert torch.equal(module(torch.arange(len(weight))), weight)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
def test_no_tokens_are_no_rows(table, shape):
    module, weight, _, _ = table
    assert module(torch.empty(shape, dtype=torch.int64)).shape == (*shape, weight.shape[1])


@pytest.mark.parametrize("token", [-1, 1000, 2**40, -(2**63)])
def test_a_token_out_of_range_is_refused(table, token):
    module, weight, _, _ = table
    with pytest.raises(
        SetupError, match=rf"(?s)model.embed_tokens received a token.*0 to {len(weight) - 1}.*Fix:"
    ):
        module(torch.tensor([0, token]))


def test_the_first_token_behind_the_table_is_out_of_range(table):
    module, weight, _, _ = table
    with pytest.raises(SetupError, match="outside of its table"):
        module(torch.tensor([len(weight)]))


def test_a_row_is_dequantized_once_and_no_others_with_it(table, monkeypatch):
    module, weight, _, _ = table
    panels, real = [], type(module.weight_format).dequantize_into
    noting = lambda self, panel, tensors, start: (  # noqa: E731
        panels.append((start, len(panel))) or real(self, panel, tensors, start)
    )
    monkeypatch.setattr(type(module.weight_format), "dequantize_into", noting)
    multiple = module.weight_format.row_multiple
    module(torch.tensor([[33, 2], [2, 33]]))
    starts = sorted({2 // multiple * multiple, 33 // multiple * multiple})
    assert panels == [(start, min(multiple, len(weight) - start)) for start in starts]


def test_the_weight_that_is_read_is_the_whole_table(table):
    module, weight, _, _ = table
    assert torch.equal(module.weight, weight)
    assert (module.num_embeddings, module.embedding_dim) == tuple(weight.shape)


def test_a_table_that_rests_on_disk_is_read_by_fetching(table):
    module, weight, infos, reader = table
    elsewhere = QuantizedEmbedding("model.embed_tokens", *weight.shape, module.weight_format, infos)
    elsewhere.fetch = lambda: FlatBuffer.read(reader, infos).tensors()
    assert all(parameter.is_meta for parameter in elsewhere.parameters())
    assert torch.equal(elsewhere(TOKENS[2]), weight[TOKENS[2]])
