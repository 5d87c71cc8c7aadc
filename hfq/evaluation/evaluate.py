"""Evaluation of checkpoints: perplexity, divergence from a reference, and size."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from hfq.errors import SetupError
from hfq.evaluation.divergence import Score
from hfq.evaluation.perplexity import score, score_against
from hfq.evaluation.placed_models import ModelSize, load_model, text_config
from hfq.evaluation.progress import Progress
from hfq.evaluation.text import read_text, tokenize
from hfq.evaluation.windows import cut
from hfq.tables import Displayed, Table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Quality", "evaluate"]

logger = logging.getLogger(__name__)
_DEFAULT_LENGTH = 512
_SHAPE = ("model_type", "num_hidden_layers", "hidden_size")


@dataclass(frozen=True, repr=False)
class Quality(Displayed):
    """Result for one checkpoint.

    Attributes:
        path: The checkpoint.
        formats: Formats of its quantized layers.
        is_reference: True if the others are compared with it.
        score: Perplexity, and divergence from the reference.
        nbytes: Bytes of its files (see `ModelSize` for the sizes).
        weights: Number of weights.
        bits_per_weight: Bits of all stored tensors per weight.
        bits_per_quantized_weight: Bits per weight of quantized layers. None if no layer is quantized.
        load_seconds: Wall time of loading.
        seconds: Wall time of forward passes and scores. None for a reference, which runs in turns with the
            others.
    """

    path: str
    formats: str
    is_reference: bool
    score: Score
    nbytes: int
    weights: int
    bits_per_weight: float
    bits_per_quantized_weight: float | None
    load_seconds: float
    seconds: float | None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._facts())

    def _table(self) -> Table:
        note = "the reference" if self.is_reference else ""
        return Table(self.path, note, ("", "value"), self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        score = self.score
        facts = [
            ("checkpoint", self.path),
            ("formats", self.formats),
            ("perplexity", f"{score.perplexity:.4f}"),
            ("bits per weight", f"{self.bits_per_weight:.3f}"),
            ("bytes", f"{self.nbytes:,}"),
            ("tokens", f"{score.tokens:,}"),
        ]
        if score.kl_mean is not None and score.kl_p99 is not None and score.top1_agreement is not None:
            facts.append(("mean KL from the reference, nats", f"{score.kl_mean:.3e}"))
            facts.append(("99th percentile of KL, nats", f"{score.kl_p99:.3e}"))
            facts.append(("top-1 agreement", f"{score.top1_agreement:.2%}"))
        return facts

    def to_dict(self) -> dict:
        """Returns JSON-ready data, with the fields of the score at the top level."""
        fields = asdict(self)
        return {**{key: value for key, value in fields.items() if key != "score"}, **fields["score"]}


def evaluate(
    paths: Sequence[str | os.PathLike],
    text: str | os.PathLike,
    *,
    reference: str | os.PathLike | None = None,
    max_seq_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    device_map: str | dict | None = None,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[Quality]:
    """Scores checkpoints on a text. Loads one at a time, in addition to the reference.

    Args:
        paths: Folders of the checkpoints, each with its tokenizer.
        text: UTF-8 text file.
        reference: Model to compare with, which has the same tokenizer. It may be quantized.
        max_seq_length: Tokens per window. None means 512, or the models' limit if that is smaller.
        stride: Tokens between the starts of two windows. None means no overlap.
        batch_size: Windows per forward pass.
        device_map: Placement of the weights. See `placed_models.as_device_map`. None means all on the CPU.
        dtype: Dtype of activations and unquantized tensors.
        trust_remote_code: True to run Python code that the checkpoints contain.
        on_progress: Function that is called before each load of a checkpoint, and after each batch.

    Returns:
        The result of the reference, if there is one, and then one result per path.

    Raises:
        SetupError: The text, the tokenizers, the vocabularies, or the lengths do not fit. This is checked
            before anything is loaded.
        CheckpointError: A checkpoint is damaged, or its logits are not finite.
    """
    everything = [*paths, *([reference] if reference is not None else [])]
    configs = {os.fspath(path): text_config(path, trust_remote_code) for path in everything}
    length = _length(configs, max_seq_length)
    tokens = _tokens(read_text(text), configs, trust_remote_code)
    if reference is not None:
        _check_reference(os.fspath(reference), configs)
    batches = cut(tokens, length, stride, batch_size)
    steps = _Steps(len(paths) * len(batches) * (1 if reference is None else 2), on_progress)
    known = None
    rows = []
    first = None
    if reference is not None:
        steps.begin(f"{os.fspath(reference)} (reference)")
        known, known_seconds = _timed(reference, device_map, dtype, trust_remote_code)
    for path in paths:
        steps.begin(os.fspath(path))
        model, load_seconds = _timed(path, device_map, dtype, trust_remote_code)
        if known is None or reference is None:
            started = time.perf_counter()
            found = score(model, batches, steps.finish)
            seconds = time.perf_counter() - started
        else:
            vocabulary = configs[os.fspath(path)].vocab_size
            found, own, seconds = score_against(model, known, batches, vocabulary, steps.finish)
            first = first or _row(reference, known, own, known_seconds, None, is_reference=True)
        rows.append(_row(path, model, found, load_seconds, seconds))
        del model
    return rows if first is None else [first, *rows]


class _Steps:
    """Counts finished batches and reports them.

    Args:
        total: Number of all batches.
        on_progress: Function that receives each report; None for no reports.
    """

    def __init__(self, total: int, on_progress: Callable[[Progress], None] | None) -> None:
        self._total, self._on_progress = total, on_progress
        self._name, self._done = "", 0

    def begin(self, name: str) -> None:
        """Reports that a checkpoint is loaded."""
        self._name = name
        self._report()

    def finish(self) -> None:
        """Reports that a batch ended."""
        self._done += 1
        self._report()

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress(self._name, self._done, self._total))


def _row(
    path: str | os.PathLike,
    model: PreTrainedModel,
    found: Score,
    load_seconds: float,
    seconds: float | None,
    is_reference: bool = False,
) -> Quality:
    size = ModelSize(model)
    return Quality(
        os.fspath(path),
        size.formats,
        is_reference,
        found,
        size.nbytes,
        size.weights,
        size.bits_per_weight,
        size.bits_per_quantized_weight,
        load_seconds,
        seconds,
    )


def _timed(
    path: str | os.PathLike, device_map: str | dict | None, dtype: str, trust_remote_code: bool
) -> tuple[torch.nn.Module, float]:
    started = time.perf_counter()
    model = load_model(path, device_map, dtype, trust_remote_code=trust_remote_code)
    return model, time.perf_counter() - started


def _check_reference(reference: str, configs: dict) -> None:
    """Raises SetupError for another vocabulary than the reference's, and warns of another model."""
    known = configs[reference]
    for path, config in configs.items():
        if config.vocab_size != known.vocab_size:
            raise SetupError(
                "The reference has another vocabulary, so its logits cannot be compared. Nothing was loaded.",
                file=path,
                expected=f"the {known.vocab_size} tokens of {reference}",
                found=f"{config.vocab_size} tokens",
                fix="Pass the unquantized original of this model as the reference.",
            )
    for path, config in configs.items():
        differences = [
            f"{name} {getattr(config, name, None)} instead of {getattr(known, name, None)}"
            for name in _SHAPE
            if getattr(config, name, None) != getattr(known, name, None)
        ]
        if differences:
            logger.warning(
                "%s is not a version of the reference %s: %s. The divergence is that of two models.",
                path,
                reference,
                ", ".join(differences),
            )


