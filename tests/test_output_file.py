"""Tests that a file that the user asked for is whole or unchanged, and that every caller writes so."""

import errno
import os
import resource
import stat

import pytest

from hfq.errors import SetupError
from hfq.offload.spans import Span
from hfq.output_file import check_output_file, write_output_file
from hfq.plots.charts import Chart
from hfq.runtime.record_routing import Routing
from hfq.runtime.report import DeviceReport, Report
from hfq.runtime.timeline import Timeline
from hfq.tables import Report as Page
from tests.support.checkpoint_files import refused

MANY = 5_000
LARGEST = 20_000


@pytest.fixture
def full_disk():
    """A limit of 20 kB for each file, which a write exceeds midway."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_text_and_bytes_are_written_and_readable_by_others(tmp_path):
    write_output_file(tmp_path / "a", "é\n")
    write_output_file(os.fspath(tmp_path / "b"), b"\xff")
    assert [(tmp_path / name).read_bytes() for name in "ab"] == ["é\n".encode(), b"\xff"]
    (tmp_path / "plain").touch()
    modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_replaced_file_keeps_its_mode_and_a_link_its_place(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o600)
    (tmp_path / "link").symlink_to("file")
    write_output_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_a_pipe_is_written_to(tmp_path):
    read, write = os.pipe()
    write_output_file(f"/proc/self/fd/{write}", "text")
    check_output_file(f"/proc/self/fd/{write}")
    os.close(write)
    with os.fdopen(read) as stream:
        assert stream.read() == "text"


@pytest.mark.parametrize("content", ["x" * 2 * LARGEST, bytes(2 * LARGEST)], ids=["text", "bytes"])
def test_a_full_disk_midway_leaves_the_old_file_and_nothing_else(content, tmp_path, full_disk):
    (tmp_path / "file").write_text("old")
    words = ("an old file is unchanged", "found: File too large", "expected: 40,000 bytes of free space")
    with refused(*words, kind=SetupError, file=tmp_path / "file"):
        write_output_file(tmp_path / "file", content)
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_output_file(tmp_path / "file", "new")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "found"),
    [("no/file", "No such file or directory"), ("", "Is a directory"), ("file/below", "Not a directory")],
)
def test_a_path_that_cannot_be_written_is_an_error(name, found, tmp_path):
    (tmp_path / "file").touch()
    with refused(f"found: {found}", "another path", kind=SetupError, file=tmp_path / name):
        write_output_file(tmp_path / name, "x")
    assert os.listdir(tmp_path) == ["file"]


def test_a_check_makes_the_folder_and_leaves_the_file(tmp_path):
    check_output_file(tmp_path / "new" / "file")
    assert os.listdir(tmp_path / "new") == []
    (tmp_path / "file").write_text("old")
    check_output_file(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "old"
    with refused("found: Is a directory", kind=SetupError, file=tmp_path):
        check_output_file(tmp_path)
    with pytest.raises(FileExistsError):
        check_output_file(tmp_path / "file" / "below")


def test_a_check_finds_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("pathlib.Path.touch", fail)
    with refused("found: Read-only file system", kind=SetupError, file=tmp_path / "file"):
        check_output_file(tmp_path / "file")


CHART = Chart("a chart", ("one", "two"), {"first": [1.0, 2.0]})
SPANS = [Span("compute", "model.layers.0", 0.0, 1.0, 0)] * MANY
SAVES = {
    "routing": lambda file: Routing(["a"], [4], [9], [(0, [[1, 2]] * MANY)]).save(file),
    "trace": lambda file: Timeline(SPANS, []).save_trace(file),
    "report": lambda file: Report((DeviceReport("cpu", 1, 0),) * MANY, None).save(file),
    "page": lambda file: Page("t", {}, [], [], [{"x": "y"}] * MANY, CHART).write(file.parent, file.stem),
}


@pytest.mark.parametrize("name", SAVES)
def test_what_a_user_saves_keeps_the_old_file_on_a_full_disk(name, tmp_path, full_disk, monkeypatch):
    monkeypatch.setattr("hfq.tables.draw_chart", lambda *_: False)
    file = tmp_path / "saved.json"
    file.write_text("old")
    with refused("found: File too large", kind=SetupError, file=file):
        SAVES[name](file)
    assert file.read_text() == "old"
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
