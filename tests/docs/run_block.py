"""One rank that runs a block of a page, and a forward of the model that it makes: `run_decoder_layer.py BLOCK OUT`,
on some ranks.

Every rank writes OUT/rank<n>.json: how many there are, and logits. `path` is a small GPTQ checkpoint.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch

from tests.support.leaving import leave

DATA = Path(__file__).parents[1] / "data"


def main() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone: nothing to compile
    block, out = map(Path, sys.argv[-2:])
    os.chdir(out)
    names = {"path": str(DATA / "tiny-llama-gptq")}
    exec(compile(block.read_text(encoding="utf-8"), block, "exec"), names)
    model = names.get("engine", names["model"])
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(16)[None]).logits.float()
    found = {"world": torch.distributed.get_world_size(), "logits": logits.tolist()}
    (out / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    leave()
