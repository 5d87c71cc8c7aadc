"""A checkpoint by its folder or by its name on the hub, for what reads headers alone: nothing is downloaded
but headers.

A model that is in the cache of the hub is taken from there. Of another one headers are fetched and kept in
hfq's own cache, as an archive that nobody can take for a checkpoint, under the commit that they belong to.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hfq.checkpoint.headers_only import HeadersOnlyCheckpoint
from hfq.checkpoint.write_checkpoint import INDEX
from hfq.errors import CheckpointError
from hfq.integrations.hub.fetch import SINGLE, RemoteModel

__all__ = ["FoundCheckpoint", "find_checkpoint", "headers_cache", "split_name"]

_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[^@\s]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder that can be opened.

    Attributes:
        folder: The folder; where headers were fetched it has no weights, and goes when the block that asked
            for it ends.
        name: What the checkpoint is called: its name on the hub where headers were fetched, else the folder.
        commit: The commit of fetched headers, else None.
        fetched_nbytes: The bytes that were fetched now; 0 where hfq's cache had them.
        nbytes: The bytes of fetched headers' files, weights included.
    """

    folder: str
    name: str
    commit: str | None = None
    fetched_nbytes: int = 0
    nbytes: int = 0

    def describe(self) -> dict:
        """Where fetched headers come from, as JSON-ready data; empty for a folder."""
        return {} if self.commit is None else {"commit": self.commit, "fetched_nbytes": self.fetched_nbytes}

    def __str__(self) -> str:
        if self.commit is None:
            return self.name
        fetched = (
            f"{self.fetched_nbytes:,} B fetched"
            if self.fetched_nbytes
            else "nothing fetched, hfq's cache had them"
        )
        return (
            f"headers of {self.name} at commit {self.commit[:8]}: {fetched}; the files have {self.nbytes:,} B"
        )


def split_name(path: str) -> tuple[str, str | None] | None:
    """(repository, revision) of `organisation/model` or `organisation/model@revision`; None for what is a
    local path.
    """
    found = None if os.path.lexists(path) else _NAME.fullmatch(path)
    return (found["repo"], found["revision"]) if found else None


@contextlib.contextmanager
def find_checkpoint(path: str | os.PathLike) -> Iterator[FoundCheckpoint]:
    """The folder of a checkpoint, during a block.

    Args:
        path: A folder; or a model of the hub, as `organisation/model` or `organisation/model@revision`.

    Raises:
        CheckpointError: The hub has no such model, does not give it, or cannot be reached; or its headers are
            damaged.
    """
    text = os.fspath(path)
    named = split_name(text)
    cached = text if named is None else _snapshot(*named)
    if named is None or cached is not None:
        yield FoundCheckpoint(str(cached), str(cached))
        return
    hollow, commit, fetched = _headers(*named)
    with tempfile.TemporaryDirectory(prefix="hfq-") as folder:
        hollow.write(folder)
        yield FoundCheckpoint(folder, text, commit, fetched, hollow.nbytes)


def headers_cache() -> Path:
    """The folder of fetched headers."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfq" / "headers"


def _snapshot(repo: str, revision: str | None) -> str | None:
    """The folder of a model in the cache of the hub, if all of its weights are there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(repo, "config.json", revision=revision)
    except ValueError:  # no name of the hub: asking the hub says so
        return None
    folder = Path(config).parent if isinstance(config, str) else None
    return str(folder) if folder is not None and _is_whole(folder) else None


def _is_whole(folder: Path) -> bool:
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return (folder / SINGLE).exists()
    try:
        return all(
            (folder / name).exists()
            for name in json.loads((folder / INDEX).read_bytes())["weight_map"].values()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return True  # opening it says what is wrong


def _headers(repo: str, revision: str | None) -> tuple[HeadersOnlyCheckpoint, str, int]:
    """The headers of a model, their commit, and the bytes that were fetched for them."""
    is_commit = revision is not None and _COMMIT.fullmatch(revision)
    kept = _kept(repo, str(revision)) if is_commit else None
    if kept is not None:
        return kept, str(revision), 0
    model = RemoteModel(repo, revision)
    kept = _kept(repo, model.commit)
    if kept is not None:
        return kept, model.commit, 0
    hollow = model.fetch()
    _keep(hollow, repo, model.commit)
    return hollow, model.commit, model.fetched_nbytes


def _archive(repo: str, commit: str) -> Path:
    return headers_cache() / f"{repo.replace('/', '--')}--{commit}.headers.zip"


def _kept(repo: str, commit: str) -> HeadersOnlyCheckpoint | None:
    """What an earlier plan fetched; one that is damaged or cannot be read is none, and is replaced."""
    try:
        return HeadersOnlyCheckpoint.unpack(_archive(repo, commit).read_bytes())
    except (OSError, ValueError):
        return None


def _keep(hollow: HeadersOnlyCheckpoint, repo: str, commit: str) -> None:
    archive = _archive(repo, commit)
    try:
        archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(
            prefix=f".{archive.name}.", suffix=".tmp", dir=archive.parent
        )
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(hollow.pack())
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, archive)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise CheckpointError(
            "Fetched headers could not be kept; nothing was left behind.",
            file=archive,
            expected="a writable folder with free space",
            found=error.strerror,
            fix="free space, or set XDG_CACHE_HOME to a folder that can be written",
        ) from error
