"""`optimum-cli hfq VERB`: hfq's own verbs, options and errors, and one parser for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

from hfq.checkpoint import Checkpoint
from hfq.formats.source import source_config

pytest.importorskip("optimum.commands.base")
ROOT = Path(__file__).parents[2]
SEVERAL = """
import contextlib, io, json, sys
from optimum.commands.optimum_cli import main
results = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, out, code = ["optimum-cli", *arguments], io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try: main()
        except SystemExit as end: code = end.code
    results.append([code, out.getvalue()])
print(json.dumps(results))
"""


def test_optimum_cli_runs_the_verbs_of_hfq(tmp_path):
    source, quantized = tiny_models.DATA / "tiny-llama", tiny_models.DATA / "tiny-llama-gptq"
    commands = [
        ["hfq", "--help"],
        ["hfq", "quantize", "--help"],
        ["hfq", "quantize", source, tmp_path / "out", "--method", "rtn", "--bits", "3", "--group-size", "32"],
        ["hfq", "quantize", quantized, tmp_path / "no", "--method", "rtn"],
        ["hfq", "quantise"],
    ]
    paths = [str(ROOT), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", SEVERAL, json.dumps(commands, default=str)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    overview, options, written, refused, unknown = json.loads(done.stdout.splitlines()[-1])
    assert overview[0] == options[0] == written[0] == 0
    assert "quantize, convert, eval, verify, plan" in " ".join(overview[1].split())
    assert "optimum-cli hfq quantize" in options[1]
    assert "--group-size" in options[1]
    assert f"{tmp_path / 'out'}: 28 layers as gptq v1 int3 g32 sym" in written[1]
    assert source_config(Checkpoint.open(tmp_path / "out"))["bits"] == 3
    assert refused[0] == 1
    assert "quantized already" in refused[1]
    assert (unknown[0], "quantise" in unknown[1]) == (2, True)
