"""One rank of a ZeRO-3 run.

The worker loads each case with and without ZeRO-3, and writes the results as JSON for the tests.

deepspeed --num_gpus 2 tests/distributed/worker.py --cases cases.json --out folder
"""

import argparse
import contextlib
import copy
import gc
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["HF_MODULES_CACHE"] = (
    tempfile.mkdtemp()
)  # each rank has a separate cache of the models' own code, as on separate nodes
import deepspeed
import torch
import transformers
from accelerate import Accelerator
from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper
from transformers.integrations import HfDeepSpeedConfig

import hfq.integrations.deepspeed.private_api as internals
from hfq import HfqConfig
from hfq.modules.quantized_module import QuantizedModule
from tests.support import compiled_io
from tests.support.leaving import leave

TOKENS = [[3, 5, 7, 11, 13, 2], [1, 4, 9], [8, 8, 1, 30, 31]]


def ds_config(shard_device: str, folder: Path, **zero) -> dict:
    """Returns a config that gathers, releases, prefetches, and swaps even tiny flat buffers."""
    offload = {
        "device": shard_device,
        "pin_memory": False,
        **({"nvme_path": str(folder / "nvme")} if shard_device == "nvme" else {}),
    }
    options = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 20_000,
        "stage3_max_live_parameters": 60_000,
        "stage3_max_reuse_distance": 0,
        **zero,
    }
    if shard_device != "none":
        options["offload_param"] = offload
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": options,
        "aio": {
            "block_size": 4096,
            "queue_depth": 4,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def load(case: dict, path: str, **options):
    auto = getattr(transformers, case.get("auto", "AutoModelForCausalLM"))
    arguments = {
        "quantization_config": HfqConfig(**options),
        "dtype": torch.bfloat16,
        **case.get("arguments", {}),
    }
    return auto.from_pretrained(path, **arguments).eval()


def outputs(case: dict, model, called, rank: int) -> tuple[list[torch.Tensor], list[int]]:
    """Returns the logits of three forwards, and greedy tokens.

    The first forward records DeepSpeed's trace, and the others follow it.
    """
    inputs = case.get("inputs") or [{"input_ids": [tokens]} for tokens in TOKENS]
    if case.get("differs"):  # each rank has different tokens
        inputs = [
            {
                name: [[(token + rank) % 90 for token in row] for row in parameters]
                for name, parameters in i.items()
            }
            for i in inputs
        ]
    with torch.no_grad():
        logits = [
            called(**{name: torch.tensor(parameters) for name, parameters in each.items()}).logits.clone()
            for each in inputs
        ]
        if not case.get("generates", True):
            return logits, []
        first = torch.tensor(inputs[0]["input_ids"])
        return logits, model.generate(first, max_new_tokens=3, do_sample=False, pad_token_id=0)[0].tolist()


def packed_modules(model) -> list[QuantizedModule]:
    return [module for module in model.modules() if isinstance(module, QuantizedModule)]


def gathered_equals_file(model, loading) -> bool:
    """Returns True if all quantized tensors that DeepSpeed gathers equal their files."""
    for module in packed_modules(model):
        with deepspeed.zero.GatheredParameters([module.flat_buffer]):
            for local, tensor in module.onloaded_tensors().items():
                info = module.infos[local]
                with open(info.range.file, "rb") as stream:
                    stream.seek(info.range.offset)
                    if stream.read(info.nbytes) != bytes(
                        tensor.contiguous().view(-1).view(torch.uint8).numpy()
                    ):
                        return False
    return True


def measures(model, loading, folder: Path) -> dict:
    plan, filler, swapper = loading.zero_plan, loading.maker.filler, loading.maker.swapper
    parameters = [module.flat_buffer for module in packed_modules(model)]
    return {
        "resident": sum(row.ds_tensor.ds_numel * row.dtype.itemsize for row in parameters),
        "packed_shard": plan.quantized_shard_nbytes,
        "packed_total": plan.quantized_nbytes,
        "rows": [row.nbytes for row in plan.parameters if row.is_quantized],
        "packed_read": filler.packed_read + filler.checked_read,
        "line": loading.describe_shards(),
        "written": sum(file.stat().st_size for file in (folder / "nvme").rglob("*") if file.is_file()),
        "swapped_in": swapper.nbytes_read if swapper else None,
        "buffers": swapper.most_nbytes if swapper else None,
        "dense_names": [name for name, _ in model.named_parameters() if not name.endswith("flat_buffer")],
        "dense_resident": [
            p.ds_tensor.numel() for n, p in model.named_parameters() if not n.endswith("flat_buffer")
        ],
    }


def run(case: dict, plain, path: str, folder: Path, rank: int) -> dict:
    config = ds_config(case["shard_device"], folder, **case.get("zero", {}))
    accelerator = (
        Accelerator() if case.get("accelerates") else None
    )  # its config file keeps a separate config alive
    alive = HfDeepSpeedConfig(config) if accelerator is None else None
    started = time.perf_counter()
    lacking = (
        mock.patch.object(internals, "_METHODS", ("_no_such_method",))
        if case.get("lacks")
        else contextlib.nullcontext()
    )
    with lacking:
        model = load(case, path, **case.get("options", {}))
    loading, found = model.hf_quantizer.loading, {"seconds": time.perf_counter() - started}
    if case.get("early"):
        found["early"] = errors_of_early_use(model)
    engine = (
        accelerator.prepare(model) if accelerator else deepspeed.initialize(model=model, config=config)[0]
    )
    logits, tokens = outputs(case, engine.module, engine, rank)
    found["logits_equal"] = [torch.equal(a, b) for a, b in zip(logits, plain[0], strict=True)]
    found["tokens_equal"] = tokens == plain[1]
    found["class"] = f"{type(model).__module__}.{type(model).__name__}"
    found |= measures(engine.module, loading, folder)
    if case.get("saves"):
        found["gathered_equals_file"] = gathered_equals_file(engine.module, loading)
        engine.module.save_pretrained(folder / "saved")
        found["report"] = str(hfq_report(engine.module))
    del alive, engine, model, loading
    gc.collect()
    return found


def hfq_report(model):
    import hfq

    return hfq.report(model)


def trainer(case: dict, path: str, config: dict):
    """Returns an engine that trains the norms and the head, with frozen quantized layers."""
    model = load(case, path, **case.get("options", {})).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "lm_head" in name)
    if case.get("recomputes"):
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def steps(engine, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        tokens = torch.tensor([TOKENS[0]])
        loss = engine(tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train(case: dict, path: str, folder: Path) -> dict:
    """Returns the losses of four steps, and of the last two after a resume.

    The resume loads DeepSpeed's checkpoint into a new engine.
    """
    config = ds_config(case["shard_device"], folder) | {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    alive = HfDeepSpeedConfig(config)
    engine = trainer(case, path, config)
    losses = steps(engine, 2)
    if case.get("resumes"):
        engine.save_checkpoint(folder / "checkpoint", exclude_frozen_parameters=True)
    losses += steps(engine, 2)
    found = {
        "losses": losses,
        "gathered_equals_file": gathered_equals_file(engine.module, engine.module.hf_quantizer.loading),
    }
    if case.get("resumes"):
        again = trainer(case, path, config)
        again.load_checkpoint(
            folder / "checkpoint", load_module_strict=False
        )  # frozen parameters are not in it
        found["resumed"] = steps(again, 2)
        found["saved_nbytes"] = sum(
            file.stat().st_size for file in (folder / "checkpoint").rglob("*") if file.is_file()
        )
    del alive
    return found


def run_stock(folder: Path) -> dict:
    """Returns how DeepSpeed alone changes a frozen int32 parameter that is partitioned to NVMe."""
    words = torch.randint(
        -(2**31), 2**31 - 1, (1 << 16,), dtype=torch.int32, generator=torch.Generator().manual_seed(3)
    )
    module = torch.nn.Module()
    module.words = torch.nn.Parameter(words.clone(), requires_grad=False)
    deepspeed.zero.Init(module=module, config_dict_or_path=ds_config("nvme", folder))
    with deepspeed.zero.GatheredParameters([module.words]):
        back = module.words.data.clone()
    return {
        "words_destroyed": (back.to(torch.int64) != words.to(torch.int64)).float().mean().item(),
        "dtype": str(back.dtype),
    }


def run_whole(case: dict, plain) -> dict:
    """Returns the results of DeepSpeed engines for a model that every rank holds whole.

    The model is loaded without a DeepSpeed config, and with a config of stage 2.
    """
    optimized = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, **optimized}
    found = {"plain": [], "held": []}

    def engine(model, stage: int):
        norms = [parameter.requires_grad_() for name, parameter in model.named_parameters() if "norm" in name]
        config["zero_optimization"] = {"stage": stage}
        return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(norms), config=config)[0]

    for stage in (2, 3):
        try:
            engine(load(case, case["checkpoint"]), stage)
        except Exception as error:
            found["plain"].append(f"{type(error).__name__}: {error}")
    alive = HfDeepSpeedConfig(config | {"zero_optimization": {"stage": 2}})
    model = engine(load(case, case["checkpoint"]), 2)
    del alive
    found["held"] = sorted({module.storage_kind for module in packed_modules(model)})
    found["logits_equal"] = [
        torch.equal(a, b) for a, b in zip(outputs(case, model.module, model, 0)[0], plain[0], strict=True)
    ]
    return found


def errors_of_early_use(model) -> list[str]:
    """Returns the errors that users see if they forget the engine or do not gather weights."""
    layer, found = packed_modules(model)[0], []
    for use in (
        lambda: model(torch.tensor([[1, 2]])),
        lambda: layer(torch.zeros(1, 128)),
        lambda: layer.weight @ torch.zeros(128),
        lambda: copy.deepcopy(model),
    ):
        try:
            use()
            found.append("no error")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def serve(run_case: Callable[[dict, Path, int], dict]) -> None:
    """Runs every case, and writes its results or its error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    partitioned_param_swapper.MIN_AIO_BYTES = optimizer_utils.MIN_AIO_BYTES = (
        4096  # tiny shards are swapped, too
    )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # with gloo alone, nothing needs a compiler
    )
    compiled_io.use()
    deepspeed.init_distributed()
    gc.freeze()  # excludes imported objects from the collection after each case
    rank, results = torch.distributed.get_rank(), {}
    for case in json.loads(arguments.cases.read_text()):
        try:
            results[case["id"]] = run_case(case, arguments.out / case["id"], rank)
        except Exception as error:
            results[case["id"]] = {
                "error": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc(),
            }
    (arguments.out / f"rank{rank}.json").write_text(json.dumps(results))


def main() -> None:
    plain: dict[str, tuple] = {}

    def run_case(case: dict, folder: Path, rank: int) -> dict:
        path = case["checkpoint"]
        if case.get("stock"):
            return run_stock(folder)
        if case.get("trains"):
            return train(case, path, folder)
        if path not in plain and not case.get("fails"):
            model = load(case, path)
            plain[path] = outputs(case, model, model, rank)
        if case.get("whole"):
            return run_whole(case, plain[path])
        return run(case, plain.get(path), case.get("elsewhere", path) if rank else path, folder, rank)

    serve(run_case)


if __name__ == "__main__":
    main()
    leave()
