"""Embeddings in a file are read by row: the bytes of the distinct tokens and no others, through subclasses
too.
"""

import functools
import gc
import inspect

import pytest
import torch
from torch import nn

from hfq.checkpoint import Checkpoint, Reader, write_safetensors
from hfq.checkpoint.direct_io import DirectFiles
from hfq.errors import CheckpointError, SetupError
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.offload.copy_stream import copy_stream_to
from hfq.offload.embedding_rows import EmbeddingTable, can_read_rows
from hfq.offload.offloader import Offloader
from hfq.offload.reader_threads import Pool
from hfq.offload.unit import OffloadUnit, UnquantizedParameter

ROWS, SIZE = 300, 10


class Scaled(nn.Embedding):
    """As Gemma's: what `nn.Embedding` gives, times a factor."""

    def forward(self, tokens):
        return super().forward(tokens) * 3.0


class Normed(nn.Embedding):
    """Reads its whole weight."""

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight / self.weight.norm())


def passed_on(forward):
    @functools.wraps(forward)
    def wrapped(*args):
        return forward(*args)

    return wrapped


class Wrapped(nn.Embedding):
    """Reads its whole weight behind a decorator."""

    @passed_on
    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight * 2)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def table(request, tmp_path):
    """(weight, checkpoint): the weight as it is stored, at an odd offset."""
    weight = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(0)).to(request.param)
    flat = weight.reshape(-1).view(torch.uint8).numpy().tobytes()
    stored = {
        "before": ("U8", (3,), b"abc"),
        "embed.weight": (safetensors_dtype(weight.dtype), (ROWS, SIZE), flat),
    }
    write_safetensors(tmp_path / "model.safetensors", stored)
    return weight, Checkpoint.open(tmp_path)


def offloaded(table, cls=nn.Embedding, dtype=None, **options):
    """(module on disk, the same in memory, its streamer, its reader)."""
    weight, checkpoint = table
    dtype = dtype or weight.dtype
    resident = cls(ROWS, SIZE, _weight=weight.to(dtype), **options)
    module = cls(ROWS, SIZE, device="meta", dtype=dtype, **options)
    module.weight.requires_grad_(False)
    resident.weight.requires_grad_(False)
    weight = UnquantizedParameter(module, "weight", checkpoint.tensors["embed.weight"])
    reader = Reader(checkpoint)
    return module, resident, Offloader([OffloadUnit("embed", module, (), (weight,))], reader, "cpu"), reader


def tokens_of(*numbers: int) -> torch.Tensor:
    return torch.tensor([numbers])


@pytest.mark.parametrize(
    "tokens",
    [
        tokens_of(5),
        tokens_of(0, ROWS - 1),
        tokens_of(7, 7, 3, 7),
        torch.arange(64),
        torch.arange(65),
        torch.arange(ROWS).view(3, -1),
    ],
    ids=lambda tokens: str(tokens.numel()),
)
def test_rows_are_those_of_the_table_and_each_is_read_once(table, tokens):
    module, resident, offloader, reader = offloaded(table)
    assert torch.equal(module(tokens), resident(tokens))
    assert reader.counters.bytes_read == len(set(tokens.flatten().tolist())) * SIZE * table[0].element_size()
    assert offloader.units == ()
    assert offloader.buffer_nbytes == 0
    assert module.weight.is_meta


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_of_any_shape_and_integer_dtype(table, shape, dtype):
    module, resident, _, _ = offloaded(table)
    tokens = torch.full(shape, 9, dtype=dtype)
    assert torch.equal(module(tokens), resident(tokens))
    assert module(tokens).shape == (*shape, SIZE)


def test_rows_are_cast_to_the_dtype_of_the_model(table):
    module, resident, _, _ = offloaded(table, dtype=torch.float16)
    tokens = tokens_of(1, 2, 299)
    assert module(tokens).dtype == torch.float16
    assert torch.equal(module(tokens), resident(tokens))


