"""Tables of pages with figures of docs/benchmarks, written between two comments of each page."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["TABLES", "facts", "filled", "read_table"]

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
_WEIGHTS = {"bf16": "bfloat16", "fp8": "FP8, 128 × 128", "gptq4": "GPTQ 4-bit"}
_MARKED = re.compile(
    r"(<!-- table: ([\w-]+), made by `make docs` -->\n).*?(<!-- end of table -->)", re.DOTALL
)

Row = dict[str, str]


def read_table(page: str, title: str) -> list[Row]:
    """Returns the rows of a table in `docs/benchmarks/{page}.md`, each as {column: cell}."""
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", _text(page), re.DOTALL | re.MULTILINE)[
        1
    ]
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    )
    return [dict(zip(header, row, strict=True)) for row in rows]


def facts(page: str) -> dict[str, str]:
    """Returns the facts that a page lists about its machine and model."""
    return dict(re.findall(r"^- ([\w ,]+): (.+)$", _text(page), re.MULTILINE))


def filled(text: str) -> str:
    """Returns the text of a page with its tables regenerated."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", text)


def _text(page: str) -> str:
    return (BENCHMARKS / f"{page}.md").read_text(encoding="utf-8")


def _only(rows: list[Row], **where: str) -> Row:
    """Returns the first row whose cells have these values."""
    found = [
        row for row in rows if all(row[column.replace("_", " ")] == cell for column, cell in where.items())
    ]
    return found[0]


def _ratio(cell: str, other: str) -> str:
    return f"{float(cell.split()[0]) / float(other.split()[0]):.1f} ×"


def _markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ("---",) * len(header), *rows))


def _readable(cell: str) -> str:
    """Returns a cell of a benchmark without its ratio, or one word if the load failed."""
    return "unsupported" if cell.startswith("refused") else cell.partition(" (")[0]


def _first_screen() -> str:
    """Returns load time, peak memory and time per token of hfq, next to those of plain transformers."""
    time = read_table("load", "Time")
    memory = read_table("load", "Memory and reads, cold")
    decoding = read_table("stream", "Decoding")
    sizes = dict(re.findall(r"(\w+) ([\d.]+ GB)", facts("load")["model"]))
    rows = []
    for weights, name in _WEIGHTS.items():
        cold = _only(time, weights=weights, page_cache="cold")
        pairs = [
            [_readable(cold[loader]) for loader in ("hfq", "transformers")],
            [
                _readable(_only(memory, weights=weights, loader=loader)["peak RSS growth"])
                for loader in ("hfq", "transformers")
            ],
            [
                next((row["a token"] for row in decoding if _decoded(row) == (weights, mover, "disk")), "-")
                for mover in ("hfq", "accelerate")
            ],
        ]
        rows.append((f"{name}, {sizes[weights]}", *(" / ".join(pair) for pair in pairs)))
    header = ("hfq / plain", "cold load", "peak memory ÷ file size", "time per token, layers on disk")
    return _markdown(header, rows) + f"\n{_short_machine()}"


def _decoded(row: Row) -> tuple[str, str, str]:
    return row["weights"], row["mover"], row["layers in"]


def _short_machine() -> str:
    """Returns notes on the machine of the first table, its benchmarks, and other benchmarks."""
    found = facts("stream")
    cores = found["processor"].replace(" for this process", "")
    disk = found["raw direct read, cold"].partition(" (")[0]
    version = found["versions"].partition(",")[0]
    in_memory, limited = _of_llama_cpp()
    return (
        f"{cores}, disk of {disk}, no GPU, {version}. *Plain* is transformers with accelerate.\n"
        "Plain transformers dequantizes FP8 on a CPU, and requires gptqmodel for GPTQ. Measured:\n"
        "[loading](docs/benchmarks/load.md), [offloading](docs/benchmarks/stream.md).\n\n"
        f"In memory, models of 8B to 30B (random weights) decode {in_memory} as fast as with\n"
        f"llama.cpp. With 4 or 8 GB of memory, it is {limited}\n"
        "([Zen 4](docs/benchmarks/real_sizes.md), [Zen 5](docs/benchmarks/real_sizes-zen5.md)).\n"
    )


