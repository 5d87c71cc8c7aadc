"""What the hub's and the network's failures mean to somebody who wants to plan a model."""

from __future__ import annotations

from hfq.errors import CheckpointError

__all__ = ["explain"]


def explain(
    error: Exception, repo: str, revision: str | None = None, name: str | None = None
) -> CheckpointError:
    """The error to raise for one of huggingface_hub, of its HTTP client, or of the network.

    Args:
        error: What was raised.
        repo: The model.
        revision: The revision or commit that was asked for.
        name: The file that was asked for; None for the list of files.
    """
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    found = (
        f"status {status}"
        if status is not None
        else f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    )
    file = repo if name is None else f"{repo}/{name}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return CheckpointError(
            "The model is neither a folder nor in the cache of the hub, and HF_HUB_OFFLINE keeps hfq "
            "from asking for it.",
            file=file,
            expected="a folder with config.json and *.safetensors, or a network",
            found="HF_HUB_OFFLINE",
            fix=f"check the path; unset HF_HUB_OFFLINE; or, on a machine that is online: hf download {repo}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(
            "The model on the hub has no such revision.",
            file=file,
            expected="a branch, a tag or a commit",
            found=repr(revision),
            fix=f"Name one that is listed with the files of {repo}, for example --revision main.",
        )
    is_missing = isinstance(error, errors.RepositoryNotFoundError) and not isinstance(
        error, errors.GatedRepoError
    )
    if is_missing or isinstance(error, errors.HFValidationError) or (status == 404 and name is None):
        return CheckpointError(
            "The model is neither a folder nor a model of the hub that may be seen.",
            file=file,
            found=found,
            expected="a folder with config.json and *.safetensors, or organization/model",
            fix="check the path or the name; for a private model: hf auth login, or set HF_TOKEN",
        )
    if status in (401, 403):
        return CheckpointError(
            "The hub does not give this model without leave.",
            file=file,
            expected="a token that may read it",
            found=found,
            fix="accept the terms on the model's page, then: hf auth login, or set HF_TOKEN",
        )
    return CheckpointError(
        "The model could not be had from the hub.",
        file=file,
        expected="an answer",
        found=found,
        fix="check the name, the network and HF_ENDPOINT, and try again; or download the model: hf "
        f"download {repo}",
    )
