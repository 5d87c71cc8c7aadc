"""Comparison of two checkpoints or two placements by bytes, values, and logits."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from hfq.evaluation.divergence import score_logits
from hfq.evaluation.placed_models import load_model
from hfq.evaluation.progress import Progress
from hfq.evaluation.text import read_text, tokenize
from hfq.evaluation.weights import Distance, Unit, Weights, digest, distance
from hfq.tables import Displayed, Table

__all__ = ["Difference", "LogitDistance", "Comparison", "compare", "load_exactly"]

Kind = Literal[
    "other format",
    "other dtype",
    "inflated",
    "quantized",
    "other values",
    "re-initialised",
    "other shape",
    "missing",
    "extra",
]
SAME_NUMBERS = ("other format", "other dtype")
"""Differences in stored bytes only. The values are equal."""

_PROMPT_TOKENS = 32
_UNRELATED_COSINE = 0.1
_FEW_ELEMENTS = 256
_MOST_ROWS = 20


@dataclass(frozen=True)
class Difference:
    """One weight whose stored bytes differ.

    Attributes:
        name: Name in the model.
        kind: `other format` and `other dtype`: equal values in other bytes. `inflated`: quantized in A and
            unquantized in B. `quantized`: the reverse. `re-initialised`: unrelated values. `missing`: not in
            B. `extra`: not in A.
        first: Format in A, or None.
        second: Format in B, or None.
        distance: Distance between the values. None if they cannot be compared.
    """

    name: str
    kind: Kind
    first: str | None
    second: str | None
    distance: Distance | None = None


@dataclass(frozen=True)
class LogitDistance:
    """Equality of the logits of one prompt, and their distance: KL(A || B) in nats."""

    tokens: int
    is_equal: bool
    max_abs: float
    relative_l2: float
    kl_mean: float
    top1_agreement: float

    def __str__(self) -> str:
        return (
            f"logits of {self.tokens:,} tokens: {'equal' if self.is_equal else 'not equal'}, largest "
            f"difference {self.max_abs:.3e}, relative L2 {self.relative_l2:.3e}, KL(A || B) "
            f"{self.kl_mean:.3e} nats, top-1 agreement {self.top1_agreement:.2%}"
        )


@dataclass(frozen=True, repr=False)
class Comparison(Displayed):
    """Result of `compare`.

    Attributes:
        equal: True if all weights have equal values, none was inflated or quantized, and the logits are
            bit-identical.
        weights: Number of distinct weights in both models.
        identical: Number of weights whose stored bytes are equal.
        differences: All other weights.
        logits: Comparison of the logits. None if not requested, or if the vocabularies differ.
        digests: SHA-256 of every stored tensor: weight → local name → (in A, in B).
    """

    first: str
    second: str
    equal: bool
    weights: int
    identical: int
    differences: tuple[Difference, ...]
    logits: LogitDistance | None
    digests: Mapping[str, Mapping[str, tuple[str | None, str | None]]]

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self.equal:
            return "the same model" if not self.differences else "the same model: equal values in other bytes"
        kinds = Counter(each.kind for each in self.differences if each.kind not in SAME_NUMBERS)
        parts = [
            f"{count} weights {kind}" if kind not in ("missing", "extra") else f"{count} {kind}"
            for kind, count in kinds.items()
        ]
        if self.logits is not None and not self.logits.is_equal:
            parts.append(f"logits {self.logits.relative_l2:.2e} apart (relative L2)")
        return f"not the same model: {', '.join(parts)}"

    def __str__(self) -> str:
        lines = [self.verdict, f"{self.identical:,} of {self.weights:,} weights have the same bytes"]
        if self.logits is not None:
            lines.append(str(self.logits))
        return "\n".join(lines)

    def _table(self) -> Table:
        rows = [
            (each.name, each.kind, each.first or "-", each.second or "-")
            for each in self.differences[:_MOST_ROWS]
        ]
        left = len(self.differences) - len(rows)
        note = f"{self}\n… and {left:,} more weights that differ" if left else str(self)
        return Table(f"A: {self.first}, B: {self.second}", note, ("weight", "difference", "A", "B"), rows)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON-ready data."""
        return {"verdict": self.verdict, **asdict(self)}