def test_a_padding_token_is_looked_up_like_any_other(table):
    module, resident, _, _ = offloaded(table, padding_idx=2)
    assert torch.equal(module(tokens_of(2, 3)), resident(tokens_of(2, 3)))


def test_many_rows_are_read_by_the_pool_and_few_are_not(table):
    weight, checkpoint = table
    pool = Pool(2)
    submitted = []
    pool.submit = lambda ticket, submit=pool.submit: submitted.append(ticket) or submit(ticket)
    module = nn.Embedding(ROWS, SIZE, device="meta", dtype=weight.dtype)
    parameter = UnquantizedParameter(module, "weight", checkpoint.tensors["embed.weight"])
    files, copy_stream = DirectFiles(Reader(checkpoint)), copy_stream_to(torch.device("cpu"))
    lookup = EmbeddingTable("embed", parameter, copy_stream, files, pool)
    assert torch.equal(lookup.look_up(torch.arange(64)), weight[:64])
    assert submitted == []
    assert torch.equal(lookup.look_up(torch.arange(65)), weight[:65])
    assert len(submitted) == 1
    pool.close()


def test_a_subclass_that_asks_its_parent_is_read_by_row_and_stays_what_it_is(table):
    module, resident, _, reader = offloaded(table, Scaled)
    tokens = tokens_of(4, 4, 200)
    assert torch.equal(module(tokens), resident(tokens))
    assert reader.counters.bytes_read == 2 * SIZE * table[0].element_size()
    assert isinstance(module, Scaled)
    assert type(module).__name__ == "Scaled"
    assert list(inspect.signature(module.forward).parameters) == ["tokens"]


@pytest.mark.parametrize("cls", [Normed, Wrapped])
def test_a_subclass_that_reads_its_weight_is_streamed_whole(table, cls):
    module, resident, offloader, reader = offloaded(table, cls)
    tokens = tokens_of(4, 200)
    assert torch.equal(module(tokens), resident(tokens))
    assert len(offloader.units) == 1
    assert reader.counters.bytes_read >= table[0].nbytes
    assert module.weight.is_meta


def test_what_needs_the_whole_table_is_not_read_by_row(table):
    info = table[1].tensors["embed.weight"]
    plain = nn.Embedding(ROWS, SIZE)
    assert can_read_rows(UnquantizedParameter(plain, "weight", info))
    assert not can_read_rows(UnquantizedParameter(nn.Embedding(ROWS, SIZE, max_norm=1.0), "weight", info))
    assert not can_read_rows(UnquantizedParameter(nn.Embedding(ROWS + 1, SIZE), "weight", info))
    assert not can_read_rows(UnquantizedParameter(nn.Linear(SIZE, ROWS), "weight", info))
    plain.extra = nn.Parameter(torch.zeros(1))
    assert not can_read_rows(UnquantizedParameter(plain, "weight", info))


@pytest.mark.parametrize(
    ("numbers", "found"), [((0, ROWS), f"0 to {ROWS}"), ((-1, 5), "-1 to 5"), ((10**9,), "1000000000")]
)
def test_a_token_out_of_range_is_named(table, numbers, found):
    module, _, _, reader = offloaded(table)
    with pytest.raises(SetupError, match=rf"(?s)embed.*0 to {ROWS - 1}.*{found}"):
        module(tokens_of(*numbers))
    assert reader.counters.bytes_read == 0


def test_a_table_outlives_whoever_else_knew_its_streamer(table):
    module, resident, offloader, _ = offloaded(table)
    del offloader
    gc.collect()
    many = torch.arange(ROWS)
    assert torch.equal(module(many), resident(many))


@pytest.mark.parametrize("count", [3, 200])
def test_a_truncated_file_is_a_named_error_and_nothing_hangs(table, tmp_path, count):
    module, _, _, _ = offloaded(table)
    module(tokens_of(1))
    with (tmp_path / "model.safetensors").open("r+b") as stream:
        stream.truncate(500)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="changed while the model was using it"):
            module(torch.arange(ROWS - count, ROWS))
