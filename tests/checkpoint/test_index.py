"""`Checkpoint`: which file holds which tensor, for every layout of a folder, and what is refused by name."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from hfq.checkpoint import Checkpoint, HeaderLimits
from tests.support import programs
from tests.support.checkpoint_files import entry, refused, write_raw, write_shards

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = {FIRST: {"a": [1.0], "b": [2.0, 3.0]}, SECOND: {"c": [4]}}


@pytest.fixture
def sharded(tmp_path):
    return write_shards(tmp_path / "sharded", SHARDS)


def hub_cache(tmp_path):
    """(snapshot, blobs) of a hub cache: models--o--n/snapshots/<revision>, models--o--n/blobs."""
    repository = tmp_path / "models--o--n"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": torch.ones(2)}, blobs / "f00")
    return snapshot, blobs


def test_a_single_file_is_found(folder, checkpoint):
    path = str(folder / "model.safetensors")
    assert (checkpoint.root, list(checkpoint.headers), checkpoint.config) == (str(folder), [path], {})
    assert {name: str(info) for name, info in checkpoint.tensors.items()} == {
        "big": "U8 [512, 512]",
        "small": "F32 [16]",
        "tiny": "BF16 [1]",
    }
    assert checkpoint.nbytes == os.path.getsize(path)


def test_a_single_file_wins_over_an_index(folder):
    write_shards(folder, SHARDS)
    assert Checkpoint.open(folder).tensors.keys() == {"big", "small", "tiny"}


def test_shards_are_found_by_their_index(sharded):
    checkpoint = Checkpoint.open(str(sharded))
    files = {name: info.range.file for name, info in checkpoint.tensors.items()}
    assert files == {"a": str(sharded / FIRST), "b": str(sharded / FIRST), "c": str(sharded / SECOND)}
    assert checkpoint.nbytes == sum(os.path.getsize(sharded / file) for file in (FIRST, SECOND))


def test_shards_may_lie_in_folders_below(tmp_path):
    (tmp_path / "part").mkdir()
    write_shards(tmp_path, {"part/x.safetensors": {"a": [1.0]}, "y.safetensors": {"b": [1.0]}})
    assert Checkpoint.open(tmp_path).tensors["a"].range.file == str(tmp_path / "part" / "x.safetensors")


def test_a_variant_is_found_and_only_when_it_is_asked_for(folder, sharded):
    os.rename(folder / "model.safetensors", folder / "model.fp16.safetensors")
    os.rename(sharded / INDEX, sharded / "model.safetensors.index.fp16.json")
    for path in (folder, sharded):
        assert len(Checkpoint.open(path, variant="fp16").tensors) == 3
        with refused("holds no checkpoint", file=path):
            Checkpoint.open(path)


def test_limits_hold_for_each_header(folder):
    with refused("too many tensors", file=folder / "model.safetensors"):
        Checkpoint.open(folder, limits=HeaderLimits(tensors=2))


def test_a_missing_shard_is_named(sharded):
    os.unlink(sharded / SECOND)
    with refused(f"Shard {SECOND} is missing.", "hf download ORG/MODEL.", file=sharded / SECOND):
        Checkpoint.open(sharded)


def test_a_gguf_file_that_does_not_exist_is_answered_by_the_nearest_names(tmp_path):
    names = ["a.gguf", "tiny-q8_0.gguf", "tiny-q4-00001-of-00002.gguf", "tiny-q4-00002-of-00002.gguf"]
    typo = tmp_path / "tiny-q8_1.gguf"
    with refused("There is no such GGUF file.", "found: no GGUF file", "Fix: Check the path.", file=typo):
        Checkpoint.open(typo)
    for name in names:
        (tmp_path / name).touch()
    found = "found: tiny-q8_0.gguf, tiny-q4-00001-of-00002.gguf, a.gguf\n"
    with refused("There is no such GGUF file.", found, f"or {tmp_path}/tiny-q8_0.gguf on the", file=typo):
        Checkpoint.open(typo)
    (tmp_path / names[-1]).unlink()
    with refused(f"Shard {names[-1]} is missing.", file=tmp_path / names[-1]):
        Checkpoint.open(tmp_path / names[-2])


@pytest.mark.parametrize("dangles", [False, True])
def test_a_missing_shard_of_the_hub_cache_names_the_repository(tmp_path, dangles):
    snapshot = tmp_path / "models--org--some-model" / "snapshots" / "abc"
    write_shards(snapshot, SHARDS)
    (snapshot / SECOND).unlink()
    if dangles:
        (snapshot.parent.parent / "blobs").mkdir()
        (snapshot / SECOND).symlink_to("../../blobs/f00")
    command = "download it again with hf download org/some-model --revision abc"
    with refused(f"Shard {SECOND} is missing.", command, file=snapshot / SECOND):
        Checkpoint.open(snapshot)


def test_a_damaged_shard_is_named(sharded):
    os.truncate(sharded / SECOND, 20)
    with refused("ends inside its header", file=sharded / SECOND):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        (
            {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND},
            f"d: the index says {SECOND}, the shards say nothing",
        ),
        ({"a": FIRST, "c": SECOND}, f"b: the index says nothing, the shards say {FIRST}"),
        ({"a": FIRST, "b": SECOND, "c": SECOND}, f"b: the index says {SECOND}, the shards say {FIRST}"),
    ],
)
def test_an_index_and_its_shards_must_agree(tmp_path, weight_map, words):
    with refused("index and the shards disagree", words, file=tmp_path / INDEX):
        Checkpoint.open(write_shards(tmp_path, SHARDS, weight_map))


def test_a_shard_that_the_index_does_not_mention_is_no_part_of_the_checkpoint(tmp_path):
    path = write_shards(tmp_path, SHARDS, {"a": FIRST, "b": FIRST})
    assert Checkpoint.open(path).tensors.keys() == {"a", "b"}


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shards = {FIRST: {"a": [1.0]}, SECOND: {"a": [1.0]}}
    with refused("Two shards hold the same tensor", FIRST, file=tmp_path / SECOND, tensor="a"):
        Checkpoint.open(write_shards(tmp_path, shards, {"a": FIRST, "b": SECOND}))


@pytest.mark.parametrize("weight_map", [None, {}, [], "x", {"a": 1}, {"a": None}, {"a": [FIRST]}])
def test_an_index_without_a_usable_weight_map_is_refused(tmp_path, weight_map):
    write_shards(tmp_path, SHARDS)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with refused("no usable weight_map", file=tmp_path / INDEX):
        Checkpoint.open(tmp_path)


def test_an_index_that_names_a_pickle_is_refused(tmp_path):
    with refused("not safetensors", "'pytorch_model.bin'", "never opens a pickle", file=tmp_path / INDEX):
        Checkpoint.open(write_shards(tmp_path, SHARDS, {"a": "pytorch_model.bin"}))


def test_a_file_in_place_of_a_folder_is_refused_with_its_folder_as_the_fix(folder):
    with refused(
        "folder, but this is a file", f"Fix: Pass its folder, {folder}.", file=folder / "model.safetensors"
    ):
        Checkpoint.open(folder / "model.safetensors")


def test_a_missing_folder_is_refused(tmp_path):
    with refused("no checkpoint at this path", file=tmp_path / "none"):
        Checkpoint.open(tmp_path / "none")


@pytest.mark.parametrize(
    "arguments", [{"root": "a" * 300}, {"root": ".", "variant": "a" * 300}], ids=["root", "variant"]
)
def test_a_name_that_no_file_can_have_is_refused(arguments):
    with refused():
        Checkpoint.open(**arguments)


def test_no_file_is_no_checkpoint():
    with refused():
        Checkpoint.from_files([])


def test_an_empty_folder_is_refused(tmp_path):
    with refused("holds no checkpoint", "found: an empty folder", file=tmp_path):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_a_folder_with_only_a_pickle_is_refused_and_told_so(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with refused(f"found: {name}", "hfq never opens a pickle", file=tmp_path):
        Checkpoint.open(tmp_path)


def test_a_config_is_read(folder):
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert Checkpoint.open(folder).config == {"model_type": "llama"}


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[]", "it holds a list"),
        (b"null", "it holds a NoneType"),
        (b'"x"', "it holds a str"),
        (b"1", "it holds a int"),
        (b"\xff\xfe{}", "can't decode byte"),
        (b'{"a":' + b"[" * 100_000, "recursion"),
    ],
)
def test_json_that_is_no_object_is_refused(sharded, name, text, found):
    (sharded / name).write_bytes(text)
    with refused("JSON file of the checkpoint cannot be read", found, file=sharded / name):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_huge_json_is_refused_before_it_is_read(sharded, name):
    with open(sharded / name, "wb") as stream:
        stream.truncate((256 << 20) + 1)
    with refused("268435457 bytes is more than the limit", file=sharded / name):
        Checkpoint.open(sharded)


def test_a_config_that_is_a_folder_is_refused(folder):
    (folder / "config.json").mkdir()
    with refused("JSON file of the checkpoint cannot be read", file=folder / "config.json"):
        Checkpoint.open(folder)


def test_a_side_file_is_read_or_absent_or_refused(folder, checkpoint):
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    (folder / "bad.json").write_text("{")
    assert checkpoint.side_file("quantize_config.json") == {"bits": 4}
    assert checkpoint.side_file("none.json") is None
    with refused("JSON file of the checkpoint cannot be read", file=folder / "bad.json"):
        checkpoint.side_file("bad.json")


def test_metadata_is_that_of_all_files_but_for_what_they_disagree_on(tmp_path):
    write_raw(
        tmp_path / "x.safetensors",
        {"__metadata__": {"format": "pt", "k": "1", "x": "2"}, "a": entry()},
        b"1234",
    )
    write_raw(tmp_path / "y.safetensors", {"__metadata__": {"format": "pt", "k": "2"}, "b": entry()}, b"1234")
    files = [tmp_path / "x.safetensors", tmp_path / "y.safetensors"]
    assert Checkpoint.from_files(files).metadata() == {"format": "pt", "x": "2"}
    assert Checkpoint.from_files(files[:1]).metadata() == {"format": "pt", "k": "1", "x": "2"}


def test_the_links_of_the_hub_cache_are_followed(tmp_path):
    snapshot, blobs = hub_cache(tmp_path)
    (blobs / "f01").write_text('{"model_type": "llama"}')
    os.symlink("../../blobs/f00", snapshot / "model.safetensors")
    os.symlink("../../blobs/f01", snapshot / "config.json")
    checkpoint = Checkpoint.open(snapshot)
    assert (list(checkpoint.tensors), checkpoint.config) == (["a"], {"model_type": "llama"})


@pytest.mark.parametrize(("cwd", "root"), [("", "."), ("..", "abc")])
def test_the_links_of_the_hub_cache_are_followed_from_within(tmp_path, cwd, root):
    snapshot, _ = hub_cache(tmp_path)
    os.symlink("../../blobs/f00", snapshot / "model.safetensors")
    code = (
        "import os, sys; from hfq.checkpoint import Checkpoint; "
        "os.chdir(sys.argv[1]); print(list(Checkpoint.open(sys.argv[2]).tensors))"
    )
    result = programs.run_line(code, snapshot / cwd, root)
    assert result.stdout == "['a']\n", result.stderr


def test_the_links_of_the_hub_cache_are_followed_in_a_subfolder(tmp_path):
    snapshot, _ = hub_cache(tmp_path)
    (snapshot / "sub").mkdir()
    os.symlink("../../../blobs/f00", snapshot / "sub" / "model.safetensors")
    assert list(Checkpoint.open(snapshot / "sub").tensors) == ["a"]
