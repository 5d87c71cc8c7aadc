"""Refusal of Python code that a checkpoint contains, unless the caller trusts it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hfq.checkpoint.gguf.split_files import find_gguf
from hfq.checkpoint.index import split_gguf_path
from hfq.errors import SetupError

__all__ = ["load_tokenizer", "refusing_custom_code"]

_TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece")
"""Starts of the names of a tokenizer's files."""


@contextlib.contextmanager
def refusing_custom_code(path: Any) -> Iterator[None]:
    """A context manager that names the error of transformers for code that is not trusted.

    transformers raises it for `trust_remote_code=False`. For None it would ask the user instead.

    Args:
        path: The checkpoint.

    Raises:
        SetupError: The checkpoint requires custom code.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise SetupError(
            "The checkpoint requires custom code, which hfq does not run unless you trust it. "
            "Nothing was loaded.",
            file=path,
            expected="a model and a tokenizer of transformers",
            found="auto_map in a JSON file of the checkpoint",
            fix="Read the checkpoint's Python files. If you trust them, pass trust_remote_code=True; hfq "
            "quantize, evaluate, and compare take --trust-remote-code.",
        ) from error


def load_tokenizer(path: str | os.PathLike, trust_remote_code: bool = False) -> Any:
    """Loads the tokenizer of a checkpoint, and tokenizes a word to find damaged files early.

    The files of a tokenizer are preferred to the metadata of a GGUF file.

    Args:
        path: Folder of the checkpoint, or path of a GGUF file.
        trust_remote_code: True to run Python code that the checkpoint contains.

    Raises:
        SetupError: The tokenizer is missing or not valid, or requires custom code that is not trusted.
    """
    from transformers import AutoTokenizer

    folder, name = split_gguf_path(path)
    if any(file.name.startswith(_TOKENIZER_FILES) for file in _files_of(folder)):
        name = None
    elif name is None and os.path.isdir(folder):
        found = find_gguf(Path(folder))
        name = None if found is None else found.name
    options = {} if name is None else {"gguf_file": name}
    try:
        with refusing_custom_code(path):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **options)
        tokenizer("a")["input_ids"]
    except SetupError:
        raise
    except Exception as error:  # tokenizers raise many types of errors
        raise SetupError(
            "The checkpoint's tokenizer cannot be loaded.",
            file=path,
            expected="tokenizer.json or another tokenizer's files"
            + (", or the package gguf for the tokenizer in a GGUF file" if name is not None else ""),
            found=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}",
            fix="Copy the original model's tokenizer files into the folder.",
        ) from error
    return tokenizer


def _files_of(folder: str | os.PathLike) -> list[Path]:
    return list(Path(folder).iterdir()) if os.path.isdir(folder) else []
