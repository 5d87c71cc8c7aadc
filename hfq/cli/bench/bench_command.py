"""`hfq bench MODEL`: load time, memory, and tokens per second of a model on this machine."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from hfq.cli.model_argument import Model, Revision, model_folder
from hfq.cli.typed_options import check_dtype, parse_device_map, parse_max_memory
from hfq.errors import SetupError

__all__ = ["bench"]


def bench(
    model: Model,
    revision: Revision = None,
    device_map: Annotated[str, typer.Option(help="Device map: auto, cpu, disk, cuda:0, or JSON.")] = "auto",
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="DEVICE=SIZE,…", help="Limits for --device-map auto: cpu=8GiB,cuda:0=20GiB."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of activations: auto, float32, bfloat16, or float16.")
    ] = "auto",
    n_prompt: Annotated[
        int, typer.Option("-p", "--n-prompt", min=0, help="Tokens of the prompt; 0 for none.")
    ] = 512,
    n_gen: Annotated[
        int,
        typer.Option("-n", "--n-gen", min=0, help="Tokens to generate after an empty prompt; 0 for none."),
    ] = 128,
    threads: Annotated[
        str | None,
        typer.Option(
            "-t", "--threads", metavar="N,…", help="Numbers of CPU threads to measure (default: all threads)."
        ),
    ] = None,
    repetitions: Annotated[
        int,
        typer.Option("-r", "--repetitions", min=1, help="Number of measurements of prompt and generation."),
    ] = 3,
    is_compiled: Annotated[
        bool, typer.Option("--compile", help="Also generate with torch.compile and a static cache.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measures load time, memory, and tokens per second."""
    from hfq.cli.bench.bench_run import BenchOptions, run_bench
    from hfq.cli.bench.bench_table import print_table

    options = BenchOptions(
        device_map=parse_device_map(device_map),
        max_memory=None if max_memory is None else _parse_limits(max_memory, device_map),
        dtype=check_dtype(dtype),
        n_prompt=n_prompt,
        n_gen=n_gen,
        threads=_parse_threads(threads),
        repetitions=repetitions,
        is_compiled=is_compiled,
    )
    found = run_bench(_find_folder(model, revision), options)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print_table(found)


def _find_folder(model: str, revision: str | None) -> str:
    from hfq.checkpoint import Checkpoint

    folder = model_folder(model, revision)
    Checkpoint.open(folder)  # raises an error if it is not a checkpoint
    return folder


def _parse_threads(text: str | None) -> list[int | None]:
    """Returns the thread counts of `1,2`; [None] for torch's own."""
    if text is None:
        return [None]
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,3}", part) for part in parts):
        raise SetupError(
            f"--threads {text} is not valid.",
            expected="thread counts, separated by commas",
            found=text,
            fix="Pass numbers from 1, for example --threads 1,2.",
        )
    return [int(part) for part in dict.fromkeys(parts)]


def _parse_limits(text: str, device_map: str) -> dict[str, int]:
    """Returns the bytes by device of `--max-memory`, which requires an automatic device map."""
    if device_map != "auto":
        raise SetupError(
            f"--max-memory limits nothing with --device-map {device_map}.",
            expected="--device-map auto",
            found=device_map,
            fix="Omit --max-memory, or pass --device-map auto.",
        )
    return parse_max_memory(text)
