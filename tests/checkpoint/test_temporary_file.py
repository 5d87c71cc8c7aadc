"""Files without a name: written once, then read as a checkpoint's own; nothing of them is left."""

import os

import pytest

from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.temporary_file import TemporaryFile
from hfq.errors import CheckpointError
from hfq.tensor_spec import ByteRange

LABEL = "(private)"
DATA = bytes(range(256)) * 32


@pytest.fixture
def reader():
    return Reader(Checkpoint("", {}, {}, {}))


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_what_was_written_is_read_and_mapped(reader, tmp_path, is_on_disk):
    file = TemporaryFile(reader, LABEL, len(DATA), tmp_path if is_on_disk else None)
    file.write(4096, memoryview(DATA)[4096:])
    file.write(0, memoryview(DATA)[:4096])
    file.finish()
    target = bytearray(100)
    reader.read_into(ByteRange(LABEL, 4050, 100), memoryview(target))
    assert bytes(target) == DATA[4050:4150]
    assert bytes(reader.map(LABEL)) == DATA
    assert not list(tmp_path.iterdir())


def test_what_was_given_back_is_an_error_and_no_zeros(reader):
    file = TemporaryFile(reader, LABEL, len(DATA))
    file.finish()
    file.empty()
    with pytest.raises(CheckpointError, match="changed while the model was using it"):
        reader.read_into(ByteRange(LABEL, 0, 10), memoryview(bytearray(10)))


def test_it_ends_with_its_reader(reader, tmp_path):
    TemporaryFile(reader, LABEL, len(DATA), tmp_path)
    descriptor = reader.descriptor(LABEL)
    assert os.fstat(descriptor).st_nlink == 0
    reader.__del__()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    reader._descriptors.clear()


def test_a_folder_that_is_not_there_is_made_and_one_that_cannot_be_is_named(reader, tmp_path):
    TemporaryFile(reader, LABEL, len(DATA), tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"(?s)could not be written.*(File exists|Not a directory).*offload_folder"
    ):
        TemporaryFile(reader, str(tmp_path / "file" / LABEL), 10, tmp_path / "file")
