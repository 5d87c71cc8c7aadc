"""One rank of a run: loads each case plainly and under ZeRO-3, and writes what both gave as JSON for pytest to judge.

    deepspeed --num_gpus 2 tests/distributed/worker.py --cases cases.json --out folder
"""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
from deepspeed.runtime.swap_tensor import partitioned_param_swapper
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from hfq import HfqConfig
from hfq.modules.packed import PackedModule

INPUTS = [[3, 5, 7, 11, 13, 2], [1, 4, 9], [8, 8, 1, 30, 31]]


def ds_config(home: str, folder: Path, **zero) -> dict:
    offload = {"device": home, "pin_memory": False}
    if home == "nvme":
        offload["nvme_path"] = str(folder / "nvme")
    options = {
        "stage": 3, "offload_param": offload, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 20_000,
        "stage3_max_live_parameters": 60_000, "stage3_max_reuse_distance": 0, **zero,
    }  # fmt: skip
    if home == "none":
        del options["offload_param"]
    return {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": options,
        "aio": {"block_size": 4096, "queue_depth": 4, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True},
    }  # fmt: skip


def load(path: str, **options):
    config = HfqConfig(**options)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.bfloat16).eval()


def outputs(model, target=None) -> tuple[list[torch.Tensor], list[int]]:
    """Logits of three forwards, the first recording and the others following DeepSpeed's trace, and greedy tokens."""
    model, target = target or model, model
    with torch.no_grad():
        logits = [target(torch.tensor([tokens])).logits.clone() for tokens in INPUTS]
        tokens = model.generate(torch.tensor([INPUTS[0]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    return logits, tokens[0].tolist()


def resident(model) -> int:
    """The bytes of packed rows that this rank holds, in memory or on NVMe."""
    rows = [module.packed_row for module in model.modules() if isinstance(module, PackedModule)]
    return sum(row.ds_tensor.ds_numel * row.dtype.itemsize for row in rows)


def run(case: dict, plain, folder: Path) -> dict:
    config = ds_config(case["home"], folder, **case.get("zero", {}))
    alive = HfDeepSpeedConfig(config)
    started = time.perf_counter()
    model = load(case["checkpoint"], **case.get("options", {}))
    loading = model.hf_quantizer.loading
    seconds = time.perf_counter() - started
    engine = deepspeed.initialize(model=model, config=config)[0]
    logits, tokens = outputs(engine.module, engine)
    plan, filler = loading.zero_plan, loading.filler
    swapped = folder / "nvme"
    found = {
        "logits_equal": [torch.equal(a, b) for a, b in zip(logits, plain[0], strict=True)],
        "tokens_equal": tokens == plain[1], "resident": resident(engine.module), "packed_shard": plan.packed_shard_nbytes,
        "packed_total": plan.packed_nbytes, "rows": [row.nbytes for row in plan.rows if row.is_packed],
        "packed_read": filler.packed_read + filler.checked_read, "seconds": seconds, "line": loading.describe_shards(),
        "written": sum(file.stat().st_size for file in swapped.rglob("*") if file.is_file()),
        "swapped_in": loading.swapper.nbytes_read if loading.swapper else None,
    }  # fmt: skip
    del alive, engine, model, loading
    gc.collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    partitioned_param_swapper.MIN_AIO_BYTES = 4096  # tiny shards are swapped, too
    deepspeed.init_distributed()
    rank, results, plain = torch.distributed.get_rank(), {}, {}
    for case in json.loads(arguments.cases.read_text()):
        path = case["checkpoint"]
        if path not in plain:
            plain[path] = outputs(load(path))
        try:
            results[case["id"]] = run(case, plain[path], arguments.out / case["id"])
        except Exception as error:
            results[case["id"]] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    (arguments.out / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    sys.exit(main())
