"""One rank of runs that train LoRA adapters under ZeRO-3 on quantized and dequantized models.

deepspeed --num_gpus 2 tests/distributed/lora_worker.py --cases cases.json --out folder
"""

import gc
import time
from pathlib import Path

import deepspeed
import torch
import worker
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

from hfq import HfqConfig
from tests.support.leaving import leave

DATA = Path(__file__).parents[1] / "data"
BLOCK, BLOCKS = 64, 10
"""Tokens per sample, and number of samples.

Ranks use the samples in turn, so that 20 steps on 2 ranks use each sample four times.
"""


def blocks() -> torch.Tensor:
    """Returns the beginning of the held-out text of the tiny model, int64 [BLOCKS, 1, BLOCK]."""
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tiny-llama")
    tokens = tokenizer((DATA / "tiny-llama" / "held_out.txt").read_text(encoding="utf-8")[:6000])["input_ids"]
    return torch.tensor(tokens[: BLOCKS * BLOCK]).view(BLOCKS, 1, BLOCK)


def load(case: dict):
    options = {} if case.get("plain") else {"quantization_config": HfqConfig(**case.get("options", {}))}
    return AutoModelForCausalLM.from_pretrained(case["checkpoint"], dtype=torch.bfloat16, **options)


def adapted(case: dict):
    model = load(case)
    if not case.get("plain"):
        model = prepare_model_for_kbit_training(model, bool(case.get("recomputes")), case.get("recomputes"))
    torch.manual_seed(0)
    options = {"target_modules": "all-linear", **case.get("lora", {})}
    config = LoraConfig(r=8, task_type="CAUSAL_LM", **options)
    return get_peft_model(model, config, autocast_adapter_dtype=not case.get("half"))


def start(case: dict, config: dict):
    model = adapted(case).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def steps(engine, samples: torch.Tensor, rank: int, numbers: range) -> list[float]:
    """Returns the losses of this rank's samples at each step."""
    losses = []
    for step in numbers:
        tokens = samples[(2 * step + rank) % BLOCKS]
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def logits(model, samples: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=samples[0]).logits


def options_of(case: dict) -> dict:
    """Returns the options of a case for `zero_optimization`.

    Optimizer states are in CPU memory, or on NVMe in the folder that the case names. An unquantized model is
    gathered less often. Adapters stay gathered, as under configs/deepspeed. Quantized weights do not, unless
    the case sets `kept`.
    """
    states = {"device": "nvme", "nvme_path": case["states"]} if "states" in case else {"device": "cpu"}
    wide = {
        "stage3_prefetch_bucket_size": 10**6,
        "stage3_max_live_parameters": 10**7,
        "stage3_max_reuse_distance": 10**7,
    }
    kept = {"stage3_param_persistence_threshold": case.get("kept", 4000)}
    return {
        "offload_optimizer": states | {"pin_memory": False},
        **kept,
        **(wide if case.get("plain") else {}),
    }


def states_on(folder: Path) -> int:
    """Returns the bytes of optimizer states that DeepSpeed has swapped out."""
    return sum(file.stat().st_size for file in folder.glob("**/optimizer/**/*.swp"))


def train(case: dict, folder: Path, rank: int) -> dict:
    config = worker.ds_config(case["shard_device"], folder, **options_of(case))
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    alive, samples, half, count = HfDeepSpeedConfig(config), blocks(), 10, case.get("steps", 20)
    engine = start(case, config)
    samples %= engine.module.config.vocab_size
    started = time.perf_counter()
    losses = steps(engine, samples, rank, range(min(half, count)))
    if case.get("resumes"):
        engine.save_checkpoint(folder / "checkpoint", exclude_frozen_parameters=True)
    losses += steps(engine, samples, rank, range(half, count))
    found: dict = {
        "losses": losses,
        "seconds": time.perf_counter() - started,
        "states_on_nvme": states_on(Path(case.get("states", folder))),
    }
    if not case.get("plain"):
        found["gathered_equals_file"] = worker.gathered_equals_file(engine.module, None)
    if case.get("resumes"):
        again = start(case, config)
        again.load_checkpoint(
            folder / "checkpoint", load_module_strict=False
        )  # frozen parameters are not in it
        found["resumed"] = steps(again, samples, rank, range(half, count))
        files = [
            torch.load(file, weights_only=False) for file in (folder / "checkpoint").rglob("*model_states.pt")
        ]
        found["saved"] = [name for file in files for name in file["module"]]
        del again
    if case.get("saves"):
        engine.module.save_pretrained(folder / "adapter", autocast_adapter_dtype=not case.get("half"))
        engine.eval()
        sharded = logits(engine, samples)
    del alive, engine
    gc.collect()
    if case.get("saves"):
        model = PeftModel.from_pretrained(
            load(case), folder / "adapter", autocast_adapter_dtype=not case.get("half")
        )
        unsharded = logits(model.eval(), samples)
        found["adapters"] = sum(
            parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name
        )
        found["logits_equal"] = torch.equal(sharded, unsharded)
        found["logits_apart"] = (sharded.float() - unsharded.float()).abs().max().item()
    return found


if __name__ == "__main__":
    worker.serve(train)
    leave()
