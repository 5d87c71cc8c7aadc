"""`optimum-cli hfq VERB`: hfq's own verbs, options and errors, and one parser for them."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import pytest

from hfq.checkpoint import Checkpoint
from hfq.formats.configs.source_config import source_config
from tests.support import tiny_models

optimum_cli = pytest.importorskip("optimum.commands.optimum_cli")
ROOT = Path(__file__).parents[2]
REGISTER = "optimum.commands.register"
QUANTIZE = ["quantize", "--method", "rtn", "--bits", "3", "--group-size", "32"]


@pytest.fixture
def run(monkeypatch, capsys):
    """run(arguments) → (the exit status, what was printed) of `optimum-cli hfq arguments`."""
    spec = ModuleSpec(REGISTER, None, is_package=True)  # in place of an installed optimum-hfq
    spec.submodule_search_locations = [str(ROOT / "optimum-hfq" / REGISTER.replace(".", "/"))]
    monkeypatch.setitem(sys.modules, REGISTER, module_from_spec(spec))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["optimum-cli", "hfq", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            optimum_cli.main()
        return end.value.code or 0, "".join(capsys.readouterr())

    return run


def test_it_tells_its_verbs_and_their_options(run):
    status, told = run("--help")
    assert (status, "quantize, convert, evaluate, compare, plan" in " ".join(told.split())) == (0, True)
    status, told = run("quantize", "--help")
    assert (status, "Usage: optimum-cli hfq quantize" in told, "--group-size" in told) == (0, True, True)


def test_it_runs_a_verb(run, tmp_path):
    status, told = run(*QUANTIZE, tiny_models.DATA / "tiny-llama", tmp_path / "out")
    assert status == 0
    assert f"{tmp_path / 'out'}: 28 layers as gptq v1 int3 g32 sym" in told
    assert source_config(Checkpoint.open(tmp_path / "out"))["bits"] == 3


def test_errors_are_hfq_s(run, tmp_path):
    status, told = run(*QUANTIZE, tiny_models.DATA / "tiny-llama-gptq", tmp_path / "out")
    assert (status, told.startswith("FormatError: The source is already quantized")) == (1, True)
    status, told = run("quantise")
    assert (status, "quantise" in told) == (2, True)
