"""LoRA under ZeRO-3 on two ranks: one curve wherever shards rest, that of the dequantized model, stopped and resumed, saved and loaded."""

from pathlib import Path

import pytest
import torch
from lora_runs import PATHS, load, unpack
from test_zero3_matrix import is_async_io_built
from transformers import AutoModelForCausalLM
from zero_launch import launch

pytestmark = pytest.mark.slow

WORKER = Path(__file__).parent / "lora_worker.py"
CPU = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}


def write_dequantized(folder: Path, name: str) -> str:
    """The model as torch's own layers, in bfloat16."""
    packed = load(name, dtype=torch.bfloat16)
    state, config = unpack(packed).state_dict(), packed.config
    config.__dict__.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(state)
    plain.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of both ranks."""
    folder = tmp_path_factory.mktemp("lora")
    gptq, fp8 = (str(PATHS[name]) for name in ("gptq", "fp8"))
    cases = [
        {"id": "gptq, none", "checkpoint": gptq, "home": "none", "saves": True},
        {"id": "gptq, cpu", "checkpoint": gptq, "home": "cpu", "zero": CPU, "resumes": True},
        {"id": "gptq, in place", "checkpoint": gptq, "home": "nvme", "zero": CPU, "recomputes": {"use_reentrant": False}},
        {"id": "gptq, dequantized", "checkpoint": write_dequantized(folder / "gptq", "gptq"), "home": "none", "plain": True},
        {"id": "fp8, in place", "checkpoint": fp8, "home": "nvme", "recomputes": {"use_reentrant": True}, "saves": True},
        {"id": "fp8, dequantized", "checkpoint": write_dequantized(folder / "fp8", "fp8"), "home": "none", "plain": True},
    ]
    if is_async_io_built():
        states = {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder / "states"), "pin_memory": False}}
        cases.append({"id": "gptq, states on nvme", "checkpoint": gptq, "home": "nvme", "zero": states, "steps": 10})
    return launch(folder / "run", cases, ranks=2, worker=WORKER)
