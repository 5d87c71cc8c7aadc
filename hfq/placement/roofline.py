"""How long a placement takes, by the roofline: every resource works at its rate, the slowest decides. Pure data.

One step of a model reads what is streamed (from disk, or over the link to an accelerator) while it computes, so that it takes the
longer of the two (Williams et al., "Roofline: an insightful visual performance model", 2009). What it computes goes through every
weight once, at the rate of a product with its kind of weight, or of memory, and through the KV cache at that of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from hfq.placement.profile import Profile

__all__ = ["Prediction", "Work", "predict", "what_helps"]


@dataclass(frozen=True)
class Work:
    """What one step of a placed model does, in bytes but where another unit is named.

    Attributes:
        weights: {kind of weight: (weights, their bytes)} that a step multiplies by.
        streamed: What is read from disk for a step.
        copied: What is copied from the host's memory to an accelerator for a step.
        cache: What is read of the KV cache.
        rows: Rows of activations: the tokens that a step computes.
        layers: The layers.
        resting: What a load brings into memory.
        is_cached: Whether what is streamed stays in the page cache from one step to the next.
        is_on_cpu: Whether the CPU computes.
    """

    weights: Mapping[str, tuple[int, int]]
    streamed: int
    copied: int
    cache: int
    rows: int
    layers: int
    resting: int
    is_cached: bool = False
    is_on_cpu: bool = True


@dataclass(frozen=True)
class Prediction:
    """Seconds, by what they are spent on.

    Attributes:
        terms: {what: seconds of a step}: `disk`, `link`, `weights`, `cache`, `layers`.
        step_seconds: A step of one token for each sequence.
        rows: The tokens of a step.
        load_seconds: A load of files that are not in the page cache.
        dominant: The term that decides the step.
        source: Where the rates come from.
    """

    terms: Mapping[str, float]
    step_seconds: float
    rows: int
    load_seconds: float
    dominant: str
    source: str

    @property
    def tokens_per_second(self) -> float:
        """Over all sequences of the batch."""
        return self.rows / self.step_seconds if self.step_seconds else float("inf")

    def to_dict(self) -> dict:
        """The prediction as JSON-ready data."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


TERMS = {
    "disk": "reads from disk", "link": "copies over the link to the accelerator", "weights": "products with the weights",
    "cache": "reads of the KV cache", "layers": "the fixed cost of layers",
}  # fmt: skip
"""What each term of a prediction is, for people."""


def predict(work: Work, profile: Profile) -> Prediction:
    """The seconds of a load and of a step.

    Args:
        work: What they do.
        profile: The rates of the machine.
    """
    terms = {
        "disk": work.streamed / (profile.page_cache if work.is_cached else profile.disk),
        "link": work.copied / profile.host_to_device if profile.host_to_device else 0.0,
        "weights": sum(_product_seconds(kind, *sizes, work, profile) for kind, sizes in work.weights.items()),
        "cache": work.cache / profile.memory,
        "layers": work.layers * profile.layer_seconds,
    }
    computing = {name: terms[name] for name in ("weights", "cache", "layers")}
    moving = {name: terms[name] for name in ("disk", "link")}
    step = max(sum(computing.values()), *moving.values())
    dominant = (
        max(moving, key=moving.__getitem__) if step > sum(computing.values()) else max(computing, key=computing.__getitem__)
    )
    fixed, per_layer = profile.load_seconds
    load = work.resting / profile.disk + fixed + per_layer * work.layers
    return Prediction(terms, step, work.rows, load, dominant, profile.source)


def _product_seconds(kind: str, weights: int, nbytes: int, work: Work, profile: Profile) -> float:
    """One pass over these weights: at the measured rate of their product, else at that at which memory gives their bytes."""
    rate = profile.product_rate(kind, work.rows) if work.is_on_cpu else None
    return nbytes / profile.memory if rate is None else weights / rate


def what_helps(work: Work, profile: Profile) -> list[tuple[str, Prediction]]:
    """What each single change would give, best first: (the change, what is predicted with it)."""
    resident = replace(work, streamed=0, copied=0)
    changes = {
        "memory for all weights where they compute": (resident, profile),
        "a disk twice as fast": (work, replace(profile, disk=profile.disk * 2)),
        "a link twice as fast": (work, replace(profile, host_to_device=(profile.host_to_device or 0) * 2 or None)),
        "twice the sequences in a batch": (replace(work, rows=work.rows * 2, cache=work.cache * 2), profile),
        "products and memory twice as fast": (work, _faster(profile)),
    }
    now = predict(work, profile).tokens_per_second
    found = [(what, predict(*each)) for what, each in changes.items()]
    helping = [(what, prediction) for what, prediction in found if prediction.tokens_per_second > now * 1.01]
    return sorted(helping, key=lambda each: -each[1].tokens_per_second)


def _faster(profile: Profile) -> Profile:
    products = {kind: {rows: rate * 2 for rows, rate in rates.items()} for kind, rates in profile.products.items()}
    return replace(profile, memory=profile.memory * 2, products=products)
