"""Data-parallel generation: every process has the whole model and a share of the prompts. On a CPU, all of
them map one copy.

accelerate launch --multi_gpu --num_processes 2 examples/05_data_parallel.py tests/data/tiny-llama-gptq "def
f(" "import" "class A"
"""

import argparse
import json
import re
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfq import HfqConfig


def mapped_bytes(folder: Path) -> tuple[int, int]:
    """Returns (bytes of the checkpoint in this process's memory, its proportional share of them).

    Linux divides a page by the number of processes that map it.
    """
    rss = pss = 0
    for area in re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE
    ):
        if str(folder.resolve()) in area:
            rss += 1024 * int(re.search(r"^Rss: +(\d+)", area, re.MULTILINE)[1])
            pss += 1024 * int(re.search(r"^Pss: +(\d+)", area, re.MULTILINE)[1])
    return rss, pss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--max-new-tokens", type=int, default=8)
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    device_map = None if accelerator.device.type == "cpu" else {"": str(accelerator.device)}
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, quantization_config=HfqConfig(), device_map=device_map
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    answers = []
    with accelerator.split_between_processes(arguments.prompts) as share:
        for prompt in share:
            tokens = tokenizer(prompt, return_tensors="pt").to(accelerator.device)
            generated = model.generate(**tokens, max_new_tokens=arguments.max_new_tokens, do_sample=False)
            answers.append(
                {
                    "process": accelerator.process_index,
                    "prompt": prompt,
                    "text": tokenizer.decode(generated[0]),
                }
            )
    accelerator.wait_for_everyone()  # keeps every process's mapping alive until here
    memory = mapped_bytes(arguments.model) if device_map is None else None
    found = gather_object([{"answers": answers, "memory": memory}])
    if accelerator.is_main_process:
        everything = [answer for each in found for answer in each["answers"]]
        print(json.dumps({"answers": everything, "memory": [each["memory"] for each in found]}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
