"""The MODEL argument of every verb: a folder, a GGUF file, or the id of a model on the Hub."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hfq.integrations.hub.find import FoundCheckpoint

__all__ = ["Model", "Out", "Revision", "TrustRemoteCode", "check_path", "model_folder", "model_headers"]

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Folder, GGUF file, or Hub id of the checkpoint.")
]
Out = Annotated[str, typer.Argument(metavar="OUT", help="Folder to create; it must be absent or empty.")]
Revision = Annotated[
    str | None, typer.Option(metavar="REVISION", help="Branch, tag, or commit of MODEL on the Hub.")
]

TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that a checkpoint contains.")
]


@contextlib.contextmanager
def model_headers(model: str, revision: str | None = None) -> Iterator[FoundCheckpoint]:
    """A context manager that yields a folder with the headers of a model.

    For a model on the Hub, only headers are downloaded. Standard error reports how many bytes.

    Args:
        model: Folder or Hub id.
        revision: Branch, tag, or commit on the Hub; None for the default branch.

    Raises:
        CheckpointError: The Hub has no such model or revision, or cannot be reached.
        SetupError: The revision belongs to a folder, or is part of the id.
    """
    from hfq.integrations.hub.find import find_checkpoint

    _check_revision(model, revision)
    with find_checkpoint(model, revision) as found:
        if found.commit is not None:
            print(found, file=sys.stderr, flush=True)
        yield found


def model_folder(model: str, revision: str | None = None, option: str = "--revision") -> str:
    """Returns the folder of a model with its weights.

    A model on the Hub is downloaded into the Hub's cache.

    Args:
        model: Folder or Hub id.
        revision: Branch, tag, or commit on the Hub; None for the default branch.
        option: Option that holds the revision, for messages.

    Raises:
        CheckpointError: The Hub has no such model or revision, or cannot be reached.
        SetupError: The revision belongs to a folder, or is part of the id.
    """
    from hfq.integrations.hub.find import is_hub_id

    _check_revision(model, revision, option)
    if not is_hub_id(model):
        check_path(model)
        return model
    from hfq.integrations.hub.download import download_checkpoint

    return download_checkpoint(model, revision)


def check_path(model: str) -> None:
    """Raises an error for a model that is neither at this path nor named as on the Hub.

    It does not ask the Hub, and does not import torch. `@REVISION` may follow a Hub id.

    Args:
        model: Folder, GGUF file, or Hub id.

    Raises:
        CheckpointError: There is nothing at the path.
        SetupError: The name is empty.
    """
    from hfq.checkpoint.index import HUB_ID, Checkpoint, split_gguf_path

    _check_named(model)
    repo, _ = split_gguf_path(model.partition("@")[0])
    if not os.path.lexists(model) and not HUB_ID.fullmatch(str(repo)):
        Checkpoint.open(model)  # raises the error for a path with nothing


def _check_named(model: str) -> None:
    """Raises an error for an empty name."""
    from hfq.errors import SetupError

    if not model.strip():
        raise SetupError(
            "The name of the model is empty.",
            expected="a folder, or organization/model",
            found=repr(model),
            fix="Pass the folder of a checkpoint, or a Hub id such as Qwen/Qwen3-8B-AWQ.",
        )


def _check_revision(model: str, revision: str | None, option: str = "--revision") -> None:
    """Raises an error for a revision that would be ignored or misread."""
    from hfq.errors import SetupError
    from hfq.integrations.hub.find import is_hub_id

    _check_named(model)
    name, at, tag = model.partition("@")
    if at and is_hub_id(name) and not os.path.lexists(model):
        raise SetupError(
            f"{model} is not the id of a model.",
            expected="a folder, or organization/model",
            found=model,
            fix=f"Pass {name} {option} {tag}.",
        )
    if revision is not None and not is_hub_id(model):
        raise SetupError(
            f"{option} {revision} applies to models on the Hub only.",
            expected="organization/model",
            found=f"the path {model}",
            fix=f"Leave out {option}.",
        )
