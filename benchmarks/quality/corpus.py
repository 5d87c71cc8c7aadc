"""Text that every Python installation carries: to train small models on, to calibrate them with, and to hold
out.

It is the docstrings of the standard library, the language reference behind `help()` and Python's licence.
Which part a document belongs to depends on its own bytes alone.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from hfq.errors import CheckpointError

__all__ = ["PARTS", "Corpus", "kept", "part_of", "publish", "read_documents", "read_topics"]

PARTS = ("held out", "calibration", "training")
_END = "</s>"
_SKIPPED = {"site-packages", "test", "tests", "idle_test", "lib2to3"}


def read_documents() -> list[str]:
    """The documents, in a fixed order: one for each module that has docstrings, each help topic, the
    licence.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(library.rglob("*.py")):
        if _SKIPPED & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes)]
        documents.append("\n\n".join(text for text in docstrings if text and len(text) > 40))
    documents += read_topics()
    documents += [path.read_text(encoding="utf-8") for path in sorted(library.glob("LICENSE*"))]
    return [text for text in documents if len(text) > 200]


def read_topics() -> list[str]:
    """The help topics alone, which are one file: a quarter of the text."""
    import pydoc_data.topics

    return [text for _, text in sorted(pydoc_data.topics.topics.items())]


def part_of(document: str) -> str:
    """One of `PARTS`: of twenty documents about one is held out, one calibrates, the others are trained
    on.
    """
    return {0: PARTS[0], 1: PARTS[1]}.get(hashlib.sha256(document.encode()).digest()[0] % 20, PARTS[2])


@dataclass(frozen=True)
class Corpus:
    """The text as tokens.

    Attributes:
        key: Changes where the tokens may: the Python whose text it is, the tokenizer's version and
            vocabulary.
        tokens: int64 [n] of each of `PARTS`.
    """

    key: str
    tokens: dict[str, torch.Tensor]

    @classmethod
    def make(cls, folder: Path, vocabulary: int, is_small: bool = False) -> Corpus:
        """Trains a tokenizer on the training part and tokenizes all three, or takes what an earlier run left
        in `folder`.

        Args:
            folder: Holds corpora and models between runs.
            vocabulary: Entries of the byte-pair encoding.
            is_small: Whether to take the help topics alone.

        Raises:
            CheckpointError: What an earlier run left is damaged.
        """
        import tokenizers
        from safetensors.torch import load_file, save_file

        key = f"{'topics' if is_small else 'library'}-{vocabulary}-python{platform.python_version()}-{tokenizers.__version__}"
        path = folder / f"quality-text-{key}"
        if not path.is_dir():
            tokens = _tokenize(read_topics() if is_small else read_documents(), vocabulary)
            publish(path, lambda made: save_file(tokens, made / "tokens.safetensors"))
        with kept(path):
            return cls(key, load_file(path / "tokens.safetensors"))


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """Makes a folder by `write(temporary folder)`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        write(made)
        if not path.exists():
            os.rename(made, path)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def kept(path: Path) -> Iterator[None]:
    """Names a folder that an earlier run left where it cannot be read.

    Raises:
        CheckpointError: It cannot.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            "What an earlier run of this benchmark left cannot be read.",
            file=path,
            expected="a folder that was finished",
            found=str(error),
            fix="delete this folder; it is made anew",
        ) from error


def _tokenize(documents: list[str], vocabulary: int) -> dict[str, torch.Tensor]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    for document in documents:
        parts[part_of(document)].append(document)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<s>", _END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(parts["training"], trainer)
    end = tokenizer.token_to_id(_END)
    return {
        part: torch.tensor([token for each in tokenizer.encode_batch(texts) for token in [*each.ids, end]])
        for part, texts in parts.items()
    }
