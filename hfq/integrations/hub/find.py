"""Checkpoints by folder or by Hub id, without a download of weights.

A model in the Hub's cache is used from there. For other models, only headers are fetched. hfq keeps them in
its own cache under their commit, as an archive that cannot be mistaken for a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hfq.checkpoint.gguf.split_files import parts_of
from hfq.checkpoint.headers_only import HeadersOnlyCheckpoint
from hfq.checkpoint.index import HUB_ID, JSON_LIMIT, split_gguf_path
from hfq.checkpoint.private_folder import NotPrivateError, check_own, private_folder, user_cache
from hfq.checkpoint.small_file import open_regular, read_small_file
from hfq.checkpoint.write_checkpoint import INDEX
from hfq.errors import CheckpointError
from hfq.integrations.hub.fetch import SINGLE, RemoteModel

__all__ = ["FoundCheckpoint", "find_checkpoint", "headers_cache", "is_hub_id"]

logger = logging.getLogger("hfq")

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class FoundCheckpoint:
    """Folder that can be opened as a checkpoint.

    Attributes:
        folder: The folder. A folder of fetched headers has no weights, and is deleted at the end of the
            `with` statement.
        name: Hub id of fetched headers, else the folder.
        commit: Commit of fetched headers, else None.
        fetched_nbytes: Bytes that were fetched now; 0 if hfq's cache had them.
        nbytes: Bytes of the files whose headers were fetched, weights included; 0 for a folder.
    """

    folder: str
    name: str
    commit: str | None = None
    fetched_nbytes: int = 0
    nbytes: int = 0

    def describe(self) -> dict:
        """Returns the origin of fetched headers as JSON-ready data; empty for a folder."""
        return {} if self.commit is None else {"commit": self.commit, "fetched_nbytes": self.fetched_nbytes}

    def __str__(self) -> str:
        if self.commit is None:
            return self.name
        fetched = f"{self.fetched_nbytes:,} B fetched" if self.fetched_nbytes else "from hfq's cache"
        return (
            f"headers of {self.name} at commit {self.commit[:8]}: {fetched}; the files have {self.nbytes:,} B"
        )


def is_hub_id(path: str) -> bool:
    """Returns True for a model on the Hub, or a GGUF file of it, if no local file has this path.

    The forms are `organization/model` and `organization/model/file.gguf`.
    """
    repo, _ = split_gguf_path(path)
    return not os.path.lexists(path) and HUB_ID.fullmatch(os.fspath(repo)) is not None


@contextlib.contextmanager
def find_checkpoint(
    path: str | os.PathLike,
    revision: str | None = None,
    *,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    subfolder: str = "",
) -> Iterator[FoundCheckpoint]:
    """Yields the folder of a checkpoint.

    All arguments have the meaning that they have in `from_pretrained`.

    Args:
        path: A folder, the path of a GGUF file, or the id of a model on the Hub: `organization/model`, or
            `organization/model/file.gguf`.
        revision: Branch, tag, or commit of a model on the Hub; None for the default branch.
        token: Token for the Hub; None for the one of the environment.
        cache_dir: The Hub's cache; None for the one of the environment.
        local_files_only: True to use only this cache.
        subfolder: Folder of the checkpoint in the folder or the model.

    Raises:
        CheckpointError: The Hub has no such model, denies access, or cannot be reached; or the headers are
            damaged.
    """
    text = os.fspath(path)
    repo, named = split_gguf_path(text)
    inside = subfolder.strip("/") if named is None else named
    local = os.path.join(text, subfolder) if subfolder else text
    cached = _snapshot(str(repo), revision, inside, cache_dir) if is_hub_id(text) else local
    if cached is not None:
        yield FoundCheckpoint(cached, cached)
        return
    if local_files_only:
        raise CheckpointError(
            "The model is not in the Hub's cache, and local_files_only prevents a download.",
            file=text,
            expected="a whole safetensors or GGUF checkpoint",
            found=f"local_files_only={local_files_only!r}",
            fix=f"Leave out local_files_only, or download the model: hf download {repo}",
        )
    headers_only, commit, fetched = _headers(str(repo), revision, inside, token)
    with tempfile.TemporaryDirectory(prefix="hfq-") as folder:
        headers_only.write(folder)
        opened = folder if named is None else os.path.join(folder, os.path.basename(named))
        yield FoundCheckpoint(opened, text, commit, fetched, headers_only.nbytes)


def headers_cache() -> Path:
    """Returns the folder of fetched headers."""
    return user_cache() / "headers"


def _snapshot(repo: str, revision: str | None, inside: str, cache_dir: str | Path | None) -> str | None:
    """Returns the folder or GGUF file of a model in the Hub's cache; None without weights."""
    from huggingface_hub import try_to_load_from_cache

    if inside.endswith(".gguf"):
        parts = [part.as_posix() for part in parts_of(Path(inside))]
        found = [try_to_load_from_cache(repo, part, cache_dir, revision) for part in parts]
        return found[0] if all(isinstance(file, str) for file in found) else None
    try:
        config = try_to_load_from_cache(repo, Path(inside, "config.json").as_posix(), cache_dir, revision)
    except ValueError:  # not a Hub id; a request to the Hub reports this
        return None
    folder = Path(config).parent if isinstance(config, str) else None
    return str(folder) if folder is not None and _is_whole(folder) else None