def compare(
    first: str | os.PathLike | torch.nn.Module,
    second: str | os.PathLike | torch.nn.Module,
    *,
    device_map_a: str | dict | None = None,
    device_map_b: str | dict | None = None,
    text: str | os.PathLike | None = None,
    logits: bool = True,
    trust_remote_code: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Comparison:
    """Compares two checkpoints or placements weight by weight, and by the logits of one prompt.

    Everything runs in float32 with the reference kernel and unquantized activations. Equal values therefore
    give equal logits in every format.

    Args:
        first: A: folder of a checkpoint, or a model that hfq loaded.
        second: B: the same.
        device_map_a: Placement of A's weights. See `placed_models.as_device_map`.
        device_map_b: Placement of B's weights.
        text: Text file whose first 32 tokens are the prompt. None means fixed random ids.
        logits: True to compare logits, which runs both models once.
        trust_remote_code: True to run Python code that the checkpoints contain.
        on_progress: Function that is called before each weight, and before the logits.

    Raises:
        HfqError: A checkpoint cannot be loaded, or hfq did not load a model.
    """
    models = [
        source if isinstance(source, torch.nn.Module) else load_exactly(source, device_map, trust_remote_code)
        for source, device_map in ((first, device_map_a), (second, device_map_b))
    ]
    a, b = (Weights(model) for model in models)
    differences, digests = [], {}
    report = on_progress or (lambda progress: None)
    everything = list({**a.units, **b.units})
    for done, name in enumerate(everything):
        report(Progress(name, done, len(everything) + logits))
        found, digests[name] = _compare_unit(name, a, b)
        differences += [found] if found is not None else []
    if logits:
        report(Progress("logits", len(everything), len(everything) + 1))
    apart = _logit_distance(models, first, text, trust_remote_code) if logits else None
    numbers = all(each.kind in SAME_NUMBERS for each in differences)
    names = (_name(first), _name(second))
    same = numbers and (apart is None or apart.is_equal)
    count = len(digests)
    return Comparison(*names, same, count, count - len(differences), tuple(differences), apart, digests)


def load_exactly(
    path: str | os.PathLike, device_map: str | dict | None, trust_remote_code: bool = False
) -> torch.nn.Module:
    """Loads a model that computes in float32 with the reference kernel.

    Raises:
        HfqError: The model cannot be loaded.
    """
    return load_model(path, device_map, kernel="reference", trust_remote_code=trust_remote_code)


def _compare_unit(
    name: str, a: Weights, b: Weights
) -> tuple[Difference | None, dict[str, tuple[str | None, str | None]]]:
    """Returns the difference of one weight, or None, and the digests of its tensors."""
    first, second = a.units.get(name), b.units.get(name)
    held = a.tensors(first) if first else {}, b.tensors(second) if second else {}
    digests = {
        local: (
            digest(held[0][local]) if local in held[0] else None,
            digest(held[1][local]) if local in held[1] else None,
        )
        for local in {**held[0], **held[1]}
    }
    if first is None or second is None:
        kind: Kind = "missing" if second is None else "extra"
        return Difference(
            name, kind, first.format_name if first else None, second.format_name if second else None
        ), digests
    is_same = first.format_name == second.format_name and all(one == other for one, other in digests.values())
    if is_same and first.shape == second.shape:
        return None, digests
    return _judge(first, second, held), digests


def _judge(first: Unit, second: Unit, held: tuple[dict, dict]) -> Difference:
    formats = first.format_name, second.format_name
    shapes = [
        unit.shape[::-1] if unit.module is not None and unit.module.is_transposed else unit.shape
        for unit in (first, second)
    ]
    if shapes[0] != shapes[1]:
        return Difference(first.name, "other shape", *formats)
    apart = distance(first, second, held)
    if abs(apart.cosine) < _UNRELATED_COSINE and math.prod(first.shape) >= _FEW_ELEMENTS:
        return Difference(first.name, "re-initialised", *formats, apart)
    if first.is_quantized and not second.is_quantized:
        return Difference(first.name, "inflated", *formats, apart)
    if second.is_quantized and not first.is_quantized:
        return Difference(first.name, "quantized", *formats, apart)
    if apart.is_equal:
        return Difference(
            first.name, "other format" if first.is_quantized else "other dtype", *formats, apart
        )
    return Difference(first.name, "other values", *formats, apart)


def _logit_distance(
    models: list, source: Any, text: str | os.PathLike | None, trust_remote_code: bool
) -> LogitDistance | None:
    """Compares the logits of one prompt. Returns None if the vocabularies differ."""
    sizes = [model.config.get_text_config().vocab_size for model in models]
    if sizes[0] != sizes[1]:
        return None
    if text is None:
        prompt = torch.randint(sizes[0], (_PROMPT_TOKENS,), generator=torch.Generator().manual_seed(0))
    else:
        path = getattr(source, "name_or_path", source)  # a loaded model knows its folder
        prompt = tokenize(read_text(text), path, sizes[0], trust_remote_code)[:_PROMPT_TOKENS]
    with torch.no_grad():
        a, b = (
            model(input_ids=prompt[None].to(model.device), use_cache=False).logits[0].float().cpu()
            for model in models
        )
    gap = (a - b).double()
    divergences, agreed = score_logits(a, b)
    norm = float(a.double().norm())
    return LogitDistance(
        len(prompt),
        torch.equal(a.view(torch.int32), b.view(torch.int32)),
        float(gap.abs().max()),
        float(gap.norm()) / norm if norm else float(gap.norm() > 0),
        float(divergences.mean()),
        agreed / len(prompt),
    )


def _name(source: Any) -> str:
    return f"a loaded {type(source).__name__}" if isinstance(source, torch.nn.Module) else os.fspath(source)
