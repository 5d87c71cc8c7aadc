"""One rank of FMS's tensor parallelism.

The worker loads each case through both entry points, and compares the logits with those of one process.

    python tests/interop/fms_worker.py RANK WORLD FOLDER

FOLDER holds cases.pt. The ranks write store and rank<n>.json there.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from fms.models import get_model

import hfq
from hfq import HfqConfig
from hfq.modules.quantized_module import QuantizedModule
from tests.support.leaving import leave

CONFIG = HfqConfig(kernel="reference")


def held(model) -> int:
    """Returns the bytes of codes on a rank."""
    packed = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    return sum(module.onloaded_tensors()[module.weight_format.codes_name].nbytes for module in packed)


def run(path: str, tokens: torch.Tensor, expected: torch.Tensor, is_quantized: bool) -> dict:
    doors = {"load": hfq.fms.load(path, data_type=torch.float32, distributed_strategy="tp", config=CONFIG)}
    if is_quantized:
        doors["registry"] = get_model(
            "hf_pretrained",
            model_path=path,
            data_type=torch.float32,
            distributed_strategy="tp",
            linear_config={"linear_type": "hfq"},
        )
    result = {}
    for door, model in doors.items():
        with torch.no_grad():
            found = model.eval()(tokens)
        result[door] = {"error": float((found - expected).norm() / expected.norm()), "held": held(model)}
    return result


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    cases = torch.load(folder / "cases.pt")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    hfq.fms.register(CONFIG)
    results = {id: run(*case) for id, case in cases.items()}
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main()
    leave()
