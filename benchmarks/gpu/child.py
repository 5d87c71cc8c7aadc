"""The process of one part: `python -m benchmarks.gpu.child MODULE RECORDS BENCH`.

It writes each record as one line of JSON when it is measured, so that they survive the process.
"""

from __future__ import annotations

import importlib
import json
import sys

from benchmarks.gpu.bench import Bench

__all__ = ["main"]


def main(module: str, file: str, bench: str) -> None:
    """Measures one part.

    Args:
        module: The part's module. Its `measure` yields records.
        file: File of the records. The last line is `null` if the part ran to its end.
        bench: `Bench.to_json`.
    """
    with open(file, "w", encoding="utf-8") as stream:
        for record in importlib.import_module(module).measure(Bench.from_json(bench)):
            print(json.dumps(record), file=stream, flush=True)
        print("null", file=stream, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
