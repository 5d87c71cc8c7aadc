"""Blocks of every type decode to ggml's own bits."""

import hashlib

import numpy as np
import pytest
import torch

from hfq.checkpoint.gguf.block_types import BLOCK_TYPES, block_type
from hfq.formats.codecs.ggml.blocks import DECODERS, decode_into
from tests.support import ggml_library
from tests.support.gguf_files import IDS, random_blocks

DIGESTS = {
    "Q4_0": "c9657168b82a22e2c0dcd8e3041ca4670958f431601b659cb76e9bc55e3be706",
    "Q4_1": "abf9334fb6d2c47de16c89748d0f114c931f480808af41700a41fd0e74306af9",
    "Q5_0": "eb9a2598afa43d82fd9a030f4b1dd8e09a1c3ca45fd4e813a9d7c942b2faa464",
    "Q5_1": "b61243aa60b8c6ce7a0760192c5512f954da2c8a0aba9b4611010a639b5c9a46",
    "Q8_0": "2c303612b1b8026391e572c5610f2290ef29c2c4922b610b6b5682bca42fb5cc",
    "Q2_K": "f0618350a79bd570410517db1d2ab224c523b971275c3d7b6511762247650b53",
    "Q3_K": "9eedbe431d4ab0730fd6d33720807ad3809f4e682683ba9da72486eee530a5e5",
    "Q4_K": "9c6a1999e7af979c99b7b6b306961ff296d84a1472d640142034bbf3bc5c2da7",
    "Q5_K": "d45c72441c5262318a7c5d1bbbb5d558a00dd8ce47b1275fc699c06e47eac39b",
    "Q6_K": "3cf8eb1cdc67a61af52ba11046eb5f1719c081975f562306491c4fde63e774f6",
    "IQ2_XXS": "9815b3ec0bf66ce80fdf7183464a999ce00ed5ad5727cd81119ab34c5e05005d",
    "IQ2_XS": "ec448d0ced20d3a4142555d146be840ff57aabd9c0393d71d3f61ed7c271fd6f",
    "IQ3_XXS": "e306c304fca03880e94e6c55232824aada59f841e78b71c34fce18c021027070",
    "IQ1_S": "31736df821f702ee0cd70eac3c245623a1ec156e992c2b826b108da8f3193adc",
    "IQ4_NL": "dd50429f135bcbec01fb9c1a73322fc82d8ecdc109366f28e0f67860a68c8b02",
    "IQ3_S": "c9018a3a3584cb724eb91fc8eb11a6a6197a601fa233657d0af36c88d584aa6b",
    "IQ2_S": "27d1812d2413047563e314206e66c9d84bac04da9707c908cf613aa738ef7cbe",
    "IQ4_XS": "caba9761c61c40951024732d15940edf60bc773b9f6f26310fe7fcff7b8177e5",
    "IQ1_M": "9191a33b9f0570419508eb40578ede91794d7fc9cdc1052bd298a89462b94f99",
    "TQ1_0": "65d5c6cf2d5f0cd9ecc5127867d34f46c0e95300509481d34beadad49f22178b",
    "TQ2_0": "d358a087b91d51efadb1cc10bcca0803e76be4887d82705d95790f394fa898b3",
    "MXFP4": "674b9beca7a7069a6ad98b4c3884708000aa58370b205819e9bb4c46bc898122",
    "NVFP4": "2ca209f3fb04772fb272c7a1c26e44e3a98090471a4ab1ebdea0b229ca7edfae",
    "Q1_0": "a1cf021fbf12873d9ed150da9d52f1c1f7fe93ca3e513e9df146c86b9d7bf28b",
    "Q2_0": "0dfcf5d8324e0be92984c84fd2dfafa9a349e823e9f7fd4f2b3e79ad9a3ba659",
}
"""SHA-256 of the float32 values of 64 blocks as libggml 0.20.2 dequantizes them (`ggml_get_type_traits`)."""


def decoded(name, blocks):
    """Returns the values of blocks in one row each."""
    kind = block_type(name)
    panel = torch.full((len(blocks), kind.size), float("nan"))
    decode_into(panel, torch.from_numpy(blocks), name, kind.nbytes)
    return panel


def test_every_type_of_blocks_is_decoded():
    assert (
        DIGESTS.keys()
        == DECODERS.keys()
        == {kind.name for kind in BLOCK_TYPES.values() if kind.dtype == "U8"}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", DIGESTS)
def test_values_are_those_of_ggml_under_every_default_dtype(name, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        kind = block_type(name)
        panel = torch.full((16, 4 * kind.size), float("nan"), dtype=torch.float32)
        rows = torch.from_numpy(random_blocks(name, 64)).view(16, -1)
        decode_into(panel, rows, name, kind.nbytes)
    finally:
        torch.set_default_dtype(before)
    assert hashlib.sha256(panel.numpy().tobytes()).hexdigest() == DIGESTS[name]


@pytest.mark.parametrize("name", DIGESTS)
@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_blocks_may_lie_at_any_address(name, offset):
    kind, blocks = block_type(name), random_blocks(name, 3)
    memory = torch.zeros(blocks.size + offset, dtype=torch.uint8)
    memory[offset:] = torch.from_numpy(blocks).flatten()
    expected = decoded(name, blocks)
    for count in (1, 3):
        panel = torch.empty(count, kind.size)
        decode_into(panel, memory[offset : offset + count * kind.nbytes].view(count, -1), name, kind.nbytes)
        assert torch.equal(panel, expected[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_are_widened(dtype):
    name = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    panel = torch.empty(3, 5)
    decode_into(panel, rows, name, rows.element_size())
    assert torch.equal(panel, rows.float())


def assert_same_bits(found, expected):
    """Checks that values are equal, and that zeros have the same sign and NaN is at the same places."""
    found, expected = found.ravel(), np.ascontiguousarray(expected, np.float32).ravel()
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), is_nan)
    assert np.array_equal(found[~is_nan].view(np.uint32), expected[~is_nan].view(np.uint32))


def any_blocks(name):
    """Returns blocks of random bytes, with scales that are not finite among them."""
    return np.random.default_rng(0).integers(0, 256, (2000, block_type(name).nbytes), np.uint8)


@pytest.mark.peers
@pytest.mark.skipif(not ggml_library.is_installed(), reason="no ggml is installed")
@pytest.mark.parametrize("name", DIGESTS)
def test_random_bytes_decode_as_by_ggml(name):
    blocks = any_blocks(name)
    assert_same_bits(decoded(name, blocks).numpy(), ggml_library.dequantize(name, blocks))


@pytest.mark.parametrize("name", [name for name in DIGESTS if IDS[name] < 41])
def test_random_bytes_decode_as_by_gguf(name):
    gguf = pytest.importorskip("gguf")
    blocks = any_blocks(name)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert_same_bits(decoded(name, blocks).numpy(), expected)


@pytest.mark.parametrize("name", DIGESTS)
def test_random_bytes_decode_as_by_transformers(name):
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")
    if IDS[name] not in dequant.GGML_BLOCK:
        pytest.skip(f"transformers has no {name}")
    blocks = any_blocks(name)
    found = dequant.dequantize(torch.from_numpy(blocks), IDS[name], torch.float32)
    assert_same_bits(decoded(name, blocks).numpy(), found.numpy())
