"""What each DeepSpeed config does to a small model: run by
`deepspeed --num_gpus 2 run_deepspeed.py OUT CONFIG… --deepspeed_config X`.

Every rank writes OUT/<config>-<rank>.json: logits of the untrained model, the loss of two training steps, and
the bytes it holds.
"""

import argparse
import hashlib
import json
from pathlib import Path

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations import HfDeepSpeedConfig

from tests.support import compiled_io
from tests.support.leaving import leave

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone: nothing to compile

FILLED = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
"""What Trainer and accelerate put in place of "auto"."""


def filled(config: dict) -> dict:
    """A config without "auto"."""
    return config | {key: value for key, value in FILLED.items() if config.get(key) == "auto"}


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def digest(logits: torch.Tensor) -> str:
    return hashlib.sha256(logits.float().numpy().tobytes()).hexdigest()


def held_bytes(engine) -> dict:
    """Every parameter's elements, and the bytes of this rank: weights by home, float32 masters, and
    moments.
    """
    weights: dict[str, int] = {}
    for parameter in engine.module.parameters():
        shard = parameter.ds_tensor
        home = "nvme" if getattr(shard, "final_location", None) == "nvme" else "memory"
        weights[home] = weights.get(home, 0) + shard.ds_numel * shard.element_size()
    optimizer = engine.optimizer
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", [])
    states = [
        value for state in getattr(optimizer, "state", {}).values() for value in state.values() if value.dim()
    ]
    sizes = [[p.ds_numel, p.requires_grad] for p in engine.module.parameters()]
    return {
        "sizes": sizes,
        "weights": weights,
        "masters": sum(t.nbytes for t in masters),
        "moments": sum(t.nbytes for t in states),
    }


def run(path: Path, config: dict) -> dict:
    alive = HfDeepSpeedConfig(filled(config))
    model = small_model()
    trains = not path.stem.startswith("inference")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains and "q_proj" in name)
    optimizer = (
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2) if trains else None
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=alive.config)
    tokens = torch.arange(32)[None] * 7 % 4096
    engine.eval()
    with torch.no_grad():
        logits = [engine(input_ids=tokens).logits for _ in range(3)]
    found = {"logits": [digest(each) for each in logits]}
    engine.train()
    losses = []
    for _ in range(2 if trains else 0):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found |= {"losses": losses, "held": held_bytes(engine)}
    engine.destroy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("configs", type=Path, nargs="*")
    parser.add_argument("--local_rank", type=int)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    compiled_io.use()
    deepspeed.init_distributed()
    for path in (Path(arguments.deepspeed_config), *arguments.configs):
        found = run(path, json.loads(path.read_text()))
        rank = torch.distributed.get_rank()
        (arguments.out / f"{path.stem}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    leave()
