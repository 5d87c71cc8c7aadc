"""Download of whole models, or of one small file, from the Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hfq.checkpoint.gguf.split_files import parts_of
from hfq.checkpoint.index import split_gguf_path
from hfq.integrations.hub.find import is_hub_id
from hfq.integrations.hub.hub_errors import explain

__all__ = ["download_checkpoint", "has_legacy_model", "small_file"]

_SECONDS = 10.0
_LEGACY_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?<!\.gguf)")
"""The form of ids without an organization, such as gpt2. New models have none."""

_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.md", "LICENSE*"]
"""Weights, configs, and tokenizers, without pickles and code."""

_IGNORED = ["consolidated*", "original/*"]
"""Copies of the weights in the layout of the model's author, which transformers does not read."""


def download_checkpoint(model: str, revision: str | None = None) -> str:
    """Downloads the missing files of a model into the Hub's cache.

    Args:
        model: Id of the model, `organization/model`, or a GGUF file of it, `organization/model/file.gguf`.
        revision: Branch, tag, or commit; None for the default branch.

    Returns:
        The folder, or the path of the GGUF file.

    Raises:
        CheckpointError: The Hub has no such model or revision, denies access, or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    found, gguf_file = split_gguf_path(model)
    repo, patterns = str(found), _FILES
    if gguf_file is not None:
        patterns = [*_FILES[1:], *(part.as_posix() for part in parts_of(Path(gguf_file)))]
    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED)
    except Exception as error:  # the Hub, its HTTP client, and the disk raise many kinds
        raise explain(error, repo, revision) from error
    return str(folder) if gguf_file is None else str(Path(folder, gguf_file))


def has_legacy_model(name: str) -> bool:
    """Returns True if the Hub or its cache has a model of this name without an organization."""
    if not _is_legacy_id(name):
        return False
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return True
    try:
        HfApi().model_info(name, timeout=_SECONDS)  # without retries, which a typo would wait for
    except Exception:  # the Hub and its HTTP client raise many kinds; the path is then reported
        return False
    return True


def _is_legacy_id(name: str) -> bool:
    return not os.path.lexists(name) and _LEGACY_ID.fullmatch(name) is not None


def small_file(model: str, name: str) -> Path | None:
    """Returns a file of a model, which is downloaded if it is on the Hub; None if there is none.

    Args:
        model: Folder or Hub id, which may lack an organization. A GGUF file has no other files.
        name: Name of the file.

    Raises:
        CheckpointError: The Hub has no such model, denies access, or cannot be reached.
    """
    if not is_hub_id(model) and not _is_legacy_id(model):
        file = Path(model, name)
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    repo, gguf_file = split_gguf_path(model)
    if gguf_file is not None:
        return None
    try:
        return Path(hf_hub_download(str(repo), name))
    except RemoteEntryNotFoundError:  # its base class is also that of an unreachable Hub
        return None
    except Exception as error:  # the Hub, its HTTP client, and the disk raise many kinds
        raise explain(error, str(repo), None) from error
