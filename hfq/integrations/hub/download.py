"""Download of whole models from the Hub, for commands that need weights."""

from __future__ import annotations

from hfq.integrations.hub.hub_errors import explain

__all__ = ["download_checkpoint"]

_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.md", "LICENSE*"]
"""Weights, configs, and tokenizers, without pickles and code."""

_IGNORED = ["consolidated*", "original/*"]
"""Copies of the weights in the layout of the model's author, which transformers does not read."""


def download_checkpoint(repo: str, revision: str | None = None) -> str:
    """Downloads the missing files of a model into the Hub's cache, and returns its folder.

    Args:
        repo: Id of the model, `organization/model`.
        revision: Branch, tag, or commit; None for the default branch.

    Raises:
        CheckpointError: The Hub has no such model or revision, denies access, or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    try:
        return str(
            snapshot_download(repo, revision=revision, allow_patterns=_FILES, ignore_patterns=_IGNORED)
        )
    except Exception as error:  # the Hub, its HTTP client, and the disk raise many kinds
        raise explain(error, repo, revision) from error
