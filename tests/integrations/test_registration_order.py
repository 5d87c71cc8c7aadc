"""`import hfq` registers with transformers whichever comes first, and changes nothing for those who pass no HfqConfig."""

import subprocess
import sys

import pytest
import tiny_models

CHECK = """
import sys
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

STOCK = """
import hashlib, sys, warnings
import torch
if sys.argv[2] == "hfq": import hfq
from transformers import AutoModelForCausalLM
if sys.argv[2] == "hfq after": import hfq
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad(): logits = model(torch.arange(24)[None]).logits.float()
state = {name: (str(t.dtype), tuple(t.shape)) for name, t in model.state_dict().items()}
print(hashlib.sha256(logits.numpy().tobytes() + repr(sorted(state.items())).encode()).hexdigest())
"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize(
    "imports",
    [
        "import hfq",
        "from hfq import HfqConfig",
        "from transformers import AutoModelForCausalLM\nimport hfq",
        "import hfq\nfrom transformers import LlamaForCausalLM",
        "from hfq.integrations.loading import Loading",
    ],
)
def test_every_order_of_imports_registers_once(imports):
    run(CHECK.format(imports=imports))


def test_importing_hfq_imports_neither_torch_nor_transformers():
    run("import sys, hfq; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama-fp8"])
def test_stock_loads_are_the_same_with_and_without_hfq(name):
    path = str(tiny_models.DATA / name)
    assert run(STOCK, path, "alone") == run(STOCK, path, "hfq") == run(STOCK, path, "hfq after")