def _of_llama_cpp() -> tuple[str, str]:
    """Returns the ranges of hfq's decoding speed over llama.cpp's, in memory and with limited memory.

    Of hfq's rows of a case the better one counts, without those whose results are not the checkpoint's.
    """
    best: dict[tuple[str, str], float] = {}
    for page in ("real_sizes", "real_sizes-zen5"):
        for row in read_table(page, "Speed"):
            if row["contender"] in ("hfq, GPTQ", "hfq, the same GGUF"):
                case = page, row["model"]
                best[case] = max(best.get(case, 0.0), float(row["of llama.cpp"]))
    in_memory = [ratio for (_, model), ratio in best.items() if "resident" in model]
    limited = [ratio for (_, model), ratio in best.items() if "resident" not in model]
    return _times(in_memory), _times(limited)


def _times(ratios: list[float]) -> str:
    return f"{min(ratios):.1f} to {max(ratios):.2g} times"


def _machine() -> str:
    """Returns hardware, model and versions of the offloading benchmark."""
    found = facts("stream")
    cores = found["processor"].replace(" for this process", "")
    disk = found["raw direct read, cold"].partition(" (")[0]
    versions = found["versions"].split(", ")
    versions = ", ".join([versions[0], *versions[2:5]])  # without Python's
    return (
        f"{cores}, {found['memory']} of memory, a disk of {disk}, no GPU;\n{found['model']};\n{versions}.\n"
    )


def _token_costs() -> str:
    decoding = read_table("stream", "Decoding")
    rows = []
    for weights, name in _WEIGHTS.items():
        memory, disk = (
            _only(decoding, weights=weights, mover="hfq", layers_in=place)["a token"]
            for place in ("memory", "disk")
        )
        stock = [
            row["a token"]
            for row in decoding
            if (row["weights"], row["mover"], row["layers in"]) == (weights, "accelerate", "disk")
        ]
        rows.append((name, memory, disk, _ratio(disk, memory), *(stock or ["-"])))
    return _markdown(
        ("weights", "all in memory", "layers on disk", "slower by", "accelerate, layers on disk"), rows
    )


def _pass_costs() -> str:
    idle, busy = read_table("stream", "Without compute"), read_table("stream", "With compute standing in")
    rows = []
    for weights, name in _WEIGHTS.items():
        own, hooks = (_only(idle, weights=weights, mover=mover) for mover in ("hfq", "accelerate's hooks"))
        hidden = _only(busy, weights=weights, mover="hfq")["max(io, compute) / time"]
        seconds = [f"{row['a pass, s']} s" for row in (own, hooks)]
        rows.append((name, seconds[0], own["rate"], own["share of the disk's limit"], seconds[1], hidden))
    header = (
        "weights",
        "reading a pass",
        "rate",
        "share of the disk's limit",
        "accelerate's hooks, the same bytes",
        "formula over time",
    )
    return _markdown(header, rows)


def _batch_costs() -> str:
    rows = []
    for row in read_table("stream", "Micro-batches"):
        count = int(row["micro-batches"])
        stock = row["accelerate"] if row["accelerate"] != "-" else row["accelerate's hooks"]
        each = [f"{float(seconds) / count:.3f} s" for seconds in (row["hfq"], stock)]
        rows.append((_WEIGHTS[row["weights"]], str(count), f"{row['hfq']} s", *each))
    return _markdown(("weights", "batches", "a pass", "for each batch", "accelerate, for each batch"), rows)


def _whole_models() -> str:
    """Returns the speed of models of real sizes, next to that of llama.cpp with the same file."""
    pages = {"Zen 4": "real_sizes", "Zen 5": "real_sizes-zen5"}
    contenders = {"hfq": "hfq, the same GGUF", "llama.cpp": "llama.cpp"}
    rows: dict[str, list[str]] = {}
    for page in pages.values():
        for row in read_table(page, "Speed"):
            if row["contender"].startswith(tuple(contenders.values())):
                rows.setdefault(row["model"], []).append(row["decode"].removesuffix("/s"))
    header = ("model", *(f"{processor}, {name}" for processor in pages for name in contenders))
    links = ", ".join(f"[{processor}](../benchmarks/{page}.md)" for processor, page in pages.items())
    table = _markdown(header, [(model, *speeds) for model, speeds in rows.items()])
    return f"{table}\n2 cores, one round: {links}.\n"


TABLES = {
    "machine": _machine,
    "first-screen": _first_screen,
    "token-costs": _token_costs,
    "pass-costs": _pass_costs,
    "batch-costs": _batch_costs,
    "whole-models": _whole_models,
}
"""{name in the comment: function that writes the table}."""
