"""Calibration sets: text, or tokens, cut into sequences of one length."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hfq.errors import SetupError
from hfq.loading.matching.quantizable_layers import optimum_gptq

__all__ = ["Calibration", "Text", "calibrate"]

logger = logging.getLogger(__name__)

DATASETS = ("wikitext2", "c4", "c4-new")
"""The sets that optimum knows; it loads them with the package datasets."""

Text = str | Path | Sequence[str] | Sequence[torch.Tensor] | Sequence[Mapping[str, torch.Tensor]]
"""A file of text, a set of optimum by name, texts, or token ids [1, length] by themselves or as
`input_ids`.
"""

_BATCH_TOKENS, _BATCH_NBYTES = 2048, 2 << 20


@dataclass(frozen=True)
class Calibration:
    """What a model is run on.

    Attributes:
        tokens: int64 [samples, length].
        source: What it was made of, in a few words.
    """

    tokens: torch.Tensor
    source: str

    @property
    def digest(self) -> str:
        """The sha256 of the tokens."""
        return hashlib.sha256(self.tokens.contiguous().numpy().tobytes()).hexdigest()

    def batches(self, width: int = 1) -> list[torch.Tensor]:
        """The samples in batches of about 2048 tokens, of fewer where a model is wide.

        Args:
            width: The most channels that a layer takes or gives; one such tensor of a batch takes 2 MiB, or
                one sample.
        """
        tokens = min(_BATCH_TOKENS, _BATCH_NBYTES // (4 * width))
        return list(self.tokens.split(max(1, tokens // self.tokens.shape[1])))


def calibrate(
    text: Text, tokenizer: Any, vocabulary: int, samples: int, length: int, longest: int | None = None
) -> Calibration:
    """Makes a calibration set.

    Text is tokenized as one, and sequences are taken at even distances over all of it. Tokens are taken as
    they are.

    Args:
        text: See `Text`.
        tokenizer: The model's tokenizer; None is enough for tokens.
        vocabulary: How many tokens the model knows.
        samples: How many sequences are wanted; where the text holds fewer, all are taken, and a warning says
            so.
        length: The tokens of each.
        longest: How many positions the model has, where it says so.

    Raises:
        SetupError: The text is empty, shorter than one sequence, or not there; tokens are not the model's; a
            number is unusable.
    """
    for option, value in (("num_calibration_samples", samples), ("max_seq_length", length)):
        if type(value) is not int or value < 1:
            raise _unusable(f"{option} must be positive", "a positive int", repr(value), f"correct {option}")
    if longest is not None and length > longest:
        raise _unusable(
            "sequences are longer than the model's positions",
            f"at most {longest}",
            length,
            "lower max_seq_length",
        )
    tokens, source = _tokens(text, tokenizer, samples, length)
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary):
        raise _unusable(
            "it holds tokens that the model does not know",
            f"ids in [0, {vocabulary})",
            f"{int(tokens.min())} to {int(tokens.max())}",
            "tokenize the text with the model's own tokenizer",
        )
    if len(tokens) < samples:
        logger.warning(
            "The calibration text holds %d sequences of %d tokens; %d were wanted.",
            len(tokens),
            length,
            samples,
        )
    return Calibration(tokens[:samples].contiguous(), source)


def _tokens(text: Text, tokenizer: Any, samples: int, length: int) -> tuple[torch.Tensor, str]:
    if isinstance(text, str) and text in DATASETS:
        return _dataset(text, tokenizer, samples, length), text
    if isinstance(text, (str, Path)):
        path = Path(text)
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unusable(
                f"its file cannot be read: {error}",
                f"a file of UTF-8 text, or one of {', '.join(DATASETS)}",
                str(path),
                "correct the path",
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
            "a path, the name of a set, texts, or token ids",
            found,
            "pass one of these",
        )
    rows = [row for item in ids for row in item.reshape(-1, item.shape[-1]) if len(row) >= length]
    if not rows:
        raise _too_short(max(item.shape[-1] for item in ids), length)
    return torch.stack([row[:length] for row in rows]).to(torch.int64), f"{len(ids)} token sequences"


def _windows(texts: Sequence[str], tokenizer: Any, samples: int, length: int) -> torch.Tensor:
    if tokenizer is None:
        raise _unusable(
            "the model has no tokenizer",
            "tokenizer files beside the weights",
            "none",
            "pass token ids, or add the files",
        )
    if not texts[0].strip():
        raise _unusable("the text is empty", "text", "none", "pass a file with text")
    ids = torch.tensor(tokenizer(texts[0])["input_ids"], dtype=torch.int64)
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
            f"optimum cannot load {name}: {error}",
            "the package datasets, and a network or its cache",
            type(error).__name__,
            "pip install datasets, or pass a file of text",
        ) from error
    return torch.cat([item["input_ids"] for item in found])


def _too_short(found: int, length: int) -> SetupError:
    return _unusable(
        "it is shorter than one sequence",
        f"at least {length} tokens",
        f"{found} tokens",
        "pass more text, or lower max_seq_length",
    )


def _unusable(why: str, expected: object, found: object, fix: str) -> SetupError:
    return SetupError(f"The calibration set cannot be used: {why}.", expected=expected, found=found, fix=fix)
