"""`python -m benchmarks generate`: tokens per second of a whole model on the CPU.

Quantized weights in hfq are compared with bfloat16 in plain transformers. All models are in memory together
and take turns within a round. Ratios are computed within a round, and their medians are reported. The model
is the one of `python -m benchmarks load`: a Llama with random weights, in three formats.

After the counted tokens, the linear layers of a few more tokens are timed separately, and compared with a
plain read of memory in the same round. Between two layers, other data and the interpreter's code evict the
caches. Isolated calls of one product do not show that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import FORMATS, architecture_of_size, make_checkpoint
from benchmarks.records import Record, median, rotated, select
from hfq.machine_profile.machine_facts import machine_facts
from hfq.plots.charts import Chart
from hfq.tables import Report, Table, Target, as_rate

__all__ = ["PROMPT", "TOKENS", "bench_generate", "measure_model"]

PROMPT, TOKENS, TIMED_TOKENS = 128, 16, 8
PREFILL, DECODE, LAYERS, READ = "prefill", "decode", "layers", "read"
READ_NBYTES = 128 << 20
PLAIN = "bf16"
"""Format that runs in plain transformers."""


def bench_generate(
    folder: Path, nbytes: float, rounds: int, threads: Sequence[int], say: Callable[[str], None]
) -> Report:
    """Runs the benchmark.

    Args:
        folder: Folder of the checkpoints. Missing ones are created.
        nbytes: Size of the bfloat16 checkpoint in bytes. Quantized ones have the same architecture.
        rounds: Number of interleaved rounds.
        threads: Numbers of threads to measure with.
        say: Function that receives progress lines.

    Raises:
        SetupError: The disk has too little free space.
    """
    architecture, before, records = architecture_of_size(nbytes), torch.get_num_threads(), []
    models, memory = {}, torch.zeros(READ_NBYTES // 4)
    for weights in FORMATS:
        say(f"{weights}: loading")
        models[weights] = _load(make_checkpoint(folder, architecture, weights), weights)
    try:
        for count in threads:
            torch.set_num_threads(count)
            for weights in models:
                measure_model(models[weights], 2)  # the first call fills caches
            for number in range(rounds):
                say(f"{count} threads: round {number + 1} of {rounds}")
                records += [
                    {"weights": "-", "round": number, "threads": count} | record
                    for record in _read_memory(memory)
                ]
                for weights in rotated(list(models), number):
                    label = {"weights": weights, "round": number, "threads": count}
                    records += [label | record for record in measure_model(models[weights], TOKENS)]
    finally:
        torch.set_num_threads(before)
    parameters = sum(parameter.numel() for parameter in models[PLAIN].parameters())
    return _report(
        records,
        rounds,
        f"Llama, hidden size {architecture.hidden}, {architecture.layers} layers, {parameters:,} weights",
    )


def measure_model(model: Any, tokens: int) -> list[Record]:
    """Measures a prompt's forward pass, each cached token after it, and the layers of more tokens."""
    vocabulary = model.config.vocab_size
    prompt = torch.randint(0, vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        started = time.perf_counter()
        out = model(prompt, use_cache=True, logits_to_keep=1)
        records: list[Record] = [
            {"step": PREFILL, "tokens": PROMPT, "seconds": time.perf_counter() - started}
        ]
        for _ in range(tokens):
            started = time.perf_counter()
            out = _next(model, out)
            records.append({"step": DECODE, "tokens": 1, "seconds": time.perf_counter() - started})
        return records + _time_layers(model, out)


def _next(model: Any, out: Any) -> Any:
    return model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)


def _time_layers(model: Any, out: Any) -> list[Record]:
    """Measures bytes and seconds of a token's linear layers, without the head, which is bfloat16."""
    layers = [module for name, module in model.named_modules() if name.endswith("_proj")]
    nbytes = sum(tensor.nbytes for layer in layers for tensor in (*layer.parameters(), *layer.buffers()))
    begun: list[float] = []
    taken: list[float] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_: begun.append(time.perf_counter())) for layer in layers
    ]
    hooks += [
        layer.register_forward_hook(lambda *_: taken.append(time.perf_counter() - begun[-1]))
        for layer in layers
    ]
    records = []
    try:
        for _ in range(TIMED_TOKENS):
            taken.clear()
            out = _next(model, out)
            records.append({"step": LAYERS, "nbytes": nbytes, "seconds": sum(taken)})
    finally:
        for hook in hooks:
            hook.remove()
    return records


