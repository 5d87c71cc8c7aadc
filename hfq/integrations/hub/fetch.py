"""JSON files and safetensors headers of a model on the Hub, fetched by HTTP range requests.

All requests name one commit, so that two versions of a model never mix. They use the session of
huggingface_hub, which handles HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, and proxies, and retries busy servers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from hfq.checkpoint.gguf.header import parse_gguf
from hfq.checkpoint.gguf.split_files import choose_gguf, parts_of
from hfq.checkpoint.header import parse_header, read_raw
from hfq.checkpoint.headers_only import HeadersOnlyCheckpoint
from hfq.checkpoint.index import JSON_LIMIT, parse_json, weight_map_of
from hfq.checkpoint.write_checkpoint import INDEX
from hfq.errors import CheckpointError
from hfq.formats.configs.source_config import SIDE_FILES
from hfq.integrations.hub.deadline import within_deadline
from hfq.integrations.hub.hub_errors import explain

__all__ = ["RemoteModel"]

SINGLE = "model.safetensors"
_TEXTS = ("config.json", "generation_config.json", "adapter_config.json", INDEX, *SIDE_FILES)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_THREADS = 8
_TIMEOUT = 30.0
_RETRIES = 3
_SLOWEST = 256e3
"""Bytes per second that a server must send."""
_MOST_NBYTES = 1 << 30
"""Most bytes to fetch for one model; the headers of 500,000 tensors take about 60 MB."""


class RemoteModel:
    """One commit of a model on the Hub.

    Attributes:
        repo: Id of the model, `organization/model`.
        token: Token for the Hub, as in `from_pretrained`.
        subfolder: Folder of the checkpoint in the model; empty for the model itself.
        commit: Commit that the revision named at the time of the request.
        sizes: Size of each file in bytes, by its path in the subfolder.
        fetched_nbytes: Bytes of files that were fetched.
    """

    def __init__(
        self,
        repo: str,
        revision: str | None = None,
        token: str | bool | None = None,
        subfolder: str = "",
    ) -> None:
        """Asks the Hub for the commit of a revision, and for its files.

        Args:
            repo: Id of the model, `organization/model`.
            revision: Branch, tag, or commit; None for the default branch.
            token: Token for the Hub, as in `from_pretrained`.
            subfolder: Folder of the checkpoint in the model.

        Raises:
            CheckpointError: The Hub has no such model or revision, denies access, or cannot be reached.
        """
        from huggingface_hub import HfApi

        try:
            info = within_deadline(
                _deadline(0),
                lambda: HfApi(token=token).model_info(
                    repo, revision=revision, files_metadata=True, timeout=_TIMEOUT
                ),
            )
        except Exception as error:  # the Hub, the network, and the parser raise many kinds
            raise explain(error, repo, revision) from error
        self.repo, self.commit, self.subfolder = repo, str(info.sha), subfolder
        self.token, prefix = token, f"{subfolder}/" if subfolder else ""
        self.sizes = {
            file.rfilename.removeprefix(prefix): file.size
            for file in info.siblings or ()
            if isinstance(file.size, int) and file.rfilename.startswith(prefix)
        }
        self.fetched_nbytes, self._lock = 0, Lock()
        if not _COMMIT.fullmatch(self.commit):
            raise CheckpointError(
                "The Hub sent no commit for the model. Nothing was planned.",
                file=repo,
                expected="40 hexadecimal digits",
                found=repr(info.sha)[:80],
                fix=f"Check HF_ENDPOINT, or download the model: hf download {repo}",
            )

    @property
    def label(self) -> str:
        """Name of the checkpoint's folder, for messages."""
        return f"{self.repo}/{self.subfolder}" if self.subfolder else self.repo

    def fetch(self, gguf_file: str | None = None) -> HeadersOnlyCheckpoint:
        """Fetches and validates the JSON files and the headers.

        Args:
            gguf_file: The name of a GGUF file; None for safetensors, or for the only GGUF model.

        Raises:
            CheckpointError: The model is neither in safetensors nor in GGUF format, a header is damaged, or
                the Hub sent a wrong response.
        """
        if gguf_file is None and not {SINGLE, INDEX} & self.sizes.keys():
            gguf_file = choose_gguf(self.sizes, self.label)
        if gguf_file is not None:
            names = self._present([part.as_posix() for part in parts_of(Path(gguf_file))], gguf_file)
            texts = {name: self._text(name) for name in _TEXTS if name in self.sizes and name != INDEX}
            heads = zip(names, _in_threads(self._gguf_head, names), strict=True)
            return HeadersOnlyCheckpoint(texts, {Path(name).name: head for name, head in heads})
        self._check_files()
        texts = {name: self._text(name) for name in _TEXTS if name in self.sizes}
        shards = [SINGLE] if SINGLE in self.sizes else self._shards(texts[INDEX])
        return HeadersOnlyCheckpoint(texts, dict(zip(shards, _in_threads(self._head, shards), strict=True)))

    def _check_files(self) -> None:
        if "config.json" not in self.sizes or not {SINGLE, INDEX} & self.sizes.keys():
            raise CheckpointError(
                "The model on the Hub is neither a safetensors checkpoint nor a GGUF file.",
                file=self.label,
                expected=f"config.json, and {SINGLE} or {INDEX}; or a GGUF file",
                found=", ".join(sorted(self.sizes)[:12]) or "no files",
                fix="Plan another revision or a converted copy. hfq never opens a pickle.",
            )

    def _shards(self, index: bytes) -> list[str]:
        file = Path(self.label, INDEX)
        return self._present(sorted(set(weight_map_of(parse_json(index, file), file).values())), INDEX)

    def _present(self, names: list[str], source: str) -> list[str]:
        """Returns the names of files that all exist, or raises an error that names the others."""
        absent = [name for name in names if name not in self.sizes]
        if absent:
            raise CheckpointError(
                "The model on the Hub does not have all files of the checkpoint.",
                file=Path(self.label, source),
                problems=absent,
                fix="Check the name, plan another revision, or ask the model's author to upload the files.",
            )
        return names

    def _text(self, name: str) -> bytes:
        size = self.sizes[name]
        if size > JSON_LIMIT:
            raise self._odd(
                name,
                "it is too large for a JSON file",
                f"at most {JSON_LIMIT} bytes",
                f"{size} bytes",
            )
        return _RemoteFile(self, name, size).read_whole()

    def _head(self, name: str) -> tuple[bytes, int]:
        """Returns the first bytes of a safetensors file, and its size."""
        size, label = self.sizes[name], f"{self.label}/{name}"
        raw = read_raw(_RemoteFile(self, name, size), label, size)
        parse_header(raw, label, (0, size, 0))
        return len(raw).to_bytes(8, "little") + raw, size

    def _gguf_head(self, name: str) -> tuple[bytes, int]:
        """Returns the first bytes of a GGUF file, and its size."""
        size = self.sizes[name]
        kept = _KeptBytes(_RemoteFile(self, name, size))
        header = parse_gguf(kept, f"{self.label}/{name}", (0, size, 0))
        return bytes(kept.data[: header.data_start]), size

    def take(self, name: str, nbytes: int) -> None:
        """Counts bytes before they are fetched.

        Raises:
            CheckpointError: The total exceeds the limit for a plan.
        """
        with self._lock:
            self.fetched_nbytes += nbytes
            if self.fetched_nbytes > _MOST_NBYTES:
                raise self._odd(
                    name, "the headers of this model are too large", f"at most {_MOST_NBYTES} bytes", "more"
                )

    def _odd(self, name: str, what: str, expected: str, found: object) -> CheckpointError:
        return CheckpointError(
            f"A plan cannot use a file on the Hub: {what}.",
            file=f"{self.label}/{name}",
            expected=expected,
            found=found,
            fix=f"Try again, or download the model: hf download {self.repo} --revision {self.commit}",
        )


