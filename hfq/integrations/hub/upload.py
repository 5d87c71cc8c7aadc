"""Upload of a new checkpoint to the Hub, with a model card that names its origin."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hfq.checkpoint.index import HUB_ID
from hfq.errors import CheckpointError, SetupError
from hfq.output_file import write_output_file

__all__ = ["create_repository", "upload_checkpoint"]

_CARD = "README.md"


def create_repository(repo: str, private: bool) -> None:
    """Creates a repository, so that a missing permission is found before any work.

    Args:
        repo: Id of the repository, `organization/model`. It may exist.
        private: True to hide a new repository.

    Raises:
        SetupError: The id is not valid.
        CheckpointError: The Hub denies access or cannot be reached.
    """
    from huggingface_hub import HfApi

    if HUB_ID.fullmatch(repo) is None:
        raise SetupError(
            f"--push-to-hub {repo} is not the id of a repository.",
            expected="organization/model",
            found=repo,
            fix="Pass an id such as --push-to-hub ORG/MODEL.",
        )
    try:
        HfApi().create_repo(repo, private=private, exist_ok=True)
    except Exception as error:  # the Hub, its HTTP client, and the network raise many kinds
        raise _refused(error, repo) from error


def upload_checkpoint(folder: str | os.PathLike, repo: str, base_model: str | None) -> str:
    """Completes the model card of a checkpoint and uploads its folder.

    The card keeps its text. hfq adds the library and tags, and names the source as the base model, unless the
    source's card already says of which model it is a quantization.

    Args:
        folder: The checkpoint.
        repo: Id of the repository, which exists.
        base_model: Id of the source on the Hub; None for a local folder.

    Returns:
        Address of the repository.

    Raises:
        CheckpointError: The Hub denies access or cannot be reached. The folder is complete.
    """
    from huggingface_hub import HfApi

    card = Path(folder, _CARD)
    write_output_file(card, _card(Path(folder), base_model))
    try:
        HfApi().upload_folder(
            repo_id=repo, folder_path=os.fspath(folder), commit_message="Add a checkpoint of hfq"
        )
    except Exception as error:
        raise _refused(error, repo, folder) from error
    return f"{HfApi().endpoint}/{repo}"


def _card(folder: Path, base_model: str | None) -> str:
    """Returns the text of a model card with metadata."""
    from huggingface_hub import ModelCard

    file = folder / _CARD
    text = file.read_text(encoding="utf-8") if file.exists() else f"# {folder.resolve().name}\n"
    card = ModelCard(text, ignore_metadata_errors=True)
    data: Any = card.data
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    method = (config.get("quantization_config") or {}).get("quant_method")
    is_known = data.get("base_model_relation") == "quantized"
    if base_model is not None and method is not None and not is_known:
        data.base_model, data.base_model_relation = base_model, "quantized"
    data.library_name = data.library_name or "transformers"
    tags = [*(data.tags or []), "hfq", *([str(method)] if method is not None else [])]
    data.tags = [*dict.fromkeys(tags)]
    return str(card)


def _refused(error: Exception, repo: str, folder: object = None) -> CheckpointError:
    from huggingface_hub import constants

    status = getattr(getattr(error, "response", None), "status_code", None)
    done = f" The checkpoint is complete in {folder}." if folder is not None else " Nothing was written."
    if constants.HF_HUB_OFFLINE:
        return CheckpointError(
            f"HF_HUB_OFFLINE prevents an upload.{done}",
            file=repo,
            expected="a network",
            found="HF_HUB_OFFLINE",
            fix="Unset HF_HUB_OFFLINE, or omit --push-to-hub.",
        )
    denied = status in (401, 403)
    again = f"hf upload {repo} {folder}" if folder is not None else "the same command again"
    return CheckpointError(
        f"The Hub {'denies' if denied else 'did not complete'} the upload.{done}",
        file=repo,
        expected="a token with write access" if denied else "a response",
        found=f"status {status}" if status is not None else f"{type(error).__name__}: {str(error)[:160]}",
        fix=f"Run hf auth login with a token that may write, then run {again}.",
    )
