"""What a plan needs of a model on the hub: its JSON files whole, and of each safetensors file its header, by
HTTP range requests.

All requests name one commit, so that nothing is put together from two versions of a model. They go through
huggingface_hub's own session, which knows HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and proxies, and tries again
where a server is busy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from hfq.checkpoint.header import parse_header, read_raw
from hfq.checkpoint.headers_only import HeadersOnlyCheckpoint
from hfq.checkpoint.index import JSON_LIMIT, parse_json, weight_map_of
from hfq.checkpoint.write_checkpoint import INDEX
from hfq.errors import CheckpointError
from hfq.formats.configs.source_config import SIDE_FILES
from hfq.integrations.hub.hub_errors import explain

__all__ = ["RemoteModel"]

SINGLE = "model.safetensors"
_TEXTS = ("config.json", "generation_config.json", "adapter_config.json", INDEX, *SIDE_FILES)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_THREADS = 8
_TIMEOUT = 30.0
_RETRIES = 3
_MOST_NBYTES = 1 << 30
"""The most bytes that are fetched of one model: 500 000 tensors take some 60 MB of headers."""


class RemoteModel:
    """One commit of a model on the hub.

    Attributes:
        repo: Its name, `organization/model`.
        commit: The commit that a revision meant when it was asked for.
        sizes: The bytes of each file.
        fetched_nbytes: The bytes of files that have been fetched.
    """

    def __init__(self, repo: str, revision: str | None = None) -> None:
        """Asks the hub for the commit of a revision, and for its files.

        Raises:
            CheckpointError: The hub has no such model or revision, does not give it, or cannot be reached.
        """
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT)
        except (
            Exception
        ) as error:  # of the hub's, the network's and the parser's many kinds, each gets its own text
            raise explain(error, repo, revision) from error
        self.repo, self.commit = repo, str(info.sha)
        self.sizes = {file.rfilename: file.size for file in info.siblings or () if isinstance(file.size, int)}
        self.fetched_nbytes, self._lock = 0, Lock()
        if not _COMMIT.fullmatch(self.commit):
            raise CheckpointError(
                "The hub named no commit for the model. Nothing was planned.",
                file=repo,
                expected="40 hexadecimal digits",
                found=repr(info.sha)[:80],
                fix=f"check HF_ENDPOINT; or download the model: hf download {repo}",
            )

    def fetch(self) -> HeadersOnlyCheckpoint:
        """The JSON files and the headers, each validated as that of a local file.

        Raises:
            CheckpointError: It is no safetensors checkpoint, a header is damaged, or the hub did not answer
                as it should.
        """
        self._check_files()
        texts = {name: self._text(name) for name in _TEXTS if name in self.sizes}
        shards = [SINGLE] if SINGLE in self.sizes else self._shards(texts[INDEX])
        return HeadersOnlyCheckpoint(texts, dict(zip(shards, _in_threads(self._head, shards), strict=True)))

    def _check_files(self) -> None:
        if "config.json" not in self.sizes or not {SINGLE, INDEX} & self.sizes.keys():
            raise CheckpointError(
                "The model on the hub is no safetensors checkpoint.",
                file=self.repo,
                expected=f"config.json, and {SINGLE} or {INDEX}",
                found=", ".join(sorted(self.sizes)[:12]) or "no files",
                fix="plan another revision or a converted copy; hfq never opens a pickle",
            )

    def _shards(self, index: bytes) -> list[str]:
        file = Path(self.repo, INDEX)
        names = sorted(set(weight_map_of(parse_json(index, file), file).values()))
        absent = [name for name in names if name not in self.sizes]
        if absent:
            raise CheckpointError(
                "The index names files that the model on the hub does not have.",
                file=file,
                problems=absent,
                fix="plan another revision, or ask the model's author to upload them",
            )
        return names

    def _text(self, name: str) -> bytes:
        size = self.sizes[name]
        if size > JSON_LIMIT:
            raise self._odd(
                name,
                "it is larger than a file of JSON may be",
                f"at most {JSON_LIMIT} bytes",
                f"{size} bytes",
            )
        return _RemoteFile(self, name, size).read_whole()

    def _head(self, name: str) -> tuple[bytes, int]:
        """The first bytes of a safetensors file, and its size."""
        size, label = self.sizes[name], f"{self.repo}/{name}"
        raw = read_raw(_RemoteFile(self, name, size), label, size)
        parse_header(raw, label, (0, size, 0))
        return len(raw).to_bytes(8, "little") + raw, size

    def take(self, name: str, nbytes: int) -> None:
        """Counts bytes that are about to be fetched.

        Raises:
            CheckpointError: They are more than a plan may fetch.
        """
        with self._lock:
            self.fetched_nbytes += nbytes
            if self.fetched_nbytes > _MOST_NBYTES:
                raise self._odd(
                    name, "the headers of this model are too large", f"at most {_MOST_NBYTES} bytes", "more"
                )

    def _odd(self, name: str, what: str, expected: str, found: object) -> CheckpointError:
        return CheckpointError(
            f"A file on the hub cannot be planned with: {what}.",
            file=f"{self.repo}/{name}",
            expected=expected,
            found=found,
            fix=f"try again; or download the model: hf download {self.repo} --revision {self.commit}",
        )


@dataclass
class _RemoteFile:
    """A file on the hub that is read from its start, by one range request for each `read`."""

    model: RemoteModel
    name: str
    size: int
    position: int = 0
    tag: str | None = None

    def read(self, nbytes: int, /) -> bytes:
        """The next bytes; fewer where the file ends."""
        wanted = min(nbytes, self.size - self.position)
        data = (
            self._get(wanted, {"Range": f"bytes={self.position}-{self.position + wanted - 1}"})
            if wanted > 0
            else b""
        )
        self.position += len(data)
        return data

    def read_whole(self) -> bytes:
        """All of the file."""
        return self._get(self.size, {})

    def _get(self, nbytes: int, asked: Mapping[str, str]) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        model = self.model
        model.take(self.name, nbytes)
        url = hf_hub_url(model.repo, self.name, revision=model.commit)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity", **asked}
        try:
            with http_stream_backoff(
                "GET", url, headers=headers, timeout=_TIMEOUT, max_retries=_RETRIES
            ) as response:
                hf_raise_for_status(response)
                self._check(response, nbytes, is_part=bool(asked))
                return self._body(response, nbytes)
        except CheckpointError:
            raise
        except Exception as error:  # as above
            raise explain(error, model.repo, model.commit, self.name) from error

    def _check(self, response: Any, nbytes: int, is_part: bool) -> None:
        """Whether this is an answer to what was asked, and of the file that was asked before."""
        if is_part and response.status_code != 206:
            raise CheckpointError(
                "The server does not give parts of files, without which hfq would have to download the "
                "weights. Nothing was planned.",
                file=f"{self.model.repo}/{self.name}",
                expected="206 Partial Content",
                found=f"status {response.status_code}",
                fix=f"use another HF_ENDPOINT, or download the model: hf download {self.model.repo}",
            )
        answers = [*response.history, response]
        commits = {answer.headers["x-repo-commit"] for answer in answers if "x-repo-commit" in answer.headers}
        first = answers[0].headers
        tag = first.get("x-linked-etag") or first.get("etag")
        wanted = f"bytes {self.position}-{self.position + nbytes - 1}/{self.size}"
        found = response.headers.get("content-range", "") if is_part else wanted
        if commits - {self.model.commit} or (self.tag is not None and tag != self.tag) or found != wanted:
            raise CheckpointError(
                "A file on the hub changed while it was read. Nothing was planned.",
                file=f"{self.model.repo}/{self.name}",
                expected=f"{wanted}, tag {self.tag}, commit {self.model.commit}",
                found=f"{found}, tag {tag}, commit {', '.join(commits) or 'unnamed'}",
                fix="try again",
            )
        self.tag = tag

    def _body(self, response: Any, nbytes: int) -> bytes:
        """The bytes of an answer, which is read no further than one chunk beyond what was asked for."""
        data, why = bytearray(), ""
        try:
            for chunk in response.iter_bytes(1 << 16):
                data += chunk
                if len(data) > nbytes:
                    break
        except (
            Exception
        ) as error:  # raised here, it would be taken for a failed request, which is tried again
            why = f" ({type(error).__name__})"
        if len(data) != nbytes:
            raise CheckpointError(
                "The hub's answer was cut short, or was too long. Nothing was planned.",
                file=f"{self.model.repo}/{self.name}",
                expected=f"{nbytes} bytes",
                found=f"{len(data)} bytes{why}",
                fix="try again; check the network, and a proxy in between",
            )
        return bytes(data)


def _in_threads(read: Callable[[str], tuple[bytes, int]], names: Iterable[str]) -> list[tuple[bytes, int]]:
    """What `read` gives for each name, in their order; the first failure ends the others."""
    with ThreadPoolExecutor(_THREADS, "hfq-hub") as pool:
        try:
            return list(pool.map(read, names))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
