"""`import hfq` registers with transformers whichever comes first, and changes nothing for those who pass no HfqConfig."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import tiny_models
from zero_launch import once

CHECK = """
{imports}
from transformers.quantizers import auto
from transformers import modeling_utils
from transformers.models.auto import auto_factory
assert "hfq" in auto.AUTO_QUANTIZER_MAPPING and "hfq" in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
assert hasattr(modeling_utils.get_hf_quantizer, "__wrapped__")
assert hasattr(modeling_utils.PreTrainedModel.from_pretrained.__func__, "__wrapped__")
assert hasattr(auto_factory._BaseAutoModelClass.from_pretrained.__func__, "__wrapped__")
assert not hasattr(modeling_utils.get_hf_quantizer.__wrapped__, "__wrapped__")
"""
IMPORTS = [
    "import hfq",
    "from hfq import HfqConfig",
    "from transformers import AutoModelForCausalLM\nimport hfq",
    "import hfq\nfrom transformers import LlamaForCausalLM",
    "from hfq.integrations.loading import Loading",
]
STOCK = """
import hashlib
{imports}
for path in {paths}:
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad(): logits = model(torch.arange(24)[None]).logits.float()
    state = {{name: (str(t.dtype), tuple(t.shape)) for name, t in model.state_dict().items()}}
    print(hashlib.sha256(logits.numpy().tobytes() + repr(sorted(state.items())).encode()).hexdigest())
"""
TRANSFORMERS = "from transformers import AutoModelForCausalLM\n"
STOCK_IMPORTS = {"alone": TRANSFORMERS, "hfq": "import hfq\n" + TRANSFORMERS, "hfq after": TRANSFORMERS + "import hfq\n"}
NAMES = ["tiny-llama", "tiny-llama-fp8"]
GUARD = """
{imports}
for path, options in (("/nope/x", {{}}), ("/nope", {{"gguf_file": "x.gguf"}})):
    try:
        AutoModelForCausalLM.from_pretrained(path, quantization_config=hfq.HfqConfig(), **options)
    except hfq.HfqError as error:
        print(type(error).__name__)
"""
# torch knows neither transformers nor hfq: it is imported once, and each script runs in a fork that knows nothing else
FORKS = """
import contextlib, io, json, os, sys, traceback
import torch
torch.set_num_threads(1)
assert not {"transformers", "hfq", "accelerate"} & set(sys.modules)
for script in json.load(sys.stdin):
    read, write = os.pipe()
    if os.fork() == 0:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                exec(script, {"torch": torch})
            result = [said.getvalue(), ""]
        except BaseException:
            result = ["", traceback.format_exc()]
        os.write(write, json.dumps(result).encode()[:60_000])
        os._exit(0)
    os.close(write)
    with open(read) as stream:
        print(stream.read(), flush=True)
    os.wait()
"""


def run(code: str, text: str = "") -> str:
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> Callable[[str], str]:
    """said(script) → what it printed in a process that had imported torch and nothing else; all run in one go, and once."""
    paths = [str(tiny_models.DATA / name) for name in NAMES]
    scripts = [CHECK.format(imports=imports) for imports in IMPORTS]
    scripts += [STOCK.format(imports=imports, paths=paths) for imports in STOCK_IMPORTS.values()]
    scripts += [GUARD.format(imports=STOCK_IMPORTS[first]) for first in ("hfq", "hfq after")]

    def make() -> list[dict]:
        return [dict(zip(scripts, map(json.loads, run(FORKS, json.dumps(scripts)).splitlines()), strict=True))]

    results = once(tmp_path_factory, "registration-order", make)[0]

    def said(script: str) -> str:
        found, error = results[script]
        assert not error, error
        return found

    return said


@pytest.mark.parametrize("imports", IMPORTS)
def test_every_order_of_imports_registers_once(said, imports):
    assert said(CHECK.format(imports=imports)) == ""


def test_importing_hfq_imports_neither_torch_nor_transformers():
    run("import sys, hfq; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)")


def test_stock_loads_are_the_same_with_and_without_hfq(said):
    paths = [str(tiny_models.DATA / name) for name in NAMES]
    digests = [said(STOCK.format(imports=imports, paths=paths)).split() for imports in STOCK_IMPORTS.values()]
    assert len(set(digests[0])) == len(NAMES)
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize("first", ["hfq", "hfq after"])
def test_the_guard_stands_whichever_is_imported_first(said, first):
    assert said(GUARD.format(imports=STOCK_IMPORTS[first])).split() == ["CheckpointError", "SetupError"]
