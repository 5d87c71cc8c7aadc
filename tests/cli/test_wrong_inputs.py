"""A transcript of wrong command lines and files, with every message in full.

`wrong_inputs.txt` is written as a terminal shows it: the command, standard error, and the exit status.
"""

import re
import shlex
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from hfq.cli import main
from tests.support import tiny_models

TRANSCRIPT = Path(__file__).with_name("wrong_inputs.txt")
CASES = re.findall(
    r"^\$ hfq (.*)\n((?:.*\n)*?)\[exit (\d+)\]$", TRANSCRIPT.read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a float checkpoint `llama`, a quantized one `gptq`, and damaged ones."""
    root = tmp_path_factory.mktemp("inputs")
    (root / "llama").symlink_to(tiny_models.DATA / "tiny-llama")
    (root / "gptq").symlink_to(tiny_models.DATA / "tiny-llama-gptq")
    weights = "model.safetensors"
    damage = {
        "cut-config": lambda new: (new / "config.json").write_text('{"model_type": '),
        "list-config": lambda new: (new / "config.json").write_text("[1]"),
        "empty-config": lambda new: (new / "config.json").write_text("{}"),
        "odd-config": lambda new: (new / "config.json").write_text('{"architectures": 3}'),
        "no-config": lambda new: (new / "config.json").unlink(),
        "no-weights": lambda new: (new / weights).unlink(),
        "no-tokenizer": lambda new: [file.unlink() for file in new.glob("token*")],
        "pickle": lambda new: (new / weights).rename(new / "pytorch_model.bin"),
        "cut-weights": lambda new: (new / weights).write_bytes((new / weights).read_bytes()[:400_000]),
        "empty-weights": lambda new: (new / weights).write_bytes(b""),
        "pointer": lambda new: (new / weights).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "page": lambda new: (new / weights).write_text("<!DOCTYPE html><title>404</title>"),
    }
    for name, spoil in damage.items():
        shutil.copytree(tiny_models.DATA / "tiny-llama-gptq", root / name)
        spoil(root / name)
    (root / "empty").mkdir()
    (root / "used").mkdir()
    files = {"used/file": b"x", "short.txt": b"a", "blank.txt": b" \n", "bytes.txt": b"\xff\xfe\x00"}
    files |= {"cut.json": b"{", "list.json": b"[1, 2]", "cut.gguf": b"GGUF", "other.gguf": b"nope" * 8}
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


def test_the_transcript_has_forty_inputs_and_nothing_else():
    assert len(CASES) >= 40
    lines = [line for command, err, status in CASES for line in (command, *err.splitlines(), status)]
    assert len(lines) == len(TRANSCRIPT.read_text(encoding="utf-8").replace("\n\n", "\n").splitlines())


@pytest.mark.parametrize(("command", "err", "status"), CASES, ids=[command for command, _, _ in CASES])
def test_a_wrong_input_ends_with_this_message(command, err, status, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command), program="hfq")
    found = capsys.readouterr()
    assert found.err.rstrip("\n") == err.rstrip("\n")
    assert (ended.value.code, found.out) == (int(status), "")
    assert sorted(folder.rglob("*")) == before
