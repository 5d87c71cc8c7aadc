"""Reading of text files, and tokenization with a checkpoint's tokenizer."""

from __future__ import annotations

import os

import torch

from hfq.checkpoint.small_file import read_utf8
from hfq.errors import SetupError
from hfq.loading.custom_code import load_tokenizer

__all__ = ["read_text", "tokenize"]


def read_text(file: str | os.PathLike) -> str:
    """Reads a text file.

    Raises:
        SetupError: The file is missing, not UTF-8, empty, or larger than 1 GiB.
    """
    try:
        text = read_utf8(file)
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(
            "The text file cannot be read.",
            file=file,
            expected="a UTF-8 text file",
            found=error.strerror if isinstance(error, OSError) else error,
            fix="Pass the path of a text file as --text.",
        ) from error
    if not text.strip():
        raise SetupError(
            "The text file is empty.",
            file=file,
            expected="a text of a few thousand words",
            found="only whitespace",
            fix="Pass another file as --text.",
        )
    return text


def tokenize(
    text: str, path: str | os.PathLike, vocabulary: int, trust_remote_code: bool = False
) -> torch.Tensor:
    """Tokenizes a text and returns its token ids, int64 [n].

    Args:
        text: The text.
        path: Folder of the checkpoint, with its tokenizer.
        vocabulary: Number of tokens that the model knows.
        trust_remote_code: True to run Python code that the checkpoint contains.

    Raises:
        SetupError: The tokenizer is missing, has more tokens than the model, or returns no tokens.
    """
    tokenizer = load_tokenizer(path, trust_remote_code)
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
    # transformers adds a token to the vocabulary of a GGUF file, which no text becomes
    if tokenizer.vocab_size > vocabulary or (tokens.numel() and int(tokens.max()) >= vocabulary):
        raise SetupError(
            "The tokenizer does not belong to the model, because it has more tokens.",
            file=path,
            expected=f"at most {vocabulary} tokens",
            found=f"{len(tokenizer)} tokens",
            fix="Put this model's tokenizer into the folder.",
        )
    if not tokens.numel():
        raise SetupError(
            "The tokenizer returns no tokens for the text.",
            file=path,
            expected="tokens",
            found="none",
            fix="Pass another text.",
        )
    return tokens
