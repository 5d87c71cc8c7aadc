"""`hfq reshard`: what it prints, in text and JSON, and its errors."""

import json
from pathlib import Path

from typer.testing import CliRunner

from hfq.cli.main import app
from hfq.tables import as_size
from tests.support import tiny_models

GPTQ = tiny_models.DATA / "tiny-llama-gptq"


def run(*arguments):
    return CliRunner().invoke(app, ["reshard", *map(str, arguments)])


def test_it_copies_and_says_what_it_wrote(tmp_path):
    done = run(GPTQ, tmp_path / "copy")
    assert done.exit_code == 0, done.output
    assert tiny_models.digests(tmp_path / "copy") == tiny_models.digests(GPTQ)
    files = list((tmp_path / "copy").iterdir())
    nbytes = sum(file.stat().st_size for file in files)
    assert done.stdout == f"{tmp_path / 'copy'}: 4 decoder layers in {len(files)} files, {as_size(nbytes)}\n"
    assert done.stderr == ""  # no bar where nobody watches


def test_json_says_the_same_and_what_was_left_out(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in GPTQ.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "training_args.bin").write_bytes(b"x")
    report = json.loads(run(source, tmp_path / "copy", "--json").stdout)
    files = list((tmp_path / "copy").iterdir())
    assert report == {
        "path": str(tmp_path / "copy"),
        "url": None,
        "files": len(files),
        "nbytes": sum(file.stat().st_size for file in files),
        "decoder_layers": 4,
        "left_out": ["training_args.bin"],
    }
    assert "not copied: 'training_args.bin'\n" in run(source, tmp_path / "again").stdout


def test_a_taken_folder_is_an_error(tmp_path):
    (tmp_path / "mine").write_text("x")
    done = run(GPTQ, tmp_path)
    assert done.exit_code == 1
    assert "cannot be used" in str(done.exception)
    assert [Path(file).name for file in tmp_path.iterdir()] == ["mine"]
