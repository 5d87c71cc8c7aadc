"""`make fuzz`: compares hfq's header reader with safetensors on mutated headers; prints a table.

Exit code 1: hfq accepted a header that safetensors refuses, read one differently, or raised another error than
HfqError. Each 10,000 headers have one seed, and `fuzz_headers.py 10000 --seed N` repeats them.

One million headers, minutes on one core, show any disagreement that 3 of a million such headers have with a
probability of 95 %. The rarest reason for a refusal occurs about as often.
"""

import argparse
import io
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import safetensors

from hfq import HfqError
from hfq.checkpoint.header import Header, parse_header, read_raw
from tests.support.fuzz_runs import print_outcomes, run_seeds
from tests.support.header_mutations import (
    MUTATIONS,
    as_file,
    mutate,
    mutate_text,
    random_header,
    serialised,
)

BY_FILE = 100
"""Every so many headers that both accept are also read from a file, with their metadata."""


def make_file(random: Random) -> bytes:
    """Returns a file whose header has one to three mutations, of its values or of its text."""
    pairs, nbytes = random_header(random)
    sizes = {"length": 0, "data": nbytes}
    is_text = random.random() < 0.5
    for _ in range(random.randint(0 if is_text else 1, 2)):
        if pairs:
            mutate(random, random.choice(MUTATIONS), pairs, sizes)
    raw = serialised(pairs).encode() if pairs else b"{}"
    for _ in range(random.randint(1, 2) if is_text else 0):
        raw = mutate_text(random, raw)
    return as_file(raw, sizes["data"], sizes["length"])


def read_by_hfq(file: bytes) -> Header:
    raw = read_raw(io.BytesIO(file), "x", len(file))
    return parse_header(raw, "x", (0, len(file), 0))


def read_by_safetensors(file: bytes) -> dict | None:
    """Returns {name: (dtype, shape)}, or None if safetensors refuses the file."""
    try:
        entries = safetensors.deserialize(file)
    except safetensors.SafetensorError:
        return None
    return {name: (entry["dtype"], entry["shape"]) for name, entry in entries}


def is_read_alike_from_a_file(file: bytes, header: Header, path: Path) -> bool:
    path.write_bytes(file)
    with safetensors.safe_open(path, "np") as opened:
        return set(opened.keys()) == set(header.tensors) and (opened.metadata() or {}) == header.metadata


def compare(file: bytes, path: Path, seen: Counter, stricter: Counter) -> str | None:
    """Counts the outcome of one header, and returns the disagreement, if any."""
    other = read_by_safetensors(file)
    try:
        header = read_by_hfq(file)
    except HfqError as error:
        seen["refused by both" if other is None else "refused by hfq alone"] += 1
        if other is not None:
            stricter[error.message.partition(": ")[2].rstrip(".") or error.message] += 1
        return None
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    if other is None:
        return "accepted by hfq alone"
    seen["accepted by both"] += 1
    alike = other == {name: (info.dtype, list(info.shape)) for name, info in header.tensors.items()}
    if alike and seen["accepted by both"] % BY_FILE == 0:
        seen["of these, also read from a file"] += 1
        alike = is_read_alike_from_a_file(file, header, path)
    return None if alike else "read differently"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1_000_000, help="number of headers")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    seen, stricter = Counter(), Counter()
    with tempfile.TemporaryDirectory() as folder:

        def attempt(random: Random) -> tuple[bytes, str | None]:
            file = make_file(random)
            return file, compare(file, Path(folder, "x.safetensors"), seen, stricter)

        wrong, about = run_seeds(arguments.count, arguments.seed, attempt)
    print(f"{arguments.count:,} headers, {about}, safetensors {safetensors.__version__}\n")
    print_outcomes("headers", seen, wrong, ["accepted by hfq alone", "read differently"], stricter)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
