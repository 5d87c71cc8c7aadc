"""Whole checkpoints from the Hub, for commands that read weights."""

from __future__ import annotations

import os

from hfq.integrations.hub.find import split_name
from hfq.integrations.hub.hub_errors import explain

__all__ = ["download_checkpoint"]

_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
"""Weights, configs, and tokenizers; never code."""


def download_checkpoint(path: str | os.PathLike, revision: str | None = None) -> str:
    """Returns the folder of a checkpoint with its weights, from the Hub if need be.

    Args:
        path: A folder; or a model of the Hub, as `organisation/model`.
        revision: A branch, a tag, or a commit of the Hub; None for the default branch.

    Raises:
        CheckpointError: The Hub has no such model, does not allow its download, or cannot be reached.
    """
    text = os.fspath(path)
    named = split_name(text)
    if named is None:
        return text
    from huggingface_hub import snapshot_download

    repo, named_revision = named
    wanted = revision or named_revision
    try:
        return str(snapshot_download(repo, revision=wanted, allow_patterns=_FILES))
    except Exception as error:  # Hub, network, and disk raise many kinds; each gets its own text
        raise explain(error, repo, wanted) from error
