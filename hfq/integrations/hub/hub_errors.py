"""Errors of hfq for failures of the Hub and the network."""

from __future__ import annotations

from hfq.errors import CheckpointError

__all__ = ["explain"]


def explain(
    error: Exception, repo: str, revision: str | None = None, name: str | None = None
) -> CheckpointError:
    """Returns the error to raise for one of huggingface_hub, its HTTP client, or the network.

    Args:
        error: The original error.
        repo: Id of the model.
        revision: Requested revision or commit; None for the default branch.
        name: Requested file; None for the list of files.
    """
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    found = (
        f"status {status}"
        if status is not None
        else f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    )
    file = repo if name is None else f"{repo}/{name}"
    is_offline = constants.HF_HUB_OFFLINE and isinstance(error, errors.LocalEntryNotFoundError)
    if is_offline or isinstance(error, errors.OfflineModeIsEnabled):
        return CheckpointError(
            "The model is neither a folder nor in the Hub's cache, and HF_HUB_OFFLINE prevents a download.",
            file=file,
            expected="a folder with config.json and *.safetensors, or a network",
            found="HF_HUB_OFFLINE",
            fix=f"Check the path, or unset HF_HUB_OFFLINE. On a machine with a network: hf download {repo}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(
            "The model on the Hub has no such revision.",
            file=file,
            expected="a branch, a tag, or a commit",
            found=repr(revision),
            fix=f"Use a revision from the file list of {repo}, for example --revision main.",
        )
    is_missing = isinstance(error, errors.RepositoryNotFoundError) and not isinstance(
        error, errors.GatedRepoError
    )
    if is_missing or isinstance(error, errors.HFValidationError) or (status == 404 and name is None):
        return CheckpointError(
            "The model is neither a folder nor an accessible model on the Hub.",
            file=file,
            found=found,
            expected="a folder with config.json and *.safetensors, or organization/model",
            fix="Check the path or the Hub id. For a private model, run hf auth login or set HF_TOKEN.",
        )
    if status in (401, 403):
        return CheckpointError(
            "The Hub denies access to this model.",
            file=file,
            expected="a token with read access",
            found=found,
            fix="Accept the terms on the model's page, then run hf auth login or set HF_TOKEN.",
        )
    return CheckpointError(
        "hfq cannot fetch the model from the Hub.",
        file=file,
        expected="a response",
        found=found,
        fix="Check the name, the network, and HF_ENDPOINT, and try again. Or download the model: hf "
        f"download {repo}",
    )
