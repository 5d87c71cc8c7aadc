"""Reading of small files up to a limit of bytes."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

__all__ = ["YAML_LIMIT", "open_regular", "read_small_file", "read_utf8", "read_yaml"]

YAML_LIMIT = 256 << 10
"""Most bytes of a YAML file."""

_MOST_ITEMS = 100_000
_TEXT_LIMIT = 1 << 30
_CHUNK_NBYTES = 1 << 20


def open_regular(file: str | os.PathLike) -> BinaryIO:
    """Opens a regular file for reading.

    Devices and pipes, which might never end, raise an error, and are not waited for.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def read_small_file(file: str | os.PathLike, most_nbytes: int) -> bytes:
    """Returns the bytes of a regular file.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger than `most_nbytes`.
    """
    with open_regular(file) as stream:
        nbytes = os.fstat(stream.fileno()).st_size
        if nbytes > most_nbytes:
            raise OSError(errno.EFBIG, f"{nbytes} bytes is more than the limit of {most_nbytes}")
        return stream.read(nbytes)


def read_utf8(file: str | os.PathLike, most_nbytes: int = _TEXT_LIMIT) -> str:
    """Returns the text of a file or a pipe, which may not be endless.

    Raises:
        OSError: The file cannot be read, or has more than `most_nbytes`.
        UnicodeDecodeError: The text is not UTF-8.
    """
    content = bytearray()
    with open(file, "rb") as stream:
        while chunk := stream.read(_CHUNK_NBYTES):  # one read of the limit would allocate as much
            content += chunk
            if len(content) > most_nbytes:
                raise OSError(errno.EFBIG, f"more than {most_nbytes:,} bytes")
    return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_yaml(file: str | os.PathLike) -> object:
    """Returns the value of a YAML file of at most 256 KiB.

    A short file can name a value with more items than memory holds, by aliases of aliases or by merge keys.
    So items are limited, and merge keys are refused.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is too large.
        ValueError: The file is not YAML, or has too many items.
        ImportError: The package pyyaml is not installed.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: Any) -> None:
            if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
                raise ValueError("merge keys (<<) are not supported")

    text = read_small_file(file, YAML_LIMIT).decode("utf-8")
    try:
        value = yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split()) or "not YAML") from error
    if sum(1 for _ in itertools.islice(_items(value), _MOST_ITEMS + 1)) > _MOST_ITEMS:
        raise ValueError(f"more than {_MOST_ITEMS} items")
    return value


def _items(value: object) -> Iterator[object]:
    """Yields a value and all values in it, those of an alias each time."""
    pending = [value]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
