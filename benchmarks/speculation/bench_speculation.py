"""`python -m benchmarks speculation`: passes and bytes per token of drafted tokens, with layers on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import hfq
from benchmarks.quality.corpus import Corpus
from benchmarks.quality.training import Training
from benchmarks.records import Record, median, rotated, select
from benchmarks.speculation.drafting_models import ASSISTANT, MIXTURE, MixtureTraining, make_models
from hfq.machine_profile.machine_facts import machine_facts
from hfq.plots.charts import Chart
from hfq.tables import Report, Table, Target

__all__ = ["DRAFTS", "PLACES", "bench_speculation"]

DRAFTS: Mapping[str, Mapping[str, Any]] = {
    "greedy search": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 8},
    "assistant model": {"assistant_model": None},
    "MTP layer": {"use_mtp": True},
}
"""Options of `generate` by the source of drafts."""

PLACES = {"layers on disk": "model.layers", "experts on disk": "experts"}
"""What is on disk; all else is in memory."""

SMALL = MixtureTraining(hidden=64, layers=3, vocabulary=512, steps=2, batch=1, experts=4, further_steps=2)
SMALL_ASSISTANT = Training("llama", hidden=64, layers=1, vocabulary=512, steps=2, batch=1)

_PROMPT, _TOKENS, _PROMPTS = 128, 64, 4
_ASSISTANT_TOKENS = 4
_DTYPES = ("float32", "bfloat16")
_DTYPE_NOTE = """Share of prompts whose tokens equal those of greedy search, layers on disk. A pass over several tokens sums in another
order than one over a single token. In bfloat16, logits have 8 bits: the two largest are often equal, or so close that this decides."""
_NOTE = """Medians over the rounds; counters are equal in all rounds. A token is one that `generate` returns. Bytes are those read
from disk by the main model in float32, prefill included; the expert cache is off, so each pass reads the experts that its tokens are routed
to, each once. The assistant and the MTP layer are in memory. Identical: the share of prompts whose tokens equal those of greedy
search. Rates are those of a small model, whose layers the page cache holds: passes and bytes are what a large model is judged by."""


def bench_speculation(folder: Path, rounds: int, quick: bool, say: Callable[[str], None]) -> Report:
    """Runs the benchmark.

    Args:
        folder: Folder that keeps corpora and models between runs.
        rounds: Number of interleaved rounds.
        quick: True for small models and few tokens, which test the benchmark.
        say: Called with a line before each measurement.

    Raises:
        CheckpointError: The results of an earlier run are damaged.
    """
    mixture, assistant = (SMALL, SMALL_ASSISTANT) if quick else (MIXTURE, ASSISTANT)
    corpus = Corpus.make(folder, mixture.vocabulary, is_small=quick)
    paths = make_models(mixture, assistant, corpus, folder, say)
    quantized = folder / f"{paths.main.name}-gptq4"
    if not quantized.is_dir():
        hfq.quantize(paths.main, hfq.Recipe("rtn", bits=4, group_size=32), quantized)
    prompts = _prompts(corpus.tokens["held out"], 2 if quick else _PROMPTS, 16 if quick else _PROMPT)
    tokens = 8 if quick else _TOKENS
    helper = _load(paths.assistant, {"": "cpu"})
    helper.generation_config.update(
        num_assistant_tokens=_ASSISTANT_TOKENS,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    setups = [("layers on disk", "bfloat16", 1), *((place, "float32", rounds) for place in PLACES)]
    records: list[Record] = []
    for place, dtype, count in setups:
        model = _load(quantized, _device_map(mixture, PLACES[place]), dtype)
        expected = [_generate(model, prompt, tokens, {}) for prompt in prompts]
        for number in range(count):
            for drafts in rotated(list(DRAFTS), number):
                say(f"round {number + 1} of {count}, {place}, {dtype}, {drafts}")
                options = {
                    key: helper if key == "assistant_model" else value
                    for key, value in DRAFTS[drafts].items()
                }
                _generate(model, prompts[0], 2, options)  # reads the MTP layer
                measured = _measure(model, prompts, tokens, options, expected)
                records.append(
                    {"place": place, "dtype": dtype, "drafts": drafts, "round": number, **measured}
                )
    work = f"{len(prompts)} prompts of {prompts[0].shape[1]} tokens of unseen text, {tokens} tokens each"
    facts = (
        machine_facts(folder)
        | _facts(mixture, assistant)
        | {"work": work, "rounds": f"{rounds}, interleaved"}
    )
    return _report(facts, records)


def _facts(mixture: MixtureTraining, assistant: Training) -> dict[str, str]:
    return {
        "main model": f"GLM-4.5 of {mixture.layers} layers, hidden size {mixture.hidden}, {mixture.experts} routed "
        "experts, 2 per token; GPTQ 4-bit, MTP layer bfloat16",
        "assistant": f"Llama of {assistant.layers} layers, hidden size {assistant.hidden}, bfloat16",
        "training": f"{mixture.steps}, {mixture.further_steps}, and {assistant.steps} steps on documentation of Python",
        "drafts per pass": f"prompt lookup 8, assistant {_ASSISTANT_TOKENS}, MTP layer 1",
        "threads": str(torch.get_num_threads()),
    }


def _load(path: Path, device_map: dict[str, str], dtype: str = "float32") -> Any:
    from transformers import AutoModelForCausalLM

    # without a cache of experts, the bytes of a pass do not depend on the passes before it
    config = hfq.HfqConfig(expert_cache_size=0)
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, device_map=device_map, dtype=dtype
    )
    model.generation_config.eos_token_id = None  # every run makes as many tokens
    return model


def _device_map(mixture: MixtureTraining, on_disk: str) -> dict[str, str]:
    if on_disk != "experts":
        return {"": "cpu", on_disk: "disk"}
    experts = [f"model.layers.{layer}.mlp.experts" for layer in range(1, mixture.layers)]
    return {"": "cpu", **dict.fromkeys(experts, "disk")}


def _prompts(tokens: torch.Tensor, count: int, length: int) -> list[torch.Tensor]:
    """Returns evenly spaced parts of a text, each [1, length]."""
    stride = tokens.numel() // count
    return [tokens[start : start + length][None] for start in range(0, stride * count, stride)]


def _generate(model: Any, prompt: torch.Tensor, tokens: int, options: Mapping[str, Any]) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=tokens, do_sample=False, **options)[0, prompt.shape[1] :]


def _measure(
    model: Any,
    prompts: list[torch.Tensor],
    tokens: int,
    options: Mapping[str, Any],
    expected: list[torch.Tensor],
) -> Record:
    before, started = hfq.report(model).offload, time.perf_counter()
    found = [_generate(model, prompt, tokens, options) for prompt in prompts]
    seconds, after = time.perf_counter() - started, hfq.report(model).offload
    count = sum(each.numel() for each in found)
    equal = [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]
    return {
        "tokens": count,
        "passes": after.passes - before.passes,
        "nbytes_read": after.nbytes_read - before.nbytes_read,
        "seconds": seconds,
        "identical": sum(equal) / len(equal),
    }


def _report(facts: Mapping[str, str], records: list[Record]) -> Report:
    tables, targets, series = [], [], {}
    for place in PLACES:
        rows = []
        for drafts in DRAFTS:
            found = {"place": place, "drafts": drafts, "dtype": "float32"}
            passes = median(records, lambda each: each["passes"] / each["tokens"], **found)
            nbytes = median(records, lambda each: each["nbytes_read"] / each["tokens"], **found)
            rate = median(records, lambda each: each["tokens"] / each["seconds"], **found)
            identical = _identical(records, **found)
            rows.append((drafts, f"{passes:.3f}", f"{nbytes / 1e6:.3f}", f"{rate:.1f}", f"{identical:.2f}"))
            series.setdefault(drafts, []).append(nbytes / 1e6)
            targets.append(Target(f"{drafts}, {place}: share of identical prompts", identical, 1, True))
        header = ("drafts", "passes per token", "MB read per token", "tokens/s", "identical")
        tables.append(Table(place.capitalize(), _NOTE, header, rows))
    rows = [
        (drafts, *(f"{_identical(records, drafts=drafts, dtype=dtype):.2f}" for dtype in _DTYPES))
        for drafts in DRAFTS
    ]
    tables.append(Table("Identical tokens", _DTYPE_NOTE, ("drafts", *_DTYPES), rows))
    chart = Chart("Bytes read per token: MB", list(PLACES), series, line=0)
    title = "Speculation: fewer passes over a model on disk"
    note = "Smallest shares over the rounds, in float32."
    return Report(title, facts, tables, targets, records, chart, note)


def _identical(records: list[Record], **where: str) -> float:
    """Returns the smallest share of prompts with the tokens of greedy search."""
    return min(each["identical"] for each in select(records, **{"place": "layers on disk", **where}))
