"""Generate with a quantized model split over processes. Each reads and holds its slice of every layer.

    torchrun --nproc_per_node 2 examples/06_tensor_parallel.py FOLDER_OR_MODEL [--prompt TEXT] [--tokens 20]

On accelerators torchrun gives each process one; without any the processes are CPU processes that talk through
gloo.
"""

import argparse

import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

from hfq import HfqConfig
from hfq.modules.quantized_module import QuantizedModule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt", default="The return value is")
    parser.add_argument("--tokens", type=int, default=20)
    arguments = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, quantization_config=HfqConfig(), distributed_config=DistributedConfig(tp_plan="auto")
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)

    is_shared = dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if is_shared else (0, 1)
    packed = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    held = sum(tensor.nbytes for module in packed for tensor in module.stored_tensors().values())
    stored = sum(info.nbytes for module in packed for info in module.infos.values())
    print(f"rank {rank} of {world}: {held:,} of {stored:,} quantized bytes", flush=True)

    inputs = tokenizer(arguments.prompt, return_tensors="pt").to(model.device)
    tokens = model.generate(
        **inputs, max_new_tokens=arguments.tokens, do_sample=False
    )  # all ranks must call it
    if rank == 0:
        print(tokenizer.decode(tokens[0], skip_special_tokens=True), flush=True)
    if is_shared:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
