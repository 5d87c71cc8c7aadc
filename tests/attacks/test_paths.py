"""Promises 1 to 4: hfq never leaves the folder of a checkpoint, for any index and links."""

import json
import os

import pytest

from hfq.checkpoint import Checkpoint, Reader
from tests.support import programs
from tests.support.checkpoint_files import entry, refused, write_raw, write_shards
from tests.support.model_copies import opened_files

INDEX = "model.safetensors.index.json"


@pytest.fixture
def outside(tmp_path):
    """Returns a valid file outside the checkpoint, so that only its location can cause an error."""
    (tmp_path / "outside").mkdir()
    return write_raw(tmp_path / "outside" / "x.safetensors", {"a": entry()}, b"1234")


@pytest.fixture
def inside(tmp_path):
    """Returns the folder of the checkpoint, which contains a subfolder."""
    (tmp_path / "inside" / "sub").mkdir(parents=True)
    return tmp_path / "inside"


def assert_nothing_outside_is_opened(inside, words, file):
    with opened_files() as opened, refused(*words, file=file):
        Checkpoint.open(inside)
    assert [path for path in opened if not path.startswith(f"{inside}{os.sep}")] == []


def test_the_trap_sees_what_is_opened(inside, outside):
    """Shows that the tests below can fail."""
    write_raw(inside / "model.safetensors", {"a": entry()}, b"1234")
    with opened_files() as opened:
        Reader(Checkpoint.open(inside)).map(str(inside / "model.safetensors"))
        outside.read_bytes()
    assert opened == [str(inside / "model.safetensors")] * 2 + [str(outside)]


# 1. An index names only files inside its folder.


@pytest.mark.parametrize(
    "name",
    [
        "../outside/x.safetensors",
        "sub/../../outside/x.safetensors",
        "./../outside/x.safetensors",
        "sub/../x.safetensors",
        "..",
        "../inside/../outside/x.safetensors",
        "//outside/x.safetensors",
        "/etc/passwd",
        "x\0.safetensors",
        "..\\outside\\x.safetensors",
        "sub\\x.safetensors",
        "C:x.safetensors",
        "C:/x.safetensors",
        "x.safetensors:stream",
        "x\n.safetensors",
        "\x1b]0;x\x07.safetensors",
    ],
)
def test_an_index_that_names_a_place_outside_is_refused(inside, outside, name):
    write_shards(inside, {}, {"a": name})
    assert_nothing_outside_is_opened(inside, ["outside its folder", repr(name)], inside / INDEX)


def test_an_index_that_names_an_absolute_path_is_refused(inside, outside):
    write_shards(inside, {}, {"a": str(outside)})
    assert_nothing_outside_is_opened(inside, ["outside its folder", str(outside)], inside / INDEX)


def test_an_absolute_path_that_leads_back_inside_is_refused_too(inside):
    shard = write_raw(inside / "x.safetensors", {"a": entry()}, b"1234")
    write_shards(inside, {}, {"a": str(shard)})
    assert_nothing_outside_is_opened(inside, ["outside its folder"], inside / INDEX)


# 2. No link leads out of the folder.


def test_a_shard_that_is_a_link_out_is_refused(inside, outside):
    os.symlink(outside, inside / "x.safetensors")
    write_shards(inside, {}, {"a": "x.safetensors"})
    assert_nothing_outside_is_opened(inside, ["outside its folder", str(outside)], inside / "x.safetensors")


def test_a_shard_in_a_linked_folder_is_refused(inside, outside):
    os.symlink(outside.parent, inside / "linked")
    write_shards(inside, {}, {"a": "linked/x.safetensors"})
    assert_nothing_outside_is_opened(
        inside, ["outside its folder", str(outside)], inside / "linked" / "x.safetensors"
    )


def test_a_chain_of_links_is_followed_to_its_end(inside, outside):
    os.symlink(outside, inside / "sub" / "second")
    os.symlink("sub/second", inside / "model.safetensors")
    assert_nothing_outside_is_opened(
        inside, ["outside its folder", str(outside)], inside / "model.safetensors"
    )


