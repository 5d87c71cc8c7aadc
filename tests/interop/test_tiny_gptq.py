"""Tests of `examples/quantize_tiny_gptq.py` with gptqmodel on a short text."""

import json
import subprocess
from pathlib import Path

import pytest

from hfq.checkpoint import Checkpoint
from hfq.cli.inspect import inspect_checkpoint
from tests.support import programs, tiny_models

pytestmark = pytest.mark.peers

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_script_writes_a_checkpoint_that_hfq_reads(tmp_path):
    pytest.importorskip("gptqmodel")
    command = programs.command(
        "quantize_tiny_gptq_briefly", EXAMPLES, tiny_models.DATA / "tiny-llama", tmp_path / "made"
    )
    environment = programs.environment(GPTQMODEL_CPU_WORKERS="2")
    # gptqmodel writes logs into the current folder.
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert inspect_checkpoint(Checkpoint.open(tmp_path / "made"))["formats"] == {"gptq v1 int4 g128 sym": 28}
    stored, shipped = (
        tiny_models.stored_tensors(path) for path in (tmp_path / "made", tiny_models.DATA / "tiny-llama-gptq")
    )
    assert {name: (t.dtype, t.shape) for name, t in stored.items()} == {
        name: (t.dtype, t.shape) for name, t in shipped.items()
    }
    assert json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())
