"""`hfq demo`: the main job on a small real model, with what it costs and whether it is exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from hfq.errors import CheckpointError, SetupError

__all__ = ["demo", "measure"]

PLACEMENTS = ("resident", "half on disk", "all on disk")
PROMPT = "Return a list of the"
_EVALUATION_TOKENS = 8192


def demo(
    folder: Annotated[Path, typer.Option(help="Holds tiny-llama, tiny-llama-gptq and tiny-llama-fp8.")] = Path("tests/data"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> None:
    """Inspect, load, run and compare a GPTQ and an FP8 checkpoint resident, half on disk and all on disk."""
    from hfq.cli.inspect import inspect_checkpoint

    paths = {name: folder / f"tiny-llama-{name}" for name in ("gptq", "fp8")}
    for path in (*paths.values(), folder / "tiny-llama"):
        if not path.is_dir():
            raise CheckpointError(
                "The demo's checkpoints are not here.", file=path, expected="a folder made by examples/", found="nothing",
                fix="run it from a clone of the repository, or pass --folder",
            )  # fmt: skip
    from hfq.checkpoint import Checkpoint

    rows = []
    for name, path in paths.items():
        report = inspect_checkpoint(Checkpoint.open(path))
        if not as_json:
            dialects = ", ".join(f"{count} × {dialect}" for dialect, count in report["dialects"].items())
            print(f"{path}: {dialects}, {report['bits_per_packed_weight']} bits per packed weight, {report['nbytes']:,} bytes")
        rows += [_in_a_process(path, folder / "tiny-llama" / "held_out.txt", placement) for placement in PLACEMENTS]
        exact = {row["logits_sha256"] for row in rows[-len(PLACEMENTS) :]}
        for row in rows[-len(PLACEMENTS) :]:
            row |= {"checkpoint": name, "bit_equal": len(exact) == 1}
    baseline = _in_a_process(folder / "tiny-llama", folder / "tiny-llama" / "held_out.txt", "stock")
    rows.append(baseline | {"checkpoint": "bf16, stock transformers"})
    print(json.dumps(rows, indent=2)) if as_json else _print(rows)
    if not all(row.get("bit_equal", True) for row in rows):
        raise typer.Exit(1)


def measure(path: Path, text: Path, placement: str) -> dict:
    """Loads one checkpoint in one placement and measures it, in this process; meant for a process of its own."""
    import hashlib
    import resource
    import time

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    from hfq import HfqConfig
    from hfq.evaluate.perplexity import perplexity

    _ = LlamaForCausalLM  # its code is in memory before memory is measured
    logging.disable_progress_bar()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options = {} if placement == "stock" else {"quantization_config": HfqConfig(), "device_map": _device_map(placement)}
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    load_seconds = time.perf_counter() - started
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        logits = model(**prompt).logits
    started = time.perf_counter()
    generated = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    seconds = time.perf_counter() - started
    new_tokens = generated.shape[1] - prompt["input_ids"].shape[1]
    tokens = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][0][:_EVALUATION_TOKENS]
    score = perplexity(model, tokens)
    loading = getattr(getattr(model, "hf_quantizer", None), "loading", None)
    dense = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "placement": placement,
        "file_nbytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
        "resident_nbytes": loading.plan.resident_nbytes() if loading else dense,
        "peak_rss_growth_nbytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024,
        "load_seconds": round(load_seconds, 3),
        "perplexity": round(score, 4),
        "tokens_per_second": round(new_tokens / seconds, 1),
        "logits_sha256": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        "text": tokenizer.decode(generated[0]),
    }


def _device_map(placement: str) -> dict[str, str]:
    if placement == "half on disk":
        return {"": "cpu", "model.layers.2": "disk", "model.layers.3": "disk"}
    return {"": "disk"} if placement == "all on disk" else {"": "cpu"}


def _in_a_process(path: Path, text: Path, placement: str) -> dict:
    """Each placement in a fresh process, so that its peak memory is its own."""
    code = "import json, pathlib, sys; from hfq.cli.demo import measure; a, b, c = sys.argv[1:]; "
    code += "print(json.dumps(measure(pathlib.Path(a), pathlib.Path(b), c)))"
    command = [sys.executable, "-c", code, str(path), str(text), placement]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SetupError(
            f"The demo failed on {path} ({placement}).", expected="measurements", found=done.stderr.strip().rpartition("\n")[2],
            fix="run `make test`; it says what is wrong with this installation",
        )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def _print(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "checkpoint", "placement", "file B", "resident B", "peak RSS growth", "perplexity", "tokens/s", "bit-equal logits",
        title="float32 activations on the CPU; each row in a process of its own",
    )  # fmt: skip
    for row in rows:
        equal = {True: "yes", False: "NO", None: "-"}[row.get("bit_equal")]
        table.add_row(
            row["checkpoint"], row["placement"], f"{row['file_nbytes']:,}", f"{row['resident_nbytes']:,}",
            f"{row['peak_rss_growth_nbytes']:,}", f"{row['perplexity']:.4f}", f"{row['tokens_per_second']:.1f}", equal,
        )  # fmt: skip
    console = Console(width=max(Console().width, 130))
    console.print(table)
    for row in rows[:: len(PLACEMENTS)]:
        console.print(f"{row['checkpoint']}: {row['text']!r}", highlight=False)
