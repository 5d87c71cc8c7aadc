"""Text from the Python installation for training, calibration, and evaluation of small models.

It consists of the docstrings of the standard library, the language reference behind `help()`, and Python's
license. A document's part depends only on its own bytes.
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
    """Returns the documents in a fixed order: docstrings per module, each help topic, the license."""
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
    """Returns only the help topics, which come from one file."""
    import pydoc_data.topics

    return [text for _, text in sorted(pydoc_data.topics.topics.items())]


def part_of(document: str) -> str:
    """Returns one of `PARTS`: about one document in twenty is held out, and one calibrates."""
    return {0: PARTS[0], 1: PARTS[1]}.get(hashlib.sha256(document.encode()).digest()[0] % 20, PARTS[2])


@dataclass(frozen=True)
class Corpus:
    """The text as tokens.

    Attributes:
        key: Changes if the tokens may change: the Python version, and the tokenizer's version and vocabulary.
        tokens: int64 [n] for each of `PARTS`.
    """

    key: str
    tokens: dict[str, torch.Tensor]

    @classmethod
    def make(cls, folder: Path, vocabulary: int, is_small: bool = False) -> Corpus:
        """Trains a tokenizer on the training part and tokenizes all parts.

        Results of an earlier run in `folder` are reused.

        Args:
            folder: Folder that keeps corpora and models between runs.
            vocabulary: Entries of the byte-pair encoding.
            is_small: True to use only the help topics.

        Raises:
            CheckpointError: The results of an earlier run are damaged.
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
    """Creates a folder with `write(temporary folder)`, either completely or not at all."""
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
    """Turns read errors into an error that names the damaged folder of an earlier run.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            "The results of an earlier run of this benchmark cannot be read.",
            file=path,
            expected="a complete folder",
            found=str(error),
            fix="Delete this folder. The next run makes it again.",
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
