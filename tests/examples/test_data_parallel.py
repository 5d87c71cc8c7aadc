"""Tests of the data-parallel example through `accelerate launch`.

It answers all prompts in the same way as one process, from one copy of the bytes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfq import HfqConfig
from tests.support import tiny_models

SCRIPT = Path(__file__).parents[2] / "examples" / "05_data_parallel.py"
GPTQ = tiny_models.DATA / "tiny-llama-gptq"
PROMPTS = ["def f(", "import", "class A"]


@pytest.mark.slow
def test_two_processes_share_the_prompts_and_one_copy_of_the_weights():
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
    ]
    done = subprocess.run([*launcher, SCRIPT, GPTQ, *PROMPTS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(answer["process"], answer["prompt"]) for answer in found["answers"]] == list(
        zip((0, 0, 1), PROMPTS, strict=True)
    )
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(GPTQ, quantization_config=HfqConfig()),
        AutoTokenizer.from_pretrained(GPTQ),
    )
    for answer in found["answers"]:
        generated = model.generate(
            **tokenizer(answer["prompt"], return_tensors="pt"), max_new_tokens=8, do_sample=False
        )
        assert answer["text"] == tokenizer.decode(generated[0])
    assert len(found["memory"]) == 2
    for in_memory, own_share in found["memory"]:
        assert in_memory > 800_000  # the file has 869,056 bytes
        assert own_share < 0.6 * in_memory  # half, except for pages that only one process has read
