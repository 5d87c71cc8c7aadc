"""Tests of GPTQ's act-order as a lossless permutation.

Results are bit-identical to those of the layer whose channels are sorted by group.
"""

import contextlib
import ctypes
import threading

import pytest
import torch

from hfq.errors import CheckpointError
from hfq.formats.gptq import Gptq
from hfq.kernels.cpp import kernel, library
from hfq.kernels.cpp.layers import DTYPES, describe_layer
from tests.kernels.cpp.test_kernel import misplaced, random
from tests.kernels.cpp.test_kernel_tiles import kept_by_a_thread
from tests.support.kernel_layers import Case, multiply_together

SIZES = [
    (2, 64, 704, 304),
    (4, 32, 352, 40),
    (4, 176, 704, 1096),
    (4, 64, 448, 64),
    (8, 32, 96, 12),
    (8, 352, 704, 200),
]
"""(bits, group_size, in_features, out_features) of layers.

Some have many strips, or strips that end within a vector.
"""

ROWS = (1, 2, 3, 8, 17, 80, 129)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)[:, None]
    return (words[:, None] >> shifts & (1 << bits) - 1).flatten(0, 1)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)[:, None]
    return (codes.view(-1, 32 // bits, codes.shape[1]) << shifts).sum(1, dtype=torch.int32)


def twins(bits: int, group_size: int, in_features: int, out_features: int):
    """Returns (format, tensors) of a sorted layer and its scattered twin, and the permutation."""
    plain, tensors = Case(
        Gptq(bits, group_size, False, g_idx_length=in_features), in_features, out_features
    ).make()
    index = torch.randperm(in_features, generator=torch.Generator().manual_seed(in_features)) // group_size
    order = torch.empty_like(index)
    order[index.argsort(stable=True)] = torch.arange(in_features)
    scattered = {**tensors, "qweight": pack(unpack(tensors["qweight"], bits)[order], bits)}
    scattered["g_idx"] = index.to(torch.int32)
    return (plain, tensors), (plain.resolve("m", scattered), scattered), order


def compare(size: tuple[int, int, int, int]) -> None:
    (plain, tensors), (weight_format, scattered), order = twins(*size)
    assert (weight_format.act_order, plain.act_order) == (True, False)
    assert torch.equal(weight_format.dequantize(scattered), plain.dequantize(tensors)[:, order])
    for dtype in DTYPES:
        for rows in ROWS:
            given = random(rows, size[2], dtype=dtype, seed=rows)
            found, expected = (
                kernel.linear(given[:, order], scattered, weight_format),
                kernel.linear(given, tensors, plain),
            )
            if rows <= kernel.FUSED_ROWS[torch.bfloat16] or (
                dtype == torch.bfloat16 and is_tiled(weight_format, scattered)
            ):
                assert torch.equal(found, expected), (rows, dtype)


def is_tiled(weight_format, tensors) -> bool:
    return bool(
        library.library().hfq_is_tiled(
            describe_layer(weight_format, tensors).here, 17, DTYPES[torch.bfloat16]
        )
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("short", [0, 1, 2])
@pytest.mark.parametrize("level", [1, 9])
def test_each_bit_is_that_of_the_layer_in_order(native, size, short, level):
    native.hfq_use(level), native.hfq_use_short(short)
    compare(size)


@pytest.mark.parametrize(
    "short",
    [
        pytest.param(0, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2)),
    ],
)
def test_the_forms_for_other_processors_do_so_too(emulated, short):
    with library.use(emulated):
        emulated.hfq_use_short(short)
        for size in SIZES:
            compare(size)


@pytest.mark.parametrize("threads", [1, 3])
def test_layers_are_sorted_together_wherever_their_bytes_lie(native, threads, monkeypatch):
    made = [twins(4, 32, 352, 200)[1], twins(4, 32, 352, 200)[0], twins(8, 32, 352, 200)[1]]
    layers = [(misplaced(tensors, 5), weight_format) for weight_format, tensors in made]
    counts = [8, 1, 3]
    given = random(sum(counts), 352, dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = multiply_together(given, counts, layers)
    for result, part, (weight_format, tensors) in zip(
        found.split(counts), given.split(counts), made, strict=True
    ):
        assert torch.equal(result, kernel.linear(part, tensors, weight_format))


def test_sizes_that_do_not_match_are_left_to_torch(native):
    _, (weight_format, tensors), _ = twins(4, 32, 352, 40)
    layers = [(tensors, weight_format)] * 2
    for width in (351, 353):
        assert multiply_together(random(2, width), [1, 1], layers) is None
    with pytest.raises(RuntimeError):
        kernel.linear(random(2, 351), tensors, weight_format)


@pytest.mark.parametrize("is_uneven", [False, True])
@pytest.mark.parametrize("index", [-500, 40000])
def test_an_index_that_changes_while_it_is_read_is_never_followed(native, index, is_uneven):
    """One thread writes the index continuously, while others check it, sort, and multiply.

    Only checked indices may be followed.
    """
    _, (weight_format, tensors), _ = twins(4, 32, 2048, 64)
    if is_uneven:
        tensors["g_idx"][7] = tensors["g_idx"][8]
    right, ends, given = int(tensors["g_idx"][5]), threading.Event(), random(1, 2048)
    expected = kernel.linear(given, tensors, weight_format)
    changes = ctypes.cast(tensors["g_idx"].data_ptr(), ctypes.POINTER(ctypes.c_int32))

    def change() -> None:
        while not ends.is_set():
            changes[5] = index
            changes[5] = right

    writer = threading.Thread(target=change)
    writer.start()
    for _ in range(2000):
        with contextlib.suppress(CheckpointError):
            kernel.linear(given, tensors, weight_format)
    ends.set(), writer.join()
    assert torch.equal(kernel.linear(given, tensors, weight_format), expected)


def test_groups_that_are_not_whole_are_multiplied_code_by_code(native):
    _, (weight_format, tensors), _ = twins(4, 32, 352, 200)
    assert is_tiled(weight_format, tensors) == (native.hfq_use_short(-1) > 0)
    tensors["g_idx"] = torch.where(tensors["g_idx"] == 3, 4, tensors["g_idx"])
    weight, given = weight_format.dequantize(tensors), random(5, 352)
    assert not is_tiled(weight_format, tensors)
    assert torch.allclose(
        kernel.linear(given, tensors, weight_format), given @ weight.t(), rtol=0, atol=1e-4
    )  # sums have another order


@pytest.mark.parametrize("rows", [1, 64])
def test_what_a_thread_keeps_does_not_grow_with_the_weight(native, rows, monkeypatch):
    _, (weight_format, tensors), _ = twins(4, 32, 512, 1 << 14)
    given = random(rows, 512, dtype=torch.bfloat16)
    assert kept_by_a_thread(given, tensors, weight_format, monkeypatch) <= (4 << 20) + 16 * rows * (512 + 256)