def _length(configs: dict, wanted: int | None) -> int:
    most = min(
        (getattr(config, "max_position_embeddings", None) or 1 << 62 for config in configs.values()),
        default=1 << 62,
    )
    if wanted is not None and wanted > most:
        raise SetupError(
            f"max_seq_length={wanted} exceeds a model's limit.",
            expected=f"at most {most} tokens",
            found=wanted,
            fix="Pass a smaller `max_seq_length`.",
        )
    return wanted if wanted is not None else min(_DEFAULT_LENGTH, most)


def _tokens(text: str, configs: dict, trust_remote_code: bool) -> torch.Tensor:
    """Returns the text's token ids, which must be equal for all checkpoints."""
    found: torch.Tensor | None = None
    for path, config in configs.items():
        tokens = tokenize(text, path, config.vocab_size, trust_remote_code)
        if found is not None and not torch.equal(found, tokens):
            raise SetupError(
                "Two checkpoints have different tokenizers, so their perplexities cannot be compared.",
                file=path,
                expected=f"the {found.numel()} tokens of {next(iter(configs))}",
                found=f"{tokens.numel()} tokens that differ",
                fix="Evaluate checkpoints of one model only.",
            )
        found = tokens
    if found is None:
        raise SetupError(
            "No checkpoint was given.",
            expected="at least one checkpoint",
            found="none",
            fix="Pass a MODEL.",
        )
    return found
