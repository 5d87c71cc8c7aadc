"""One rank of a tensor parallel run.

The worker loads each case whole and sliced, compares both, and writes the results as JSON for the tests.

torchrun --nproc_per_node 2 tests/distributed/tp_worker.py --cases cases.json --out folder
"""

import argparse
import contextlib
import copy
import gc
import json
import runpy
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hfq import HfqConfig
from hfq.errors import HfqError
from hfq.modules.quantized_module import QuantizedModule
from tests.support.leaving import leave

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "06_tensor_parallel.py"
TOKENS = torch.tensor([[3, 5, 7, 11, 13, 2], [1, 4, 9, 30, 31, 8]])


def load(case: dict, **options):
    return AutoModelForCausalLM.from_pretrained(
        case["path"], quantization_config=HfqConfig(**case.get("options", {})), dtype=torch.float32, **options
    ).eval()


def cut(case: dict, world: int):
    if case.get("standalone"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers deprecates the argument
            return load(case, tp_plan="auto")
    return load(
        case, distributed_config=DistributedConfig(tp_size=world, tp_plan=case.get("tp_plan", "auto"))
    )


def copy_error(model) -> str:
    try:
        copy.deepcopy(model)
    except HfqError as error:
        return str(error)
    return "copied"


def compare_modules(whole, model) -> dict:
    """Returns the layers whose slices are not bit-identical to the whole layer.

    Weights of all slices, and outputs of slices along the output, are compared.
    """
    slices, found = (
        model.hf_quantizer.loading.slices,
        {"weights": [], "outputs": [], "cut": len(model.hf_quantizer.loading.slices)},
    )
    for name, part in slices.items():
        ours, theirs = model.get_submodule(name), whole.get_submodule(name)
        parameters = slice(part.start, part.stop)
        expected = theirs.weight[parameters] if part.axis == "out" else theirs.weight[:, parameters]
        if not torch.equal(ours.weight, expected):
            found["weights"].append(name)
        inputs = torch.randn(5, theirs.in_features, generator=torch.Generator().manual_seed(1))
        if part.axis == "out" and not torch.equal(
            type(ours).forward(ours, inputs), theirs(inputs)[:, parameters]
        ):
            found["outputs"].append(name)
    return found


def gradient(model) -> torch.Tensor:
    width = model.config.hidden_size
    hidden = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(2)).requires_grad_()
    model(inputs_embeds=hidden).logits.square().sum().backward()
    return hidden.grad


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def run(case: dict, rank: int, world: int, out: Path) -> dict:
    case = {**case, "path": case.get("elsewhere", case["path"]) if rank else case["path"]}
    try:
        model = cut(case, world)
    except HfqError as error:
        return {"error": type(error).__name__, "text": str(error)}
    whole, loading = load(case), model.hf_quantizer.loading
    with torch.no_grad():
        logits = distance(model(TOKENS).logits, whole(TOKENS).logits)
        tokens = [m.generate(TOKENS, max_new_tokens=10, do_sample=False).tolist() for m in (model, whole)]
    packed = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    result = {
        "modules": compare_modules(whole, model),
        "logits": logits,
        "tokens": tokens[0] == tokens[1],
        "gradient": distance(gradient(model), gradient(whole)),
        "read": loading.read_report.read,
        "parts": sum(tensor.nbytes for module in packed for tensor in module.stored_tensors().values()),
        "rules": dict(model.tp_plan),
    }
    if case.get("copies"):
        result["copy"] = copy_error(model)
    if case.get("saves"):
        model.save_pretrained(out / f"saved-{case['id']}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {}
    for case in json.loads(arguments.cases.read_text()):
        results[case["id"]] = run(case, rank, world, arguments.out)
        gc.collect()
        dist.barrier()
    (arguments.out / f"rank{rank}.json").write_text(json.dumps(results))
    with open(arguments.out / f"example{rank}.txt", "w") as printed, contextlib.redirect_stdout(printed):
        sys.argv = [str(EXAMPLE), str(ROOT / "tests" / "data" / "tiny-llama-gptq"), "--tokens", "4"]
        runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
    leave()
