"""Tests of text files of a user. Small files of a checkpoint: tests/regressions/test_21_small_files.py."""

import os

import pytest

from hfq.checkpoint.small_file import read_utf8
from hfq.errors import SetupError
from hfq.evaluation.text import read_text
from hfq.quantization.calibration_data import calibrate


@pytest.mark.parametrize("content", [b"", b"a\r\nb\rc\n", "é".encode()])
def test_text_is_read_as_pathlib_reads_it(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    assert read_utf8(tmp_path / "file") == (tmp_path / "file").read_text(encoding="utf-8")


def test_a_pipe_is_read():
    read, write = os.pipe()
    os.write(write, b"text")
    os.close(write)
    assert read_utf8(f"/proc/self/fd/{read}") == "text"
    os.close(read)


def test_no_more_is_read_than_the_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_utf8(tmp_path / "file", 5) == "12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_utf8(tmp_path / "file", 4)
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_utf8("/dev/zero", 4)


def test_an_endless_text_is_an_error(monkeypatch):
    monkeypatch.setattr("hfq.checkpoint.small_file.read_utf8.__defaults__", (1 << 20,))
    with pytest.raises(SetupError, match="found: more than 1,048,576 bytes"):
        read_text("/dev/zero")
    with pytest.raises(SetupError, match="found: more than 1,048,576 bytes"):
        calibrate("/dev/zero", lambda: None, 10, 1, 1)
