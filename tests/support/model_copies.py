"""Copies of the tiny checkpoints that tests may change, and a record of opened files."""

import contextlib
import json
import os
import shutil
import sys

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from tests.support.tiny_models import DATA

_recordings = []


def _record(event, arguments):
    if event == "open" and _recordings and isinstance(arguments[0], (str, bytes, os.PathLike)):
        _recordings[-1].append(os.path.realpath(os.fsdecode(arguments[0])))


sys.addaudithook(_record)


@contextlib.contextmanager
def opened_files():
    """Collects the real paths of all files that this process opens in the context."""
    _recordings.append([])
    try:
        yield _recordings[-1]
    finally:
        _recordings.pop()


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=HfqConfig(), **options)


def copy_model(kind, folder):
    """Returns a copy of a tiny checkpoint (`gptq`, `fp8`, or `` for the unquantized one)."""
    return shutil.copytree(DATA / f"tiny-llama-{kind}".rstrip("-"), folder / f"model-{kind}")


def edit_config(folder, quantization=None, **changes):
    """Changes values of config.json: of the model, and of the quantization."""
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    config.get("quantization_config", {}).update(quantization or {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shard_model(folder):
    """Splits a model's file into two shards, the first half of its tensors first; returns their paths."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files, names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)], sorted(tensors)
    halves = dict(zip(files, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True))
    for file, half in halves.items():
        save_file({name: tensors[name] for name in half}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, half in halves.items() for name in half}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return [folder / file for file in files]


def cache_model(folder, cache, subfolder=""):
    """Moves a model into a Hub cache as `o/n`; returns a function that loads it from there offline."""
    repository = cache / "models--o--n"
    snapshot, blobs = repository / "snapshots" / "abc" / subfolder, repository / "blobs"
    for place in (snapshot, blobs, repository / "refs"):
        place.mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    for file in folder.iterdir():
        file.rename(blobs / file.name)
        os.symlink(os.path.relpath(blobs / file.name, snapshot), snapshot / file.name)
    options = {"cache_dir": cache, "local_files_only": True}
    return options | {"subfolder": subfolder} if subfolder else options
