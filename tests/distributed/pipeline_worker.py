"""One stage of `examples/07_pipeline.py` for several checkpoints.

The worker compares the logits with those of the whole model, and counts the bytes that the stage has read.

torchrun --nproc_per_node 2 tests/distributed/pipeline_worker.py --cases cases.json --out folder
"""

import argparse
import importlib.util
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from hfq.modules.quantized_module import QuantizedModule
from tests.support.leaving import leave

EXAMPLE = Path(__file__).parents[2] / "examples" / "07_pipeline.py"
MICRO_BATCHES = 4


def run(case: dict, example, rank: int, world: int) -> dict:
    module = example.Stage(case["checkpoint"], rank, world)
    resting = {
        name: m.stored_tensors() for name, m in module.whole.named_modules() if isinstance(m, QuantizedModule)
    }
    held = sum(
        tensor.nbytes for tensors in resting.values() for tensor in tensors.values() if not tensor.is_meta
    )
    loading = module.whole.hf_quantizer.loading
    own = [name for name in loading.quantized if loading.devices[name] == "cpu"]
    codes = {name: m.infos[m.weight_format.codes_name].nbytes for name, m in loading.quantized.items()}
    stored = {name: sum(info.nbytes for info in m.infos.values()) for name, m in loading.quantized.items()}
    tokens = torch.randint(3, 90, (8, 6), generator=torch.Generator().manual_seed(1))
    stage = pipelining.PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = getattr(pipelining, case["schedule"])(stage, MICRO_BATCHES)
    with torch.no_grad():
        logits = schedule.step(*([tokens] if module.is_first else []))
    found = {
        "read": module.read.bytes_read,
        "held": held,
        "own": sum(stored[name] for name in own),
        "all": sum(stored.values()),
        "small": sum(stored[name] - codes[name] for name in stored if name not in own),
        "stage": [name.split(".")[2] for name in own],
    }
    if module.is_last:
        model = AutoModelForCausalLM.from_pretrained(
            case["checkpoint"], quantization_config=HfqConfig(cpu_memory="private")
        ).eval()
        with torch.no_grad():
            expected = torch.cat(
                [model(part, use_cache=False).logits for part in tokens.chunk(MICRO_BATCHES)]
            )
        found["equal"] = torch.equal(logits, expected)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--cases", "--out"):
        parser.add_argument(option, type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    spec = importlib.util.spec_from_file_location("pipeline", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    results = {
        case["id"]: run(case, example, rank, world) for case in json.loads(arguments.cases.read_text())
    }
    (arguments.out / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