def test_a_single_file_that_is_a_link_out_is_refused(inside, outside):
    os.symlink("../outside/x.safetensors", inside / "model.safetensors")
    assert_nothing_outside_is_opened(
        inside, ["outside its folder", str(outside)], inside / "model.safetensors"
    )


def test_a_folder_whose_name_only_begins_the_same_is_outside(inside, outside):
    outside.parent.rename(f"{inside}-2")
    os.symlink(f"{inside}-2/x.safetensors", inside / "model.safetensors")
    assert_nothing_outside_is_opened(inside, ["outside its folder"], inside / "model.safetensors")


def test_links_within_the_folder_are_followed(inside):
    write_raw(inside / "sub" / "x", {"a": entry()}, b"1234")
    os.symlink("sub/x", inside / "model.safetensors")
    assert list(Checkpoint.open(inside).tensors) == ["a"]


@pytest.mark.parametrize("link", ["nowhere.safetensors", "model.safetensors"], ids=["dangling", "to itself"])
def test_a_link_to_nowhere_is_refused(inside, link):
    os.symlink(link, inside / "model.safetensors")
    assert_nothing_outside_is_opened(inside, ["cannot be read"], inside / "model.safetensors")


def test_a_side_file_that_is_a_link_out_is_refused(inside, outside):
    write_raw(inside / "model.safetensors", {"a": entry()}, b"1234")
    (outside.parent / "secret.json").write_text("{}")
    os.symlink(outside.parent / "secret.json", inside / "quantize_config.json")
    checkpoint = Checkpoint.open(inside)
    with opened_files() as opened, refused("outside its folder", file=inside / "quantize_config.json"):
        checkpoint.side_file("quantize_config.json")
    assert opened == []


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_config_or_an_index_that_is_a_link_out_is_refused(inside, outside, name):
    write_shards(inside, {"x.safetensors": {"a": [1.0]}})
    (outside.parent / "secret.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    (inside / name).unlink(missing_ok=True)
    os.symlink(outside.parent / "secret.json", inside / name)
    assert_nothing_outside_is_opened(inside, ["outside its folder"], inside / name)


# 3. In the Hub cache, links lead only to the blobs of the same repository.


@pytest.mark.parametrize(
    "target", ["../../../models--other--one/blobs/x", "../../blobs/../../outside/x.safetensors", "../other/x"]
)
def test_the_hub_cache_opens_no_door_but_its_own_blobs(tmp_path, outside, target):
    snapshot = tmp_path / "models--o--n" / "snapshots" / "abc"
    for place in (
        "models--o--n/snapshots/abc",
        "models--o--n/snapshots/other",
        "models--o--n/blobs",
        "models--other--one/blobs",
    ):
        (tmp_path / place).mkdir(parents=True)
        write_raw(tmp_path / place / "x", {"a": entry()}, b"1234")
    os.symlink(target, snapshot / "model.safetensors")
    assert (snapshot / "model.safetensors").is_file()
    assert_nothing_outside_is_opened(snapshot, ["outside its folder"], snapshot / "model.safetensors")


# 4. Devices and pipes instead of files raise an error, without an endless read or wait.


def test_the_limits_of_the_tests_below_are_wide_enough_for_a_good_checkpoint(inside):
    result = programs.run("open_within_limits", write_shards(inside, {"x.safetensors": {"a": [1.0]}}))
    assert result.stdout.startswith("opened"), result.stderr


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_config_or_an_index_that_is_a_device_is_not_read_without_end(inside, name):
    write_shards(inside, {"x.safetensors": {"a": [1.0]}})
    (inside / name).unlink(missing_ok=True)
    os.symlink("/dev/zero", inside / name)
    result = programs.run("open_within_limits", inside)
    assert result.stdout.startswith("refused"), result.stderr


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_named_pipe_is_refused_and_not_waited_for(inside, name):
    write_shards(inside, {"x.safetensors": {"a": [1.0]}})
    os.mkfifo(inside / name)
    result = programs.run("open_within_limits", inside)
    assert result.stdout.startswith("refused"), f"ended by signal {-result.returncode}"
