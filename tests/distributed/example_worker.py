"""One rank that runs an example several times, with the arguments of separate starts.

deepspeed --num_gpus 2 tests/distributed/example_worker.py examples/finetune_lora.py runs.json
"""

import gc
import json
import runpy
import sys
from pathlib import Path

import deepspeed
import torch
from accelerate.state import AcceleratorState

from tests.support.leaving import leave


def main() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # with gloo alone, nothing needs a compiler
    )
    torch.set_num_threads(1)
    rank, script, runs = sys.argv[1:]  # the launcher names the rank first
    for arguments in json.loads(Path(runs).read_text()):
        sys.argv = [script, rank, *arguments]
        runpy.run_path(script, run_name="__main__")
        AcceleratorState._reset_state(reset_partial_state=True)
        gc.collect()


if __name__ == "__main__":
    main()
    leave()
