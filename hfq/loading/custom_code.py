"""Refusal of Python code that a checkpoint contains, unless the caller trusts it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from hfq.errors import SetupError

__all__ = ["load_tokenizer", "refusing_custom_code"]


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

    Args:
        path: Folder of the checkpoint.
        trust_remote_code: True to run Python code that the checkpoint contains.

    Raises:
        SetupError: The tokenizer is missing or not valid, or requires custom code that is not trusted.
    """
    from transformers import AutoTokenizer

    try:
        with refusing_custom_code(path):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        tokenizer("a")["input_ids"]
    except SetupError:
        raise
    except Exception as error:  # tokenizers raise many types of errors
        raise SetupError(
            "The checkpoint's tokenizer cannot be loaded.",
            file=path,
            expected="tokenizer.json or another tokenizer's files",
            found=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}",
            fix="Copy the original model's tokenizer files into the folder.",
        ) from error
    return tokenizer
