"""A text as token ids, by the tokenizer beside a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hfq.errors import SetupError

__all__ = ["read_text", "tokenize"]


def read_text(file: str | os.PathLike) -> str:
    """The text of a file.

    Raises:
        SetupError: It is not there, not UTF-8, or empty.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(
            "The text cannot be read.",
            file=file,
            expected="a text file in UTF-8",
            found=error,
            fix="correct --text",
        ) from error
    if not text.strip():
        raise SetupError(
            "The text is empty.",
            file=file,
            expected="a text of some thousand words",
            found="nothing but space",
            fix="pass another file as --text",
        )
    return text


def tokenize(text: str, path: str | os.PathLike, vocabulary: int) -> torch.Tensor:
    """The token ids of a text, int64 [n].

    Args:
        text: The text.
        path: The checkpoint's folder, with its tokenizer.
        vocabulary: The rows of the model's embedding.

    Raises:
        SetupError: There is no tokenizer, it knows more tokens than the model, or it makes no tokens of the
            text.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
    except Exception as error:  # a tokenizer fails in as many ways as there are tokenizers
        raise SetupError(
            "The checkpoint's tokenizer cannot be loaded.",
            file=path,
            expected="tokenizer.json or another tokenizer's files",
            found=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}",
            fix="copy the tokenizer's files of the original model into the folder",
        ) from error
    if len(tokenizer) > vocabulary or (tokens.numel() and int(tokens.max()) >= vocabulary):
        raise SetupError(
            "The tokenizer is not the model's: it knows more tokens.",
            file=path,
            expected=f"at most {vocabulary} tokens",
            found=f"{len(tokenizer)} tokens",
            fix="put the tokenizer of this model into the folder",
        )
    if not tokens.numel():
        raise SetupError(
            "The tokenizer makes no tokens of the text.",
            file=path,
            expected="tokens",
            found="none",
            fix="pass another text",
        )
    return tokens
