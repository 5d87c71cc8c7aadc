"""`import hfq` registers with transformers whichever comes first, and changes nothing for those who pass no
HfqConfig.
"""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support import tiny_models
from tests.support.zero_launch import once

CHECK = """
from transformers.quantizers import auto
from transformers import modeling_utils
from transformers.models.auto import auto_factory
assert "hfq" in auto.AUTO_QUANTIZER_MAPPING and "hfq" in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
assert hasattr(modeling_utils.get_hf_quantizer, "__wrapped__")
assert hasattr(modeling_utils.PreTrainedModel.from_pretrained.__func__, "__wrapped__")
assert hasattr(auto_factory._BaseAutoModelClass.from_pretrained.__func__, "__wrapped__")
assert not hasattr(modeling_utils.get_hf_quantizer.__wrapped__, "__wrapped__")
"""
NAMES = ["tiny-llama", "tiny-llama-fp8"]
STOCK = f"""
import hashlib
from transformers import AutoModelForCausalLM
for path in {[str(tiny_models.DATA / name) for name in NAMES]}:
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad(): logits = model(torch.arange(24)[None]).logits.float()
    state = {{name: (str(t.dtype), tuple(t.shape)) for name, t in model.state_dict().items()}}
    print(hashlib.sha256(logits.numpy().tobytes() + repr(sorted(state.items())).encode()).hexdigest())
"""
GUARD = """
for path, options in (("/nope/x", {}), ("/nope", {"gguf_file": "x.gguf"})):
    try:
        AutoModelForCausalLM.from_pretrained(path, quantization_config=hfq.HfqConfig(), **options)
    except hfq.HfqError as error:
        print(type(error).__name__)
"""
BOTH_SIDES = f"""
import os
child = os.fork()
finite = []
for name in ("tiny-llama-gptq", "tiny-llama-fp8"):
    model = AutoModelForCausalLM.from_pretrained(
        {str(tiny_models.DATA)!r} + "/" + name, quantization_config=hfq.HfqConfig(), device_map={{"": "cpu", "model.layers.2": "disk"}}
    )
    with torch.no_grad(): finite.append(bool(torch.isfinite(model(torch.arange(9)[None]).logits).all()))
if child == 0: os._exit(0 if all(finite) else 1)
assert all(finite) and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
RUNS = {
    "alone": ("from transformers import AutoModelForCausalLM", (STOCK,)),
    "hfq": ("import hfq", (CHECK,)),
    "a name of hfq": ("from hfq import HfqConfig", (CHECK,)),
    "a module of hfq": ("from hfq.loading.model_loader import ModelLoader", (CHECK,)),
    "hfq, a model": ("import hfq\nfrom transformers import LlamaForCausalLM", (CHECK,)),
    "hfq first": ("import hfq\nfrom transformers import AutoModelForCausalLM", (CHECK, STOCK, GUARD)),
    "hfq after": ("from transformers import AutoModelForCausalLM\nimport hfq", (CHECK, STOCK, GUARD)),
    "forked": ("import hfq\nfrom transformers import AutoModelForCausalLM", (BOTH_SIDES,)),
}
"""What is imported, and what is run after it, in one process each."""
# what transformers imports but knows neither it nor hfq is imported once; each run is a fork that knows
# nothing else
FORKS = """
import contextlib, io, json, os, sys, traceback
import huggingface_hub, safetensors.torch, tokenizers
import torch, torch.distributed.tensor, torch.export
torch.set_num_threads(1)
assert not {"transformers", "hfq", "accelerate"} & set(sys.modules)
for imports, scripts in json.load(sys.stdin):
    read, write = os.pipe()
    if os.fork() == 0:
        found, names = [], {"torch": torch}
        try:
            exec(imports, names)
            for script in scripts:
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    exec(script, names)
                found.append([said.getvalue(), ""])
        except BaseException:
            found += [["", traceback.format_exc()]] * (len(scripts) - len(found))
        os.write(write, json.dumps(found).encode()[:60_000])
        os._exit(0)
    os.close(write)
    with open(read) as stream:
        print(stream.read(), flush=True)
    os.wait()
"""


def run(code: str, text: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], input=text, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> Callable[[str, str], str]:
    """said(name of a run, script) → what the script printed there; all run in one go, and once."""

    def make() -> list[list]:
        return [json.loads(line) for line in run(FORKS, json.dumps(list(RUNS.values()))).splitlines()]

    results = dict(zip(RUNS, once(tmp_path_factory, "registration-order", make), strict=True))

    def said(name: str, script: str) -> str:
        found, error = results[name][RUNS[name][1].index(script)]
        assert not error, error
        return found

    return said


@pytest.mark.parametrize("name", [name for name, (_, scripts) in RUNS.items() if CHECK in scripts])
def test_every_order_of_imports_registers_once(said, name):
    assert said(name, CHECK) == ""


def test_importing_hfq_imports_neither_torch_nor_transformers():
    run(
        "import sys, hfq; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), "
        "sorted(sys.modules)"
    )


def test_stock_loads_are_the_same_with_and_without_hfq(said):
    digests = [said(name, STOCK).split() for name in ("alone", "hfq first", "hfq after")]
    assert len(set(digests[0])) == len(NAMES)
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize("name", ["hfq first", "hfq after"])
def test_the_guard_stands_whichever_is_imported_first(said, name):
    assert said(name, GUARD).split() == ["CheckpointError", "SetupError"]


def test_both_sides_of_a_fork_after_the_import_load(said):
    assert said("forked", BOTH_SIDES) == ""
