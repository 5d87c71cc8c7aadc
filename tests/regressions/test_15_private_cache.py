"""Tests that no file that another user can write is run as a compiled kernel or used as a cache."""

import _ctypes
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from hfq.checkpoint.private_folder import NotPrivateError, private_folder
from hfq.integrations.hub import find
from hfq.kernels.cpp import build as building

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
NOBODY = 65534

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo fake 1; exit; fi
while [ $# -gt 1 ]; do if [ "$1" = -o ]; then %s "$2"; fi; shift; done
"""


@pytest.fixture
def root(tmp_path):
    """Returns a private folder whose parents are private too."""
    return private_folder(tmp_path)


def set_compiler(root, monkeypatch, command):
    compiler = root / "fake++"
    compiler.write_text(COMPILER % command)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


@pytest.fixture
def cache(root, monkeypatch):
    """Sets a compiler that copies a library; returns the user's cache folder."""
    set_compiler(root, monkeypatch, f'cp "{_ctypes.__file__}"')
    (root / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(root / "tmp"))
    building._temporary_folder.cache_clear()
    yield root / "cache"
    building._temporary_folder.cache_clear()


def shared_parent(cache):
    (cache / "hfq").chmod(0o777)


def group_parent(cache):
    cache.chmod(0o770)


def foreign_parent(cache):
    os.chown(cache / "hfq", NOBODY, NOBODY)


def foreign_link(cache):
    (cache / "hfq" / "native").rename(cache / "moved")
    os.symlink(cache / "moved", cache / "hfq" / "native")
    os.chown(cache / "hfq" / "native", NOBODY, NOBODY, follow_symlinks=False)


def foreign_folder(cache):
    os.chown(cache / "hfq" / "native", NOBODY, NOBODY)


@pytest.mark.parametrize(
    "change",
    [
        shared_parent,
        group_parent,
        pytest.param(foreign_parent, marks=needs_root),
        pytest.param(foreign_link, marks=needs_root),
        pytest.param(foreign_folder, marks=needs_root),
    ],
    ids=lambda change: change.__name__,
)
def test_a_cache_that_another_user_can_change_is_replaced_by_a_temporary_one(cache, change, caplog):
    first = building.build()
    assert first.parent == cache / "hfq" / "native"
    change(cache)
    with caplog.at_level(logging.WARNING, logger="hfq"):
        second = building.build()
        building.load_built()
    assert second.parent.parent == cache.parent / "tmp"
    assert second.parent.stat().st_mode & 0o777 == 0o700
    assert caplog.text.count("hfq compiles its kernels in each process") == 1
    assert str(cache) in caplog.text


@pytest.mark.parametrize("change", ["mode", pytest.param("owner", marks=needs_root), "link"])
def test_a_library_that_another_user_can_write_is_built_again(cache, change):
    made = building.build()
    before = made.stat().st_ino
    if change == "mode":
        made.chmod(0o666)
    elif change == "owner":
        os.chown(made, NOBODY, NOBODY)
    else:
        made.rename(cache / "moved")
        made.symlink_to(cache / "moved")
    assert building.build() == made
    status = made.lstat()
    assert (status.st_ino != before, status.st_mode & 0o7777, status.st_uid) == (True, 0o700, os.geteuid())


def test_the_library_that_was_checked_is_loaded_though_its_name_leads_elsewhere_now(cache, monkeypatch):
    made = building.build()
    names = []

    def load(name):
        names.append(os.stat(name).st_ino)
        raise OSError("not loaded")

    checked, original = made.stat().st_ino, building._open_whole

    def exchanging(target):
        opened = original(target)
        shutil.copy(target, cache / "other")
        os.replace(cache / "other", target)
        return opened

    monkeypatch.setattr(building, "_open_whole", exchanging)
    monkeypatch.setattr(building.ctypes, "CDLL", load)
    with pytest.raises(building.BuildError, match="cannot be loaded"):
        building.load_built()
    assert names == [checked] != [made.stat().st_ino]


def test_two_libraries_are_two_though_the_first_is_closed(cache, root, monkeypatch):
    first = building.load_built()
    set_compiler(root, monkeypatch, f'cp "{Path(_ctypes.__file__)}"')
    monkeypatch.setenv("CXX", f"env A=1 {os.environ['CXX']}")
    assert building.load_built()._handle != first._handle


@pytest.mark.parametrize("command", ["true", ": >", "printf library >"])
def test_an_empty_library_is_not_kept(cache, root, monkeypatch, command):
    set_compiler(root, monkeypatch, command)
    with pytest.raises(building.BuildError, match=r"made a library that cannot be loaded"):
        building.build()
    assert not list((cache / "hfq" / "native").glob("*.so"))
    set_compiler(root, monkeypatch, f'cp "{_ctypes.__file__}"')
    assert building.build().exists()


def test_fetched_headers_are_neither_kept_nor_read_where_others_can_write(cache, caplog):
    class Headers:
        def pack(self):
            return b""

    cache.mkdir()
    (cache / "hfq").mkdir()
    (cache / "hfq").chmod(0o777)
    with caplog.at_level(logging.WARNING, logger="hfq"):
        find._keep(Headers(), "o/n", "0" * 40)
    assert "not kept" in caplog.text
    assert not list(cache.glob("**/*.zip"))


# private folders


def test_own_links_and_sticky_parents_are_followed(root):
    (root / "disk").mkdir()
    (root / "shared").mkdir()
    (root / "shared").chmod(0o1777)
    (root / "shared" / "link").symlink_to("../disk")
    assert private_folder(root / "shared" / "link" / "a" / "b") == root / "disk" / "a" / "b"
    assert (root / "disk" / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_the_last_folder_may_not_be_shared_even_if_it_is_sticky(root):
    (root / "shared").mkdir()
    (root / "shared").chmod(0o1777)
    with pytest.raises(NotPrivateError, match="other users can write to"):
        private_folder(root / "shared")


def test_links_in_a_circle_end(root):
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with pytest.raises(OSError, match="too many links"):
        private_folder(root / "a")


def test_threads_that_create_one_folder_agree(root):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(private_folder(root / "a/b/c"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [root / "a" / "b" / "c"] * 8
