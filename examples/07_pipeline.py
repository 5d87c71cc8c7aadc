"""Pipeline-parallel inference: each process loads its own layers, and micro-batches are in flight between the
processes.

torchrun --nproc_per_node 2 examples/07_pipeline.py tests/data/tiny-llama-gptq --batch 4 --micro-batches 4

For causal models whose base model takes `inputs_embeds`, runs `layers` and ends in `norm`, such as Llama,
Mistral, Qwen, and Mixtral.
"""

import argparse
import json

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from transformers import AutoConfig, AutoModelForCausalLM

from hfq import HfqConfig


class Stage(torch.nn.Module):
    """Some of the layers. Maps tokens or hidden states to hidden states or logits."""

    def __init__(self, path: str, rank: int, world: int) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(path)
        total, self.is_first, self.is_last = config.num_hidden_layers, rank == 0, rank == world - 1
        own = range(total * rank // world, total * (rank + 1) // world)
        here = {f"model.layers.{layer}": layer in own for layer in range(total)}
        here |= {"model.embed_tokens": self.is_first, "model.norm": self.is_last, "lm_head": self.is_last}
        if config.tie_word_embeddings:
            here["model.embed_tokens"] = here.pop("lm_head") or self.is_first
        devices = {
            "": "cpu",
            **{name: "disk" for name, is_here in here.items() if not is_here},
        }  # and is never read from there
        self.whole = AutoModelForCausalLM.from_pretrained(
            path, device_map=devices, quantization_config=HfqConfig(cpu_memory="private")
        ).eval()
        self.base, self.read = self.whole.model, self.whole.hf_quantizer.loading.reader.counters
        self.base.layers = self.base.layers[own.start : own.stop]
        if not self.is_last:
            self.base.norm = torch.nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.base(
            **{"input_ids" if self.is_first else "inputs_embeds": inputs}, use_cache=False
        ).last_hidden_state
        return self.whole.lm_head(hidden) if self.is_last else hidden


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    for option, default in (("--batch", 4), ("--micro-batches", 4), ("--length", 8)):
        parser.add_argument(option, type=int, default=default)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    module = Stage(arguments.model, rank, world)
    tokens = torch.randint(
        3, 90, (arguments.batch, arguments.length), generator=torch.Generator().manual_seed(0)
    )
    stage = pipelining.PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, arguments.micro_batches)
    with torch.no_grad():
        logits = schedule.step(*([tokens] if module.is_first else []))
    print(json.dumps({"rank": rank, "read": module.read.bytes_read}), flush=True)
    if module.is_last:
        print(json.dumps({"greedy": logits[:, -1].argmax(-1).tolist()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
