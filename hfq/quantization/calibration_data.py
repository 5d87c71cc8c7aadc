"""Calibration data: text or tokens, cut into sequences of equal length."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hfq.checkpoint.small_file import read_utf8
from hfq.errors import SetupError, nearest
from hfq.loading.matching.quantizable_layers import optimum_gptq

__all__ = ["Calibration", "Text", "calibrate"]

logger = logging.getLogger(__name__)

DATASETS = ("wikitext2", "c4", "c4-new")
"""Datasets that optimum can load. It needs the package datasets for them."""

Text = str | Path | Sequence[str] | Sequence[torch.Tensor] | Sequence[Mapping[str, torch.Tensor]]
"""Path of a text file, name of an optimum dataset, texts, or token ids.

Token ids are tensors [1, length], or mappings that hold them as `input_ids`.
"""

_BATCH_TOKENS, _BATCH_NBYTES = 2048, 2 << 20


@dataclass(frozen=True)
class Calibration:
    """Token sequences that the model runs to calibrate a method.

    Attributes:
        tokens: int64 [samples, length].
        source: Short description of the origin.
    """

    tokens: torch.Tensor
    source: str

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens, as hex digits."""
        return hashlib.sha256(self.tokens.contiguous().numpy().tobytes()).hexdigest()

    def batches(self, width: int = 1) -> list[torch.Tensor]:
        """Splits the samples into batches of about 2048 tokens, or fewer for wide models.

        Args:
            width: Largest number of input or output channels of any layer. One float32 tensor of this width
                uses at most 2 MiB per batch, unless one sample is larger.
        """
        tokens = min(_BATCH_TOKENS, _BATCH_NBYTES // (4 * width))
        return list(self.tokens.split(max(1, tokens // self.tokens.shape[1])))


def calibrate(
    text: Text,
    tokenizer: Callable[[], Any],
    vocabulary: int,
    samples: int,
    length: int,
    longest: int | None = None,
) -> Calibration:
    """Cuts text or tokens into calibration sequences.

    Text is tokenized as a whole, and sequences are taken from it at even distances. Token ids are used
    unchanged, and each sequence is cut to `length`.

    Args:
        text: See `Text`.
        tokenizer: Function that loads the model's tokenizer. It is called for text, and not for token ids.
        vocabulary: Number of tokens that the model knows.
        samples: Number of sequences. If the text holds fewer, all are used and a warning is logged.
        length: Tokens per sequence.
        longest: Number of positions of the model. None if unknown.

    Raises:
        SetupError: The text is missing, empty, or shorter than one sequence, a token is not in the model's
            vocabulary, or a number is not valid.
    """
    for option, value in (("num_calibration_samples", samples), ("max_seq_length", length)):
        if type(value) is not int or value < 1:
            raise _unusable(
                f"{option} is not positive", "a positive int", repr(value), f"Pass a positive {option}."
            )
    if longest is not None and length > longest:
        raise _unusable(
            "sequences are longer than the model's positions",
            f"at most {longest}",
            length,
            "Lower max_seq_length.",
        )
    tokens, source = _tokens(text, tokenizer, samples, length)
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary):
        raise _unusable(
            "it contains tokens that the model does not know",
            f"ids in [0, {vocabulary})",
            f"{int(tokens.min())} to {int(tokens.max())}",
            "Tokenize the text with the model's own tokenizer.",
        )
    if len(tokens) < samples:
        logger.warning(
            "The calibration data contains %d sequences of %d tokens instead of %d.",
            len(tokens),
            length,
            samples,
        )
    return Calibration(tokens[:samples].contiguous(), source)


def _tokens(text: Text, tokenizer: Callable[[], Any], samples: int, length: int) -> tuple[torch.Tensor, str]:
    if isinstance(text, str) and text in DATASETS:
        return _dataset(text, tokenizer(), samples, length), text
    if isinstance(text, (str, Path)):
        path = Path(text)
        try:
            content = read_utf8(path)
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(
                f"The file of the calibration data cannot be read.{nearest(str(text), DATASETS)}",
                file=path,
                expected=f"a file of UTF-8 text, or one of {', '.join(DATASETS)}",
                found=error.strerror if isinstance(error, OSError) else error,
                fix="Pass a text file, or the name of a dataset, as `dataset`.",
            ) from error
        return _windows([content], tokenizer, samples, length), path.name
    items: list[Any] = list(text) if isinstance(text, Iterable) else []
    if items and all(isinstance(item, str) for item in items):
        return _windows(["\n\n".join(items)], tokenizer, samples, length), f"{len(items)} texts"
    ids = [item["input_ids"] if isinstance(item, Mapping) and "input_ids" in item else item for item in items]
    if not ids or not all(isinstance(item, torch.Tensor) and not item.is_floating_point() for item in ids):
        found = "nothing" if not items else type(items[0]).__name__
        raise _unusable(
            "it is neither text nor tokens",
            "a path, the name of a dataset, texts, or token ids",
            found,
            "Pass one of these.",
        )
    rows = [row for item in ids for row in item.reshape(-1, item.shape[-1]) if len(row) >= length]
    if not rows:
        raise _too_short(max(item.shape[-1] for item in ids), length)
    return torch.stack([row[:length] for row in rows]).to(torch.int64), f"{len(ids)} token sequences"


def _windows(texts: Sequence[str], tokenizer: Callable[[], Any], samples: int, length: int) -> torch.Tensor:
    if not texts[0].strip():
        raise _unusable("the text is empty", "text", "none", "Pass a file that contains text.")
    ids = torch.tensor(tokenizer()(texts[0])["input_ids"], dtype=torch.int64)
    windows = ids.numel() // length
    if not windows:
        raise _too_short(ids.numel(), length)
    cut = ids[: windows * length].view(windows, length)
    chosen = (torch.arange(min(samples, windows)) * windows) // min(samples, windows)
    return cut[chosen]


def _dataset(name: str, tokenizer: Any, samples: int, length: int) -> torch.Tensor:
    try:
        found = optimum_gptq("data").get_dataset(name, tokenizer, nsamples=samples, seqlen=length)
    except SetupError:
        raise
    except Exception as error:
        raise _unusable(
            f"optimum cannot load {name}",
            "the package datasets, and network access or cached data",
            f"{type(error).__name__}: {' '.join(str(error).split())[:160]}",
            "Run pip install datasets, or pass a text file.",
        ) from error
    return torch.cat([item["input_ids"] for item in found])


def _too_short(found: int, length: int) -> SetupError:
    return _unusable(
        "it is shorter than one sequence",
        f"at least {length} tokens",
        f"{found} tokens",
        "Pass more text, or lower max_seq_length.",
    )


def _unusable(why: str, expected: object, found: object, fix: str) -> SetupError:
    return SetupError(f"The calibration data cannot be used: {why}.", expected=expected, found=found, fix=fix)
