"""Arguments of one `from_pretrained` call that transformers does not pass to quantizers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hfq.checkpoint import Checkpoint

if TYPE_CHECKING:
    from hfq.loading.page_cache import PageCacheReads

__all__ = [
    "LoadContext",
    "load_context",
    "opened_checkpoint",
    "remember_checkpoint",
    "remember_plan",
    "within_load",
]


@dataclass(frozen=True)
class LoadContext:
    """State of one `from_pretrained` call, available to all code below it.

    Attributes:
        is_active: True while hfq is responsible for a load.
        checkpoint: Checkpoint with validated headers; None until transformers has found its files.
        key_mapping: The argument `key_mapping`.
        ignores_sizes: The argument `ignore_mismatched_sizes`.
        experts_implementation: The argument `experts_implementation`.
        offload_folder: The argument `offload_folder`.
        max_memory: The argument `max_memory`.
        strategy: The argument `device_map` if transformers infers the map, else `"auto"`.
        stops_at_meta_model: True if the load ends before it reads weights, for `hfq plan`.
        chooses_attention: True if the user passes `attn_implementation`.
        planned: Planned bytes of weights by device; empty before the load is planned.
        page_cache_reads: Threads that read the checkpoint into the page cache; None if there are none.
    """

    is_active: bool = False
    checkpoint: Checkpoint | None = None
    key_mapping: dict[str, str] | None = None
    ignores_sizes: bool = False
    experts_implementation: Any = None
    offload_folder: str | os.PathLike | None = None
    max_memory: Mapping[int | str, int | str] | None = None
    strategy: str = "auto"
    stops_at_meta_model: bool = False
    chooses_attention: bool = False
    planned: Mapping[str, int] = field(default_factory=dict)
    page_cache_reads: PageCacheReads | None = None


# a frozen default cannot leak between contexts
_current: ContextVar[LoadContext] = ContextVar("hfq_load_context", default=LoadContext())  # noqa: B039


def load_context() -> LoadContext:
    """Returns the context of the current load, or an inactive context."""
    return _current.get()


@contextmanager
def within_load(**changes: Any) -> Iterator[LoadContext]:
    """Changes fields of the load context inside a `with` statement."""
    token = _current.set(replace(_current.get(), **changes))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def remember_checkpoint(checkpoint: Checkpoint) -> None:
    """Stores the validated checkpoint in the context of the current load."""
    _current.set(replace(_current.get(), checkpoint=checkpoint))


def remember_plan(planned: Mapping[str, int]) -> None:
    """Stores the planned bytes of weights by device in the context of the current load."""
    _current.set(replace(_current.get(), planned=planned))


def opened_checkpoint(files: list[str]) -> Checkpoint:
    """Returns the checkpoint of these files.

    Validates their headers unless the load has done so. Files of a local folder must be inside it.
    """
    checkpoint = _current.get().checkpoint
    if checkpoint is None:
        return Checkpoint.from_files(files)
    if set(checkpoint.headers) == set(files):
        return checkpoint
    return Checkpoint.from_files(files, root=checkpoint.root)
