"""Part of `make fuzz`: compares hfq's reader of GGUF headers with ggml and gguf on mutated files; prints a table.

Exit code 1: hfq accepted a file that ggml's `gguf_init_from_file` refuses, read one otherwise than ggml or the
package gguf, or raised another error than HfqError. Each 10,000 files have one seed, and
`fuzz_gguf_headers.py 10000 --seed N` repeats them. A reader that is not installed is left out, and the first
line says so.
"""

import argparse
import importlib.util
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

from hfq import HfqError
from hfq.checkpoint.gguf.header import GgufArray, GgufHeader, read_gguf_header
from tests.support import ggml_library
from tests.support.fuzz_runs import print_outcomes, run_seeds
from tests.support.gguf_files import IDS
from tests.support.gguf_mutations import MUTATIONS, mutated

MEMORY = Path("/dev/shm")
"""A folder in memory, in which files are written much faster than on a disk."""
HAS_GGML, HAS_GGUF = ggml_library.is_installed(), importlib.util.find_spec("gguf") is not None
if HAS_GGUF:
    from gguf import GGUFReader


def tensors_of(header: GgufHeader) -> dict:
    """Returns {name: (number of the type, offset in the data, bytes)}."""
    return {
        name: (IDS[info.blocks.type], info.range.offset - header.data_start, info.nbytes)
        for name, info in header.tensors.items()
    }


def is_equal_to_gguf(path: Path, header: GgufHeader) -> bool | None:
    """Returns True if gguf finds the same tensors and values, or None if it refuses the file."""
    try:
        found = GGUFReader(path)
        keys = {name: field.contents() for name, field in found.fields.items() if name[:5] != "GGUF."}
    except Exception:  # numpy's, and struct's
        return None
    tensors = {
        tensor.name: (
            int(tensor.tensor_type),
            int(tensor.data_offset) - found.data_offset,
            int(tensor.n_bytes),
        )
        for tensor in found.tensors
    }
    values = {key: value for key, value in header.keys.items() if not is_unkept(value)}
    return tensors == tensors_of(header) and all(
        repr(keys.get(key)) == repr(list(value.values) if isinstance(value, GgufArray) else value)
        for key, value in values.items()
    )


def is_unkept(value: object) -> bool:
    return isinstance(value, GgufArray) and value.values is None


def compare(path: Path, seen: Counter, stricter: Counter) -> str | None:
    """Counts the outcome of one file, and returns the disagreement, if any."""
    other = ggml_library.read_tensors(path) if HAS_GGML else None
    try:
        header = read_gguf_header(path)
    except HfqError as error:
        seen["refused by hfq alone" if other is not None else "refused by hfq"] += 1
        if other is not None:
            reason = error.message.partition(": ")[2].rstrip(".") or error.message
            stricter[re.sub(r"\d+", "N", reason)] += 1
        return None
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    seen["accepted by hfq"] += 1
    if HAS_GGML and other is None:
        return "accepted by hfq alone"
    if HAS_GGML and other != tensors_of(header):
        return "read otherwise than by ggml"
    alike = is_equal_to_gguf(path, header) if HAS_GGUF else None
    seen["of these, also read by gguf"] += alike is not None
    return "read otherwise than by gguf" if alike is False else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=500_000, help="number of files")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    seen, stricter = Counter(), Counter()
    print(f"ggml {'is' if HAS_GGML else 'is not'} compared, gguf {'is' if HAS_GGUF else 'is not'} compared")
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        path = Path(folder, "x.gguf")

        def attempt(random: Random) -> tuple[bytes, str | None]:
            file = mutated(random, random.choices(MUTATIONS, k=random.randint(1, 3)))
            path.write_bytes(file)
            return file, compare(path, seen, stricter)

        wrong, about = run_seeds(arguments.count, arguments.seed, attempt)
    print(f"{arguments.count:,} files, {about}\n")
    print_outcomes("files", seen, wrong, ["accepted by hfq alone"], stricter)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