def _read_memory(memory: torch.Tensor) -> list[Record]:
    records = []
    for _ in range(TIMED_TOKENS):
        started = time.perf_counter()
        memory.sum()
        records.append({"step": READ, "nbytes": memory.nbytes, "seconds": time.perf_counter() - started})
    return records


def _load(path: Path, weights: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from hfq import HfqConfig

    logging.disable_progress_bar()
    options = {} if weights == PLAIN else {"quantization_config": HfqConfig()}
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto", device_map={"": "cpu"}, **options).eval()


def _report(records: list[Record], rounds: int, model: str) -> Report:
    threads = sorted({record["threads"] for record in records})
    facts = machine_facts(Path()) | {
        "model": f"{model}; bf16 in plain transformers, the others in hfq with kernel='auto'",
        "memory read": ", ".join(
            f"{as_rate(median(records, lambda r: r['nbytes'] / r['seconds'], step=READ, threads=count))} "
            f"({count} threads)"
            for count in threads
        ),
        "rounds": f"{rounds}, interleaved in one process; a prompt of {PROMPT} tokens, then {TOKENS} greedy "
        f"ones; medians",
    }
    least = threads[0] if threads else 1
    packed = [weights for weights in FORMATS if weights != PLAIN]
    chart = Chart(
        "Tokens per second, times those of bf16 (higher is better)",
        [PREFILL, DECODE],
        {
            weights: [_over_plain(records, weights, step, least) for step in (PREFILL, DECODE)]
            for weights in packed
        },
    )
    targets = [
        Target(
            f"{weights}, {step}, {count} threads: tokens per second over bf16 in transformers",
            ratio,
            1.0,
            True,
        )
        for count in threads
        for weights in packed
        for step in (PREFILL, DECODE)
        for ratio in (_over_plain(records, weights, step, count),)
    ] + [
        Target(
            f"{weights}, layers, {count} threads: share of the read rate",
            _share_of_read(records, weights, count),
            0.85,
            True,
        )
        for count in threads
        for weights in packed
    ]
    tables = [_table(records, count) for count in threads]
    return Report("Generation: tokens per second on a CPU", facts, tables, targets, records, chart)


def _table(records: list[Record], threads: int) -> Table:
    rows = []
    for weights in FORMATS:
        cells = []
        for step in (PREFILL, DECODE):
            rate = median(
                records, lambda r: r["tokens"] / r["seconds"], weights=weights, step=step, threads=threads
            )
            ratio = _over_plain(records, weights, step, threads)
            cells.append("-" if rate is None or ratio is None else f"{rate:.2f} tokens/s, {ratio:.2f}x")
        share = _share_of_read(records, weights, threads)
        rows.append((weights, *cells, "-" if share is None else f"{share:.2f}"))
    note = """Tokens per second, and times those of bf16 in the same round. The last column is the rate at which a token's linear
layers, but for the head, read their weights, over that of a plain read of memory in the same round."""
    header = ("weights", PREFILL, DECODE, "layers, of the read rate")
    return Table(f"{threads} thread{'s' if threads > 1 else ''}", note, header, rows)


def _share_of_read(records: list[Record], weights: str, threads: int) -> float | None:
    """Returns the read rate of the layers' weights, divided by that of a plain read."""
    layers = {"step": LAYERS, "weights": weights, "threads": threads}
    read = {"step": READ, "threads": threads}
    return _ratio(records, lambda record: record["nbytes"] / record["seconds"], layers, read)


def _over_plain(records: list[Record], weights: str, step: str, threads: int) -> float | None:
    """Returns the seconds of plain transformers divided by those of this model."""
    theirs, ours = ({"step": step, "weights": name, "threads": threads} for name in (PLAIN, weights))
    return _ratio(records, lambda record: record["seconds"], theirs, ours)


def _ratio(
    records: list[Record], value: Callable[[Record], float], above: Record, below: Record
) -> float | None:
    """Returns the median over rounds of the ratio of two medians within a round."""
    ratios: list[float] = []
    for number in sorted({record["round"] for record in select(records, **below)}):
        one, other = (median(records, value, round=number, **where) for where in (above, below))
        if one is not None and other is not None:
            ratios.append(one / other)
    return sorted(ratios)[len(ratios) // 2] if ratios else None
