"""Tests that a quantization which is killed at any moment loses no finished shard."""

import json

import pytest

import hfq
from hfq import CheckpointError, Recipe
from hfq.quantization.journal import Journal
from tests.support import programs, tiny_models
from tests.support.kill_points import is_killed

SOURCE = tiny_models.DATA / "tiny-llama"
JOURNAL = ".hfq-journal.json"
SHARD = "model-00001-of-00001.safetensors"
RTN = Recipe("rtn", group_size=64)


def run(target):
    """Writes a shard and a side file, or what is left of them."""
    journal = Journal(target, {"bits": 4}, {"config.json"})
    if SHARD not in journal:
        journal.add(SHARD, {"a": ("U8", (4,), b"1234")}, {"layers": []})
    if not journal.is_renamed:
        journal.write("config.json", "{}")
    journal.finish()
    journal.close()


def finished(folder):
    """The finished shards of a killed run, with their times."""
    file = folder / JOURNAL
    shards = json.loads(file.read_text())["shards"] if file.exists() else {}
    return {name: (folder / name).stat().st_mtime_ns for name in shards}


def test_a_kill_at_any_call_that_changes_the_disk_loses_nothing(tmp_path):
    number, was_killed = 0, True
    while was_killed:
        number += 1
        folder = tmp_path / str(number)
        target, hidden = folder / "out", folder / ".out.quantizing"
        folder.mkdir()
        was_killed = is_killed(lambda target=target: run(target), folder, number)
        kept = finished(hidden) | finished(target)
        is_over = target.exists() and not (target / JOURNAL).exists()
        if target.exists():
            assert not hidden.exists()
            assert {file.name for file in target.iterdir()} - {JOURNAL} == {SHARD, "config.json"}
        if not is_over:
            run(target)
        assert {name: (target / name).stat().st_mtime_ns for name in kept} == kept
        assert {file.name for file in target.iterdir()} == {SHARD, "config.json"}
        assert not hidden.exists()
    assert number > 15


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", [1, 4])
def test_a_whole_run_goes_on_after_a_kill_at_two_of_seven_calls(first, tmp_path):
    done = programs.run(
        "quantize_killed_at_each_call", SOURCE, tmp_path, first, timeout=900, OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 40


def test_a_run_that_was_killed_after_its_renaming_ends_when_it_is_repeated(tmp_path):
    target = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hfq.quantization.working_folder.WorkingFolder.remove", lambda self, names: None)
        first = hfq.quantize(SOURCE, RTN, target)
    assert (target / JOURNAL).exists()
    again = hfq.quantize(SOURCE, RTN, target)
    assert (again.resumed, again.layers) == (4, first.layers)
    assert not (target / JOURNAL).exists()
    assert not (tmp_path / ".out.quantizing").exists()


@pytest.mark.parametrize("change", ["other options", "a changed shard", "a damaged journal"])
def test_another_finished_checkpoint_is_left_as_it_is(change, tmp_path):
    target = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hfq.quantization.working_folder.WorkingFolder.remove", lambda self, names: None)
        run(target)
    file = {"a changed shard": SHARD, "a damaged journal": JOURNAL}.get(change)
    if file is not None:
        (target / file).write_bytes(b"{")
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(CheckpointError, match="a folder with content"):
        Journal(target, {"bits": 3 if change == "other options" else 4}, {"config.json"})
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before


def appear_as_a_folder(target):
    target.mkdir()
    (target / "file").write_text("mine")


def appear_as_a_file(target):
    target.write_text("mine")


@pytest.mark.parametrize("appear", [appear_as_a_folder, appear_as_a_file], ids=lambda each: each.__name__)
def test_an_output_folder_that_appears_meanwhile_costs_nothing(appear, tmp_path):
    target = tmp_path / "out"
    with pytest.raises(CheckpointError, match="appeared while the model was quantized"):
        hfq.quantize(SOURCE, RTN, target, on_progress=lambda progress: progress.done == 4 and appear(target))
    target.rename(tmp_path / "elsewhere")
    assert hfq.quantize(SOURCE, RTN, target).resumed == 4
    assert (tmp_path / "elsewhere").exists()
