"""`reshard_checkpoint`: the same tensors with one aligned range per block, whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import hfq
from hfq.checkpoint import Checkpoint, read_header
from hfq.checkpoint import write_checkpoint as writing
from hfq.checkpoint.reshard import reshard_checkpoint
from tests.support import tiny_models
from tests.support.checkpoint_files import write_shards
from tests.support.reshard_files import ODD, assert_nothing_left, assert_packed, made_up

SIZES = {"U8": 1, "F32": 4, "I64": 8, "BF16": 2}
EXPERT = [
    ("up.weight", "U8", (4, 8)),
    ("up.scale", "BF16", (3,)),
    ("down.weight", "U8", (5, 8)),
    ("down.scale", "F32", ()),
]


@pytest.fixture
def odd(tmp_path):
    return made_up(tmp_path / "source", ODD, {"format": "pt", "note": "ü"})


def shards_of(folder):
    """The tensors of each shard, in the order of their bytes."""
    headers = Checkpoint.open(folder).headers
    return {
        Path(file).name: [
            i.name for i in sorted(h.tensors.values(), key=lambda i: (i.range.offset, i.nbytes))
        ]
        for file, h in headers.items()
    }


@pytest.mark.parametrize("name", ["tiny-llama-gptq", "tiny-llama-fp8"])
def test_a_packed_model_is_the_same_for_every_reader(tmp_path, name):
    source, target = tiny_models.DATA / name, tmp_path / "packed"
    report = reshard_checkpoint(Checkpoint.open(source), target)
    assert_packed(source, target)
    shards = shards_of(target)
    for layer in range(4):
        (file,) = [
            file
            for file, names in shards.items()
            if any(n.startswith(f"model.layers.{layer}.") for n in names)
        ]
        assert all(n.startswith(f"model.layers.{layer}.") for n in shards[file])
    assert report.decoder_layers == 4
    assert report.files == len(list(target.iterdir()))
    assert report.nbytes == sum(file.stat().st_size for file in target.iterdir())
    with safe_open(source / "model.safetensors", "pt") as file:
        expected = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    for shard, names in shards.items():
        with safe_open(target / shard, "pt") as file:
            assert file.metadata() == metadata
            assert sorted(file.keys()) == sorted(names)
            for key in names:
                assert torch.equal(
                    file.get_tensor(key).view(torch.uint8), expected.pop(key).view(torch.uint8)
                )
    assert not expected


@pytest.mark.parametrize(
    ("name", "home"),
    [(f"tiny-llama-{kind}", home) for kind in ("gptq", "fp8") for home in ("cpu", "disk")]
    + [("tiny-llama", None)],
)
def test_from_pretrained_gives_the_same_logits(tmp_path, name, home):
    """With hfq, and without it for the checkpoint that is not quantized."""
    source, target = tiny_models.DATA / name, tmp_path / "packed"
    reshard_checkpoint(Checkpoint.open(source), target)
    tokens, found = torch.tensor([[1, 5, 9, 30]]), []
    options = {"quantization_config": hfq.HfqConfig(), "device_map": {"": home}} if home else {}
    for path in (source, target):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
        with torch.no_grad():
            found.append(model(tokens).logits)
    assert torch.equal(*found)


def test_odd_sizes_are_aligned_and_identical(tmp_path, odd):
    report = reshard_checkpoint(odd, tmp_path / "packed")
    assert_packed(odd.root, tmp_path / "packed")
    shards = shards_of(tmp_path / "packed")
    assert list(shards) == [f"model-{n:05d}-of-00005.safetensors" for n in range(1, 6)]
    rest, encoder, head, second, tenth = shards.values()
    assert sorted(rest) == ["lone", "weights.0"]
    assert encoder == ["encoder.h.0.x"]
    assert sorted(head) == ["lm_head.bias", "lm_head.weight"]
    assert {name.split(".")[2] for name in second} == {"2"}
    assert {name.split(".")[2] for name in tenth} == {"10"}
    assert report.decoder_layers == 3
    assert all(
        header.metadata == {"format": "pt", "note": "ü"}
        for header in Checkpoint.open(tmp_path / "packed").headers.values()
    )


def test_a_modules_tensors_lie_together_in_the_order_of_the_source(tmp_path):
    tensors = [(f"h.0.{module}.{local}", *spec) for local, *spec in EXPERT[:2] for module in ("c", "a", "b")]
    tensors += [("h.0.norm.weight", "F32", (8,))]
    source = made_up(tmp_path / "source", tensors)
    reshard_checkpoint(source, tmp_path / "packed")
    ((_, names),) = shards_of(tmp_path / "packed").items()
    expected = [
        "h.0.norm.weight",
        *(f"h.0.{m}.{local}" for m in "cab" for local in ("up.weight", "up.scale")),
    ]
    assert names == expected
    offsets = {name: info.range.offset for name, info in Checkpoint.open(tmp_path / "packed").tensors.items()}
    assert offsets["h.0.norm.weight"] % 16 == 0  # a unit whose sizes 16 divides


def test_each_routed_expert_is_one_range(tmp_path):
    tensors = [
        (f"model.layers.0.mlp.experts.{n}.{local}", *spec) for local, *spec in EXPERT for n in range(12)
    ]
    tensors += [
        ("model.layers.0.mlp.gate.weight", "F32", (12,)),
        ("model.layers.0.mlp.shared.bias", "U8", (3,)),
    ]
    source = made_up(tmp_path / "source", sorted(tensors, key=lambda tensor: -SIZES[tensor[1]]))
    reshard_checkpoint(source, tmp_path / "packed")
    assert_packed(source.root, tmp_path / "packed")
    infos = Checkpoint.open(tmp_path / "packed").tensors
    for expert in range(12):
        # 6 bytes of a scale beside a float32 scalar are the one thing that may lie apart
        own = [i for n, i in infos.items() if f".experts.{expert}." in n and not n.endswith("up.scale")]
        start, end = min(i.range.offset for i in own), max(i.range.offset + i.nbytes for i in own)
        assert end - start == sum(i.nbytes for i in own)


def test_shards_of_the_source_are_joined_by_block(tmp_path):
    write_shards(
        tmp_path / "source",
        {"a.safetensors": {"h.0.b": [1.0, 2.0], "h.1.a": [3.0]}, "b.safetensors": {"h.0.a": [4], "x": [5]}},
    )
    reshard_checkpoint(Checkpoint.open(tmp_path / "source"), tmp_path / "packed")
    assert_packed(tmp_path / "source", tmp_path / "packed")
    assert [sorted(names) for names in shards_of(tmp_path / "packed").values()] == [
        ["x"],
        ["h.0.a", "h.0.b"],
        ["h.1.a"],
    ]
    index = json.loads((tmp_path / "packed" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 28}
    assert index["weight_map"]["h.1.a"] == "model-00003-of-00003.safetensors"


def test_packing_twice_gives_the_same_bytes(tmp_path, odd):
    for name in ("one", "two"):
        reshard_checkpoint(odd, tmp_path / name)
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two


def test_large_tensors_are_copied_in_chunks_and_told_of(tmp_path, odd, monkeypatch):
    monkeypatch.setattr(writing, "_CHUNK_NBYTES", 100_000)
    told = []
    reshard_checkpoint(odd, tmp_path / "packed", told.append)
    assert_packed(odd.root, tmp_path / "packed")
    assert max(told) == 100_000
    assert sum(told) == sum(info.nbytes for info in odd.tensors.values())


def test_other_files_are_copied_but_for_pickles_indices_and_folders(tmp_path, odd):
    source = Path(odd.root)
    copied = {"config.json": b"{}", "tokenizer.model": b"\0\1", "empty.txt": b"", ".gitattributes": b"*"}
    left = ["a.bin", "b.PT", "c.pth", "d.ckpt", "e.pkl", "other.safetensors"]
    for name, data in copied.items():
        (source / name).write_bytes(data)
    for name in (*left, "pytorch_model.bin.index.json", "model.safetensors.index.fp16.json"):
        (source / name).write_bytes(b"x")
    (source / "folder").mkdir()
    report = reshard_checkpoint(odd, tmp_path / "packed")
    found = {f.name: f.read_bytes() for f in (tmp_path / "packed").iterdir()}
    assert {name: data for name, data in found.items() if not name.startswith("model")} == copied
    assert list(report.left_out) == sorted([*left, "folder"])
    assert report.files == len(found)


def test_links_of_the_hub_cache_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "source" / "snapshots" / "1", tmp_path / "source" / "blobs"
    snapshot.mkdir(parents=True)
    made_up(blobs, ODD)
    (blobs / "c").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/model.safetensors")
    (snapshot / "config.json").symlink_to("../../blobs/c")
    reshard_checkpoint(Checkpoint.open(snapshot), tmp_path / "packed")
    assert_packed(snapshot, tmp_path / "packed")
    assert not any(file.is_symlink() for file in (tmp_path / "packed").iterdir())


def test_an_empty_folder_is_taken(tmp_path, odd):
    (tmp_path / "packed").mkdir()
    reshard_checkpoint(odd, tmp_path / "packed")
    assert_packed(odd.root, tmp_path / "packed")
    assert_nothing_left(tmp_path, "packed")


def test_a_checkpoint_without_metadata_gets_none(tmp_path):
    reshard_checkpoint(made_up(tmp_path / "source", [("a.0.b", "U8", (2,))]), tmp_path / "packed")
    assert read_header(tmp_path / "packed" / "model-00001-of-00001.safetensors").metadata == {}
