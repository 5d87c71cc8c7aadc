"""Quantizes a checkpoint, killed at every seventh call that changes the disk, and each time resumed.

Arguments: the checkpoint, an empty folder, and the number of the first call. Prints that of the last one.
"""

import json
import sys
from pathlib import Path

import torch

import hfq
from tests.support.kill_points import is_killed

source, folder, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
target, hidden, journal = folder / "out", folder / ".out.quantizing", ".hfq-journal.json"


def quantize(output_dir=target):
    torch.set_num_threads(1)
    hfq.quantize(source, hfq.Recipe("rtn", group_size=64), output_dir)


def content(of):
    return {file.name: file.read_bytes() for file in of.iterdir() if file.name != journal}


def finished():
    """The finished shards of a killed run, with their times."""
    begun = next((each for each in (hidden, target) if (each / journal).exists()), None)
    shards = json.loads((begun / journal).read_text())["shards"] if begun else {}
    return {name: (begun / name).stat().st_mtime_ns for name in shards}


assert not is_killed(lambda: quantize(folder / "reference"), folder, 0)
expected, was_killed = content(folder / "reference"), True
while was_killed and number <= 200:
    was_killed = is_killed(quantize, folder, number)
    assert not target.exists() or content(target) == expected, f"half-written at call {number}"
    kept = finished()
    if was_killed and not (target.exists() and not (target / journal).exists()):
        assert not is_killed(quantize, folder, 0)
    assert content(target) == expected, f"other bytes at call {number}"
    assert {name: (target / name).stat().st_mtime_ns for name in kept} == kept, f"lost at call {number}"
    assert sorted(path.name for path in folder.iterdir()) == ["out", "reference"], f"leftovers at {number}"
    assert not (target / journal).exists()
    for file in target.iterdir():
        file.unlink()
    target.rmdir()
    number += 7
print(number)
