"""Blocks of GGUF that no other format holds: the error names the tensor, and no files are left."""

import errno
import os

import numpy as np
import pytest
import torch

from hfq import CheckpointError, FormatError
from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.gguf.header import read_gguf_header
from hfq.convert.read_layers import check_equal, read_layers
from hfq.convert.targets import TARGET_FORMATS
from tests.convert.test_gguf_file import convert, logits
from tests.loading.gguf.test_stored_floats import scalars, shape_of
from tests.support.checkpoint_files import refused, stored_bytes
from tests.support.gguf_files import random_blocks, write_gguf
from tests.support.gguf_models import make_model, write_model, write_random_llama
from tests.support.reshard_files import assert_nothing_left

DOWN = "model.layers.0.mlp.down_proj.weight"


def write(tmp_path, kind="Q8_0", **changed):
    """Writes a Llama of one type of blocks; `changed` maps a tensor in the file to its new entry."""
    folder = write_random_llama(tmp_path / "source", kind, layers=1)
    header = read_gguf_header(folder / "model.gguf")
    tensors = {
        name: (info.blocks.type, shape_of(info), stored_bytes(info)) for name, info in header.tensors.items()
    }
    write_gguf(folder / "model.gguf", scalars(header), tensors | changed)
    return folder


@pytest.mark.parametrize(
    ("kind", "to"),
    [("Q8_0", "gptq"), ("Q3_K", "pack-quantized"), ("Q4_0", "gptq_v2"), ("MXFP4", "mxfp4-pack-quantized")],
)
def test_blocks_are_read_once_for_a_plan_and_once_for_the_new_tensors(tmp_path, kind, to):
    checkpoint = Checkpoint.open(write_random_llama(tmp_path, kind, layers=1))
    reader = Reader(checkpoint)
    layers = [layer for name, layer in read_layers(checkpoint, {}, reader).items() if ".layers." in name]
    assert reader.counters.bytes_read == 0
    plans = [TARGET_FORMATS[to].plan(layer) for layer in layers]
    nbytes = sum(layer.infos["weight"].nbytes for layer in layers)
    assert reader.counters.bytes_read == nbytes
    for plan in plans:
        for tensor in plan.tensors.values():
            tensor.values(reader)
    assert reader.counters.bytes_read == 2 * nbytes


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_1", "IQ4_NL", "MXFP4"])
@pytest.mark.parametrize("to", ["pack-quantized", "gptq"])
def test_one_tensor_of_another_type_is_named_before_anything_is_written(tmp_path, kind, to):
    raw = random_blocks(kind, 256 * 512 // (256 if kind == "Q4_K" else 32), scale=0.01).tobytes()
    floats = {"token_embd.weight": ("F32", (64, 256), np.ones((64, 256), np.float32).tobytes())}
    source = write(tmp_path, **floats, **{"blk.0.ffn_down.weight": (kind, (256, 512), raw)})
    with refused("without loss. Nothing was written", f"found: {kind}", kind=FormatError, tensor=DOWN):
        convert(source, tmp_path / "to", to)
    assert_nothing_left(tmp_path)


def test_a_quantized_embedding_is_refused_for_gptq(tmp_path):
    with refused(
        "an unquantized embedding", "Convert to pack-quantized", tensor="model.embed_tokens", kind=FormatError
    ):
        convert(write(tmp_path), tmp_path / "to", "gptq")
    assert_nothing_left(tmp_path)


def test_a_scale_of_a_whole_layer_is_refused(tmp_path):
    extra = {"blk.0.ffn_down.scale": ("F32", (1,), np.float32(2).tobytes())}
    with refused("a scale of the whole layer", kind=FormatError, tensor=DOWN.replace("weight", "scale")):
        convert(write(tmp_path, **extra), tmp_path / "to", "pack-quantized")


def test_infinite_scales_and_exponents_that_mean_nan_are_refused(tmp_path):
    raw = random_blocks("Q8_0", 256 * 16)
    raw[5, :2] = np.array([np.inf], np.float16).view(np.uint8)
    changed = {"blk.0.ffn_down.weight": ("Q8_0", (256, 512), raw.tobytes())}
    with refused("finite scales", kind=FormatError, tensor=DOWN):
        convert(write(tmp_path, **changed), tmp_path / "to", "pack-quantized")
    raw = random_blocks("MXFP4", 256 * 16)
    raw[7, 0] = 255
    changed = {"blk.0.ffn_down.weight": ("MXFP4", (256, 512), raw.tobytes())}
    (tmp_path / "source" / "model.gguf").unlink()
    with refused("exponents of at most 254", kind=FormatError, tensor=DOWN):
        convert(write(tmp_path, "MXFP4", **changed), tmp_path / "to", "mxfp4-pack-quantized")
    assert_nothing_left(tmp_path)


def test_a_zero_of_another_sign_is_a_difference(tmp_path):
    layers, raw = [], random_blocks("Q8_0", 256 * 16)
    raw[0] = 0
    for name, scale in (("plus", 1), ("minus", -1)):
        raw[0, :2] = np.array([scale], np.float16).view(np.uint8)
        changed = {"blk.0.ffn_down.weight": ("Q8_0", (256, 512), raw.tobytes())}
        checkpoint = Checkpoint.open(write(tmp_path / name, **changed))
        found = read_layers(checkpoint, {}, Reader(checkpoint))
        layers.append(found[DOWN.removesuffix(".weight")])
    with refused("differs from the source's", kind=CheckpointError):
        check_equal(*layers)
    check_equal(layers[1], layers[1])


def test_mxfp4_alone_is_held_by_mxfp4(tmp_path):
    with refused("blocks of MXFP4", "found: Q8_0", kind=FormatError):
        convert(write(tmp_path), tmp_path / "to", "mxfp4-pack-quantized")


def test_layers_that_the_model_lacks_are_refused(tmp_path):
    extra = {"blk.2.nextn.eh_proj.weight": ("Q8_0", (1, 32), bytes(34))}
    keys = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    source = write_model(tmp_path / "source", "glm4moe", make_model("glm4moe"), extra=extra, metadata=keys)
    with refused("the codes of a quantized layer", kind=FormatError, tensor=next(iter(extra))):
        convert(source, tmp_path / "to", "pack-quantized")


def test_floats_that_the_model_has_transposed_are_refused(tmp_path):
    source = write_model(tmp_path / "source", "gpt2", make_model("gpt2"), ("Q8_0", "BF16", "F16"))
    with refused("the transpose, or fused experts", kind=FormatError):
        convert(source, tmp_path / "to", "pack-quantized")


def test_a_file_of_floats_is_refused(tmp_path):
    source = write_model(tmp_path / "source", "llama", make_model("llama"), ("F16",))
    with refused("is not quantized. Nothing was written", kind=FormatError):
        convert(source, tmp_path / "to", "pack-quantized")


def test_permuted_floats_are_written_in_the_order_of_the_model(tmp_path):
    source = write_model(
        tmp_path / "source", "llama-biased", make_model("llama-biased"), ("F16", "Q8_0", "BF16")
    )
    convert(source, tmp_path / "packed", "pack-quantized")
    assert torch.equal(logits(tmp_path / "packed"), logits(source))
    floats = [
        info for name, info in Checkpoint.open(tmp_path / "packed").tensors.items() if "q_proj.weight" in name
    ]
    assert {info.dtype for info in floats} & {"F16", "BF16"}


def test_a_taken_folder_and_a_full_disk_leave_things_as_they_are(tmp_path, monkeypatch):
    source = write(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("x")
    with refused("cannot be used", kind=CheckpointError):
        convert(source, tmp_path / "taken", "pack-quantized")
    written = []

    def full(descriptor):
        written.append(os.fstat(descriptor).st_size)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused("Nothing was left behind", "No space left on device", kind=CheckpointError):
        convert(source, tmp_path / "to", "pack-quantized")
    assert written[0] > 0
    assert_nothing_left(tmp_path, "taken")


def test_other_weights_in_the_folder_are_not_copied(tmp_path):
    source = write(tmp_path)
    (source / "mmproj-model.gguf").write_bytes(b"x")
    (source / "tokenizer.json").write_text("{}")
    report = convert(source, tmp_path / "to", "pack-quantized")
    assert report.left_out == ("mmproj-model.gguf",)
    assert {file.name for file in (tmp_path / "to").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
