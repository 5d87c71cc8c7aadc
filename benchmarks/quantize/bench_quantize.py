"""`python -m benchmarks quantize`: memory, time, and quality of quantizing, in new processes.

Results are compared with gptqmodel's if it is installed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from benchmarks.checkpoints import architecture_of_size, make_checkpoint
from benchmarks.quantize.quantize_report import make_report
from benchmarks.quantize.quantize_worker import TOOLS, write_tokens
from benchmarks.records import Record, rotated
from hfq.checkpoint import Checkpoint
from hfq.errors import SetupError
from hfq.evaluation.perplexity import perplexity
from hfq.evaluation.text import read_text, tokenize
from hfq.machine_profile.machine_facts import machine_facts
from hfq.machine_profile.worker_process import Worker
from hfq.tables import Report

__all__ = [
    "CONSTANT_NBYTES",
    "bench_quantize",
    "bound_nbytes",
    "measure_memory",
    "measure_quality",
    "measure_resume",
    "measure_time",
]

CONSTANT_NBYTES = 400 << 20
"""Memory that a process may use in addition to a decoder layer and activations.

Imports of the libraries need most of it.
"""

BITS = (4, 3, 2)
GPTQ = {"method": "gptq", "bits": 4, "group_size": 128}
_WORKER = "benchmarks.quantize.quantize_worker"
_LENGTH, _SAMPLES = 128, 8
_QUALITY_LENGTH, _QUALITY_SAMPLES = 256, 32


def bench_quantize(
    folder: Path,
    nbytes: float,
    rounds: int,
    trained: Sequence[Path],
    say: Callable[[str], None],
    threads: int = 1,
) -> Report:
    """Runs the benchmark.

    Args:
        folder: Folder of the large checkpoints. Missing ones are created.
        nbytes: Bytes of the checkpoint for the memory measurement. Times are measured with an eighth.
        rounds: Number of rounds for times, and number of calibration data sets for quality.
        trained: Folders of small trained models, each with its tokenizer and `held_out.txt`.
        say: Function that receives progress lines.
        threads: Number of torch's threads.

    Raises:
        SetupError: The disk has too little free space, or a measuring process ended early.
    """
    tools = [name for name in TOOLS if importlib.util.find_spec(name) is not None]
    large, small = architecture_of_size(nbytes), architecture_of_size(max(nbytes / 8, 24e6))
    records: list[Record] = []
    with tempfile.TemporaryDirectory(dir=_made(folder)) as made:
        for architecture in dict.fromkeys((large, small)):
            say(f"hidden size {architecture.hidden}, {architecture.layers} blocks: making the checkpoint")
            make_checkpoint(folder, architecture, "bf16")
        path = make_checkpoint(folder, large, "bf16")
        for recipe in ({"method": "fp8"}, GPTQ):
            say(f"{recipe['method']}: memory")
            records.append(measure_memory(path, Path(made), recipe, threads))
        say("killed and resumed")
        records.append(measure_resume(path, Path(made), threads, random.randrange(1, large.layers)))
        path = make_checkpoint(folder, small, "bf16")
        for number in range(rounds):
            for tool in rotated(tools, number):
                say(f"time: round {number + 1} of {rounds}, {tool}")
                records.append(measure_time(path, Path(made), tool, threads) | {"round": number})
        for model in trained:
            records += measure_quality(model, Path(made), tools, rounds, threads, say)
    facts = machine_facts(folder) | {
        "threads": str(threads),
        "gptqmodel": _version("gptqmodel"),
        "memory's model": f"Llama, hidden size {large.hidden}, {large.layers} blocks",
        "time's model": f"Llama, hidden size {small.hidden}, {small.layers} blocks",
        "calibration": f"{_SAMPLES} sequences of {_LENGTH} tokens; for quality {_QUALITY_SAMPLES} of "
        f"{_QUALITY_LENGTH}",
    }
    return make_report(records, facts)


def bound_nbytes(path: Path, tokens: torch.Tensor | None) -> dict[str, int]:
    """Returns the parts of the upper bound for a quantization's peak memory, in bytes.

    Args:
        path: The float checkpoint.
        tokens: Calibration data [samples, length]. None if the method needs none.

    Returns:
        `block`: parameters of the largest decoder layer in float32. `activations`: hidden states of the
            calibration data in float32. `constant`: `CONSTANT_NBYTES`, including imports. `bound`: their sum.
    """
    checkpoint, blocks = Checkpoint.open(path), dict[str, int]()
    for name, info in checkpoint.tensors.items():
        before, _, rest = name.partition(".layers.")
        if rest:
            block = f"{before}.{rest.partition('.')[0]}"
            blocks[block] = blocks.get(block, 0) + 4 * info.numel
    hidden = checkpoint.config["hidden_size"]
    parts = {
        "block": max(blocks.values()),
        "activations": 4 * hidden * tokens.numel() if tokens is not None else 0,
    }
    return {**parts, "constant": CONSTANT_NBYTES, "bound": sum(parts.values()) + CONSTANT_NBYTES}


def measure_memory(path: Path, made: Path, recipe: dict, threads: int) -> Record:
    """Measures the peak memory of one quantization by hfq in a new process, and its bound.

    The result stays in `made`.
    """
    tokens = _random_tokens(path) if recipe["method"] == "gptq" else None
    with Worker(_WORKER, tool="hfq", threads=threads) as worker:
        answer = worker.ask(
            "quantize",
            path=str(path),
            output=str(made / f"whole-{recipe['method']}"),
            recipe=recipe,
            tokens=str(write_tokens(tokens, made / "tokens.json")) if tokens is not None else None,
        )
    return {"kind": "memory", "method": recipe["method"], **bound_nbytes(path, tokens), **answer}


def measure_resume(path: Path, made: Path, threads: int, block: int) -> Record:
    """Kills a quantization after a decoder layer, resumes it, and compares every file.

    The files are compared with those of `measure_memory`.
    """
    job = {"path": str(path), "output": str(made / "again"), "recipe": GPTQ}
    tokens = write_tokens(_random_tokens(path), made / "tokens.json")
    with (
        Worker(_WORKER, tool="hfq", threads=threads) as worker,
        suppress(SetupError),
    ):  # the killed process cannot answer
        worker.ask("quantize", **job, tokens=str(tokens), stop_after=block)
    with Worker(_WORKER, tool="hfq", threads=threads) as worker:
        answer = worker.ask("quantize", **job, tokens=str(tokens))
    expected, found = _digests(made / "whole-gptq"), _digests(made / "again")
    return {
        "kind": "resume",
        "killed_after": block,
        "files": len(found),
        "is_identical": found == expected,
        **answer,
    }


def measure_time(path: Path, made: Path, tool: str, threads: int) -> Record:
    """Measures GPTQ with one tool in a new process, from the input folder to the output folder."""
    tokens, output = write_tokens(_random_tokens(path), made / "tokens.json"), made / f"timed-{tool}"
    shutil.rmtree(output, ignore_errors=True)
    with _readable(path, made, tool) as source, Worker(_WORKER, tool=tool, threads=threads) as worker:
        answer = worker.ask("quantize", path=str(source), output=str(output), tokens=str(tokens), recipe=GPTQ)
    return {"kind": "time", "tool": tool, **answer}


def measure_quality(
    model: Path, made: Path, tools: Sequence[str], seeds: int, threads: int, say: Callable[[str], None]
) -> list[Record]:
    """Measures the perplexity of a trained model, unquantized and with 4, 3, and 2 bits.

    Each number of bits is measured with several sets of calibration data. The first six tenths of its text
    are for calibration, and the rest is scored.
    """
    tokens = _text_of(model)
    cut = tokens.numel() * 6 // 10
    records: list[Record] = [
        {"kind": "floats", "model": model.name, "perplexity": _perplexity(model, tokens[cut:])}
    ]
    with ExitStack() as stack:
        workers = {tool: stack.enter_context(Worker(_WORKER, tool=tool, threads=threads)) for tool in tools}
        for bits in BITS:
            for seed in range(seeds):
                starts = torch.randint(
                    0,
                    cut - _QUALITY_LENGTH,
                    (_QUALITY_SAMPLES,),
                    generator=torch.Generator().manual_seed(seed),
                )
                windows = torch.stack([tokens[start : start + _QUALITY_LENGTH] for start in starts])
                for tool, worker in workers.items():
                    say(f"{model.name}: {bits} bits, calibration {seed + 1} of {seeds}, {tool}")
                    output, kept = made / "quality", write_tokens(windows, made / "tokens.json")
                    shutil.rmtree(output, ignore_errors=True)
                    recipe = {**GPTQ, "bits": bits}
                    record = {
                        "kind": "quality",
                        "model": model.name,
                        "bits": bits,
                        "seed": seed,
                        "tool": tool,
                    }
                    record |= worker.ask(
                        "quantize", path=str(model), output=str(output), tokens=str(kept), recipe=recipe
                    )
                    if "error" not in record:
                        record["perplexity"] = _perplexity(output, tokens[cut:])
                    records.append(record)
    return records


@contextmanager
def _readable(path: Path, made: Path, tool: str) -> Iterator[Path]:
    """Yields a folder that a tool can read.

    gptqmodel requires a tokenizer, and gets links and a tokenizer of a few words.
    """
    if tool == "hfq" or (path / "tokenizer.json").exists():
        yield path
        return
    from tokenizers import Tokenizer, models

    with tempfile.TemporaryDirectory(dir=made) as folder:
        for file in path.iterdir():
            Path(folder, file.name).symlink_to(file.resolve())
        words = {word: number for number, word in enumerate(("<unk>", "<s>", "</s>", "<pad>"))}
        Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(Path(folder, "tokenizer.json")))
        special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
        Path(folder, "tokenizer_config.json").write_text(config, encoding="utf-8")
        yield Path(folder)


def _random_tokens(path: Path) -> torch.Tensor:
    vocabulary = Checkpoint.open(path).config["vocab_size"]
    return torch.randint(4, vocabulary, (_SAMPLES, _LENGTH), generator=torch.Generator().manual_seed(0))


def _text_of(model: Path) -> torch.Tensor:
    return tokenize(read_text(model / "held_out.txt"), model, Checkpoint.open(model).config["vocab_size"])


def _perplexity(path: Path, tokens: torch.Tensor) -> float:
    from transformers import AutoModelForCausalLM

    from hfq import HfqConfig

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=HfqConfig(), dtype=torch.float32)
    found = perplexity(model.eval(), tokens, context=256)
    return found if math.isfinite(found) else math.inf


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for file in sorted(folder.iterdir()):
        digest = hashlib.sha256()
        with open(file, "rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
        digests[file.name] = digest.hexdigest()
    return digests


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
