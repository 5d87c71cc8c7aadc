"""`python -m benchmarks quality`: published quality tables, reproduced on small models.

An OPT and a Llama of five million parameters are trained on Python's own documentation. Outlier features are
injected without changing the models' outputs. Every method of the tables is measured on held-out text.
Perplexities differ from those of large models. The benchmark checks which method is better, and by how much
at least (`orderings`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.quality import methods
from benchmarks.quality.corpus import Corpus
from benchmarks.quality.differences import differences
from benchmarks.quality.measure import Subject, largest_activation
from benchmarks.quality.orderings import orderings, quick_orderings
from benchmarks.quality.outliers import NONE, Outliers
from benchmarks.quality.quality_tables import chart, tables
from benchmarks.quality.training import CONTEXT, LLAMA, OPT, SMALL, Trained, Training, trained
from hfq.errors import HfqError
from hfq.machine_profile.machine_facts import machine_facts
from hfq.tables import Report

__all__ = ["bench_quality", "check_orderings"]

WINDOWS, CALIBRATION = 8, 16
THRESHOLD = 1.05
"""Threshold of outlier features, relative to the largest activation of the model without outliers."""

Make = Callable[[str, Outliers], Subject]


def bench_quality(folder: Path, quick: bool, say: Callable[[str], None]) -> Report:
    """Trains the models, or loads them from an earlier run, and makes the tables.

    Args:
        folder: Folder that keeps the text and the models between runs.
        quick: True to use one smaller model and a few rows of two tables, for tests.
        say: Function that receives progress lines.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    recipes = {"OPT": SMALL} if quick else {"OPT": OPT, "Llama": LLAMA}
    corpus = Corpus.make(folder, next(iter(recipes.values())).vocabulary, is_small=quick)
    models = {name: trained(recipe, corpus, folder, say) for name, recipe in recipes.items()}
    started = time.perf_counter(), time.process_time()
    calibration = corpus.tokens["calibration"].unfold(0, CONTEXT, CONTEXT)[:CALIBRATION]
    subjects: list[Subject] = []

    def make(name: str, outliers: Outliers) -> Subject:
        say(f"{name}, outliers: {outliers}")
        subjects.append(
            Subject.of(name, models[name].model, outliers, corpus.tokens["held out"], calibration, WINDOWS)
        )
        return subjects[-1]

    (_measure_some if quick else _measure_all)(make)
    records = [record for subject in subjects for record in subject.records]
    facts = machine_facts(folder) | _facts(recipes, models, corpus, subjects)
    took = time.perf_counter() - started[0], time.process_time() - started[1]
    facts["time"] = (
        ", ".join(
            f"training {name} {each.seconds:.0f} s ({each.processor_seconds:.0f} s of processors)"
            for name, each in models.items()
        )
        + f", all tables {took[0]:.0f} s ({took[1]:.0f} s of processors); {torch.get_num_threads()} threads"
    )
    targets = (quick_orderings if quick else orderings)(records)
    note = "Orderings, with their margins: where one does not hold, the command fails."
    shown = [differences(records), *tables(records)]
    return Report(
        "Quality: published tables on small models", facts, shown, targets, records, chart(records), note
    )


def check_orderings(report: Report) -> None:
    """Raises an error if the tables do not have the published order.

    Raises:
        HfqError: An ordering does not hold. The message lists each one with its margin.
    """
    broken = [str(target) for target in report.targets if target.verdict != "met"]
    if broken:
        raise HfqError(
            "The tables do not have the published order.",
            expected=f"{len(report.targets)} orderings",
            found=f"{len(report.targets) - len(broken)}",
            problems=broken,
            fix="Compare the tables with earlier ones. A method is worse, or the models differ (another torch, "
            "or another Python's text).",
        )


def _measure_all(make: Make) -> None:
    plain = make("OPT", NONE)
    threshold = THRESHOLD * largest_activation(plain)
    _measure_plain(plain, threshold)
    shifted = make("OPT", Outliers(shift=60))
    methods.measure_rtn(shifted, (4, 3, 2))
    methods.measure_gptq(shifted, (4, 3, 2))
    methods.measure_rounded(shifted, methods.WEIGHTS_ALONE)
    for gain in (4, 16, 100):
        methods.measure_int8(make("OPT", Outliers(gain, 3 * (gain - 1))), threshold)
    plain = make("Llama", NONE)
    threshold = THRESHOLD * largest_activation(plain)
    _measure_plain(plain, threshold)
    gained = make("Llama", Outliers(200))
    methods.measure_rtn(gained, (4, 3, 2))
    methods.measure_gptq(gained, (4, 3, 2), by_activation=False)
    methods.measure_int8(gained, threshold)


def _measure_plain(subject: Subject, threshold: float) -> None:
    methods.measure_rtn(subject, (4, 3, 2))
    methods.measure_gptq(subject, (4, 3, 2), by_activation=False)
    methods.measure_kmeans(subject, (4, 3, 2))
    methods.measure_rounded(subject, methods.WEIGHTS_ALONE)
    methods.measure_rounded(subject, methods.NUMBER_FORMATS)
    methods.measure_int8(subject, threshold)


def _measure_some(make: Make) -> None:
    plain = make("OPT", NONE)
    methods.measure_rtn(plain, (8, 3))
    shifted = make("OPT", Outliers(shift=60))
    methods.measure_rtn(shifted, (4, 3))
    methods.measure_gptq(shifted, (3,))
    rows = ("int8 absmax", "int8 absmax row-wise", "int8 zeropoint vector-wise", "absmax LLM.int8()")
    methods.measure_int8(make("OPT", Outliers(100, 297)), THRESHOLD * largest_activation(plain), rows)


def _facts(
    recipes: Mapping[str, Training], models: Mapping[str, Trained], corpus: Corpus, subjects: list[Subject]
) -> dict[str, str]:
    described = [
        f"{name}: {sum(p.numel() for p in models[name].model.parameters()):,} parameters, {recipe.layers} "
        f"blocks, hidden size "
        f"{recipe.hidden}, {recipe.steps * recipe.batch * CONTEXT:,} tokens of training, perplexity "
        f"{next(s.records[0]['perplexity'] for s in subjects if s.name == name):.2f}"
        for name, recipe in recipes.items()
    ]
    counts = ", ".join(f"{part} {len(tokens):,}" for part, tokens in corpus.tokens.items())
    measured = f"""{subjects[0].records[0]["tokens"]:,} tokens in windows of {CONTEXT}; GPTQ calibrated on \
{len(subjects[0].calibration)} other windows; float32 activations, one run: perplexities within 0.3 % are equal"""
    text = f"Python's docstrings, help topics and licence in {recipes['OPT'].vocabulary} tokens ({counts})"
    return {"models": "; ".join(described), "text": text, "measured": measured}
