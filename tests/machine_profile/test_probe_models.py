"""Tests of probe checkpoints: written once, reused, and replaced if damaged."""

import shutil
from types import SimpleNamespace

import pytest

from hfq import SetupError
from hfq.machine_profile.probe_models import GPTQ4, Architecture, make_checkpoint

SMALL = Architecture(128, 2)


def test_a_complete_checkpoint_is_used_again_and_a_damaged_one_is_made_anew(tmp_path):
    path = make_checkpoint(tmp_path, SMALL, GPTQ4)
    first, *others = sorted(path.glob("*.safetensors"))
    content, inode = first.read_bytes(), first.stat().st_ino
    make_checkpoint(tmp_path, SMALL, GPTQ4)
    assert first.stat().st_ino == inode
    first.write_bytes(content[:-1])
    others[-1].unlink()
    make_checkpoint(tmp_path, SMALL, GPTQ4)
    assert first.read_bytes() == content


def test_nothing_is_written_where_the_disk_has_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(SetupError, match="too little free space"):
        make_checkpoint(tmp_path, SMALL, GPTQ4)
    assert not list(tmp_path.rglob("*.safetensors"))