def _is_whole(folder: Path) -> bool:
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return (folder / SINGLE).exists()
    try:
        return all(
            (folder / name).exists()
            for name in json.loads(read_small_file(folder / INDEX, JSON_LIMIT))["weight_map"].values()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return True  # the error appears when it is opened


def _headers(
    repo: str, revision: str | None, inside: str, token: str | bool | None
) -> tuple[HeadersOnlyCheckpoint, str, int]:
    """Returns the headers of a model, their commit, and the number of bytes fetched."""
    name = f"{repo}/{inside}" if inside else repo
    gguf_file, subfolder = (inside, "") if inside.endswith(".gguf") else (None, inside)
    is_commit = revision is not None and _COMMIT.fullmatch(revision)
    kept = _kept(name, str(revision)) if is_commit else None
    if kept is not None:
        return kept, str(revision), 0
    model = RemoteModel(repo, revision, token, subfolder)
    kept = _kept(name, model.commit)
    if kept is not None:
        return kept, model.commit, 0
    headers_only = model.fetch(gguf_file)
    _keep(headers_only, name, model.commit)
    return headers_only, model.commit, model.fetched_nbytes


def _archive(repo: str, commit: str) -> Path:
    return headers_cache() / f"{repo.replace('/', '--')}--{commit}.headers.zip"


def _kept(repo: str, commit: str) -> HeadersOnlyCheckpoint | None:
    """Returns the headers that an earlier plan fetched, or None.

    A damaged or unreadable archive counts as missing, and is replaced. So does one that another user can
    write.
    """
    try:
        private_folder(headers_cache())
        archive = _archive(repo, commit)
        with open_regular(archive) as stream:
            check_own(os.fstat(stream.fileno()), archive)
            return HeadersOnlyCheckpoint.unpack(stream.read())
    except (OSError, ValueError):
        return None


def _keep(headers_only: HeadersOnlyCheckpoint, repo: str, commit: str) -> None:
    archive = _archive(repo, commit)
    try:
        private_folder(archive.parent)
        descriptor, temporary = tempfile.mkstemp(
            prefix=f".{archive.name}.", suffix=".tmp", dir=archive.parent
        )
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(headers_only.pack())
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, archive)
        except BaseException:
            os.unlink(temporary)
            raise
    except NotPrivateError as error:
        logger.warning("hfq: fetched headers are not kept, since %s", error)
    except OSError as error:
        raise CheckpointError(
            "hfq cannot write the fetched headers to its cache. Nothing was left behind.",
            file=archive,
            expected="a writable folder with free space",
            found=error.strerror,
            fix="Free disk space, or set XDG_CACHE_HOME to a writable folder.",
        ) from error
