"""Options `--push-to-hub` and `--private` of the verbs that write a checkpoint."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

__all__ = ["Private", "PushToHub", "Upload"]

PushToHub = Annotated[
    str | None,
    typer.Option(
        metavar="ORG/MODEL", help="Also upload OUT to this repository of the Hub, with a model card."
    ),
]
Private = Annotated[
    bool, typer.Option("--private", help="Create the repository of --push-to-hub as a private one.")
]


class Upload:
    """Upload of a new checkpoint, whose repository is created before the work begins.

    Args:
        repo: Value of `--push-to-hub`; None for no upload.
        private: Value of `--private`.
        model: The MODEL argument. The card names it as the base model if it is a Hub id.
    """

    def __init__(self, repo: str | None, private: bool, model: str) -> None:
        from hfq.checkpoint.index import split_gguf_path
        from hfq.errors import SetupError
        from hfq.integrations.hub.find import is_hub_id

        if repo is None and private:
            raise SetupError(
                "--private has no effect without --push-to-hub.",
                expected="--push-to-hub ORG/MODEL",
                found="--private",
                fix="Add --push-to-hub, or omit --private.",
            )
        self._repo = repo
        self._base_model = str(split_gguf_path(model)[0]) if is_hub_id(model) else None
        if repo is not None:
            from hfq.integrations.hub.upload import create_repository

            create_repository(repo, private)

    def finish(self, out: str) -> str | None:
        """Uploads a folder; returns the address of its repository, or None without an upload."""
        if self._repo is None:
            return None
        from hfq.integrations.hub.upload import upload_checkpoint

        if self._base_model is None:
            print(
                "note: MODEL is not a Hub id, so hfq adds no base_model to the model card.", file=sys.stderr
            )
        return upload_checkpoint(out, self._repo, self._base_model)