@dataclass
class _KeptBytes:
    """Stream that keeps the bytes that were read from a file."""

    file: _RemoteFile
    data: bytearray = field(default_factory=bytearray)

    def read(self, nbytes: int, /) -> bytes:
        """Returns the next bytes."""
        part = self.file.read(nbytes)
        self.data += part
        return part


@dataclass
class _RemoteFile:
    """File on the Hub that is read from its start, with one range request per `read`."""

    model: RemoteModel
    name: str
    size: int
    position: int = 0
    tag: str | None = None

    def read(self, nbytes: int, /) -> bytes:
        """Returns the next bytes; fewer at the end of the file."""
        wanted = min(nbytes, self.size - self.position)
        data = (
            self._get(wanted, {"Range": f"bytes={self.position}-{self.position + wanted - 1}"})
            if wanted > 0
            else b""
        )
        self.position += len(data)
        return data

    def read_whole(self) -> bytes:
        """Returns the whole file."""
        return self._get(self.size, {})

    def _get(self, nbytes: int, asked: Mapping[str, str]) -> bytes:
        model = self.model
        model.take(self.name, nbytes)
        try:
            return within_deadline(_deadline(nbytes), lambda: self._request(nbytes, asked))
        except CheckpointError:
            raise
        except Exception as error:  # of many kinds, as above
            name = Path(model.subfolder, self.name).as_posix()
            raise explain(error, model.repo, model.commit, name) from error

    def _request(self, nbytes: int, asked: Mapping[str, str]) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        model = self.model
        url = hf_hub_url(model.repo, self.name, subfolder=model.subfolder, revision=model.commit)
        headers = {**build_hf_headers(token=model.token), "Accept-Encoding": "identity", **asked}
        with http_stream_backoff(
            "GET", url, headers=headers, timeout=_TIMEOUT, max_retries=_RETRIES
        ) as response:
            hf_raise_for_status(response)
            self._check(response, nbytes, is_part=bool(asked))
            return self._body(response, nbytes)

    def _check(self, response: Any, nbytes: int, is_part: bool) -> None:
        """Checks that a response has the requested bytes, from the same version of the file."""
        if is_part and response.status_code != 206:
            raise CheckpointError(
                "The server does not support range requests, which hfq needs to fetch only headers. "
                "Nothing was planned.",
                file=f"{self.model.label}/{self.name}",
                expected="206 Partial Content",
                found=f"status {response.status_code}",
                fix=f"Use another HF_ENDPOINT, or download the model: hf download {self.model.repo}",
            )
        answers = [*response.history, response]
        commits = {answer.headers["x-repo-commit"] for answer in answers if "x-repo-commit" in answer.headers}
        first = answers[0].headers
        tag = first.get("x-linked-etag") or first.get("etag")
        wanted = f"bytes {self.position}-{self.position + nbytes - 1}/{self.size}"
        found = response.headers.get("content-range", "") if is_part else wanted
        if commits - {self.model.commit} or (self.tag is not None and tag != self.tag) or found != wanted:
            raise CheckpointError(
                "A file on the Hub changed while hfq read it. Nothing was planned.",
                file=f"{self.model.label}/{self.name}",
                expected=f"{wanted}, tag {self.tag}, commit {self.model.commit}",
                found=f"{found}, tag {tag}, commit {', '.join(commits) or 'unnamed'}",
                fix="Try again.",
            )
        self.tag = tag

    def _body(self, response: Any, nbytes: int) -> bytes:
        """Returns the bytes of a response.

        Stops within one chunk after the requested size.
        """
        data, why = bytearray(), ""
        try:
            for chunk in response.iter_bytes(1 << 16):
                data += chunk
                if len(data) > nbytes:
                    break
        except Exception as error:  # if raised here, it would count as a failed request and be retried
            why = f" ({type(error).__name__})"
        if len(data) != nbytes:
            raise CheckpointError(
                "The Hub's response is too short or too long. Nothing was planned.",
                file=f"{self.model.label}/{self.name}",
                expected=f"{nbytes} bytes",
                found=f"{len(data)} bytes{why}",
                fix="Check the network and its proxy, and try again.",
            )
        return bytes(data)


def _deadline(nbytes: int) -> float:
    """Returns the seconds that a request for some bytes may take, with its retries."""
    return _TIMEOUT * (_RETRIES + 1) + nbytes / _SLOWEST


def _in_threads(read: Callable[[str], tuple[bytes, int]], names: Iterable[str]) -> list[tuple[bytes, int]]:
    """Returns the result of `read` for each name, in order; the first failure stops the others."""
    with ThreadPoolExecutor(_THREADS, "hfq-hub") as pool:
        try:
            return list(pool.map(read, names))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
