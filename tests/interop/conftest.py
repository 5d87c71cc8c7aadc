"""A process in which other projects' readers load checkpoints without hfq."""

import os
import subprocess
import sys

import pytest

STOCK = """
import hashlib, sys
import torch
if "hfq" in sys.argv[1]: import hfq
from transformers import AutoModelForCausalLM
for path in map(str.strip, sys.stdin):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, device_map="cpu")
    assert not [m for m in model.modules() if type(m).__module__.startswith("hfq")]
    with torch.no_grad(): logits = model(torch.arange(1, 25)[None]).logits
    print("digest", hashlib.sha256(logits.numpy().tobytes()).hexdigest(), flush=True)
"""


@pytest.fixture(scope="module")
def stock_digest(tmp_path_factory):
    """stock_digest(path, flag="") → the digest of the logits of a stock load, in one process without hfq, or
    in one with it.
    """
    environment, readers = {**os.environ, "GPTQMODEL_CPU_WORKERS": "2"}, {}
    errors = tmp_path_factory.mktemp("stock") / "stderr"

    def stock_digest(path, flag="") -> str:
        if flag not in readers:
            command = [sys.executable, "-c", STOCK, flag]
            with open(errors, "a") as stream:
                readers[flag] = subprocess.Popen(
                    command, stdin=-1, stdout=-1, stderr=stream, text=True, env=environment
                )
        print(path, file=readers[flag].stdin, flush=True)
        for line in readers[flag].stdout:
            if line.startswith("digest"):
                return line
        readers.pop(flag).wait(60)  # it ended; the next test starts another
        raise AssertionError(errors.read_text()[-3000:])

    yield stock_digest
    for reader in readers.values():
        reader.communicate(timeout=60)
