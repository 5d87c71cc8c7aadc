"""Download of GGUF files from the Hub, before transformers looks for a config."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfq.checkpoint.gguf.split_files import parts_of
from hfq.integrations.hub.hub_errors import explain

__all__ = ["download_gguf"]

_OPTIONS = ("revision", "cache_dir", "force_download", "token", "local_files_only", "subfolder")


def download_gguf(repo: str, gguf_file: str, kwargs: Mapping[str, Any]) -> str:
    """Downloads a GGUF file with all parts of its split, and config.json, into the Hub's cache.

    Args:
        repo: Id of the model, `organization/model`.
        gguf_file: The name of the file, or of any part of a split.
        kwargs: Arguments of `from_pretrained`.

    Returns:
        The folder that contains `gguf_file`.

    Raises:
        CheckpointError: The Hub has no such file, denies access, or cannot be reached.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    options = {name: kwargs[name] for name in _OPTIONS if kwargs.get(name) is not None}
    names = [part.as_posix() for part in parts_of(Path(gguf_file))]
    name = names[0]
    try:
        if not (constants.HF_HUB_OFFLINE or options.get("local_files_only")):  # all files are of one commit
            info = HfApi(token=options.get("token")).model_info(repo, revision=options.get("revision"))
            options["revision"] = str(info.sha)
        with contextlib.suppress(EntryNotFoundError):  # some files have no config next to them
            hf_hub_download(repo, "config.json", **options)
        files = []
        for name in names:
            files.append(hf_hub_download(repo, name, **options))
    except Exception as error:  # the Hub, its HTTP client, and the disk raise many kinds
        raise explain(error, repo, kwargs.get("revision"), name) from error
    folder = Path(files[0])
    for _ in Path(gguf_file).parts:
        folder = folder.parent
    return str(folder)
