"""Tests that adapters of quantized models train under DistributedDataParallel on two ranks.

Run as a script, this file is one rank.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from tests.support import tiny_models
from tests.support.models import load
from tests.support.zero_launch import once, start

CASES = {
    "gptq in memory": ("tiny-llama-gptq", None),
    "gptq on disk": ("tiny-llama-gptq", {"": "disk"}),
    "fp8 in memory": ("tiny-llama-fp8", None),
    "fp8 on disk": ("tiny-llama-fp8", {"": "disk"}),
}


def copied_kib(file):
    """Returns the KiB of a mapped file that this process has copied by writing to them."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if not line.partition(" ")[0].endswith(":"):
            is_inside = line.endswith(str(file))
        elif is_inside and line.startswith("Anonymous:"):
            total += int(line.split()[1])
    return total


def train(name, device_map, steps=2):
    """Returns the loss of each step, the sum of the adapters, and the copied KiB of the checkpoint."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)  # the adapters of rank 0 must reach rank 1
    model = load(tiny_models.DATA / name, device_map)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, 0.1))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    losses = []
    for step in range(steps):
        tokens = torch.arange(8)[None] + step + accelerator.process_index
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    total = sum(parameter.detach().double().sum().item() for parameter in trained)
    return losses, total, copied_kib(tiny_models.DATA / name / "model.safetensors")


def main(folder):
    found = {case: train(*arguments) for case, arguments in CASES.items()}
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    def run():
        folder = tmp_path_factory.mktemp("ranks")
        start([__file__, str(folder)], 2, folder / "printed")
        return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]

    return once(tmp_path_factory, "data_parallel", run)


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_train_the_same_adapters(ranks, case):
    assert ranks[0][case][1] == ranks[1][case][1]
    assert ranks[0][case][0] != ranks[1][case][0]  # each rank has its own batch


@pytest.mark.parametrize("kind", ["gptq", "fp8"])
def test_training_is_equal_in_memory_and_on_disk(ranks, kind):
    for rank in ranks:
        assert rank[f"{kind} in memory"][:2] == rank[f"{kind} on disk"][:2]


@pytest.mark.parametrize("case", CASES)
def test_no_rank_copies_the_mapped_file(ranks, case):
    assert [rank[case][2] for rank in ranks] == [0, 0]


if __name__ == "__main__":
    main(sys.argv[-1])
