"""Tests of plans for models on the Hub, from headers alone."""

import functools
import json
import os
import shutil
import struct
import tempfile

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hfq
from hfq import HfqConfig
from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.gguf.header import read_gguf_header
from hfq.checkpoint.header import HeaderLimits
from hfq.checkpoint.headers_only import MARKER, HeadersOnlyCheckpoint
from hfq.cli.main import app
from hfq.errors import CheckpointError
from hfq.integrations.hub.download import has_legacy_model, small_file
from hfq.integrations.hub.find import find_checkpoint, headers_cache, is_hub_id
from hfq.tensor_spec import ByteRange
from tests.support import tiny_models
from tests.support.checkpoint_files import stored_bytes
from tests.support.fake_hub import FakeHub, running
from tests.support.gguf_models import make_model, write_model, write_random_llama
from tests.support.models import logits

TINY = {f"tests/{folder.name}": folder for folder in sorted(tiny_models.DATA.glob("tiny-llama*"))}
SHARED = {
    f"shared/{folder.name}": folder
    for folder in sorted(tiny_models.SHARED.glob("*"))
    if (folder / "config.json").exists()
}
GPTQ = "tests/tiny-llama-gptq"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with running(FakeHub(TINY | SHARED), monkeypatch) as started:
        yield started
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith("hfq-")]
    assert left == [], "folders of headers stay behind"
    assert not [path.name for path in headers_cache().glob(".*")]


def run(verb, path, *options):
    done = CliRunner().invoke(app, [verb, str(path), *options, "--json"], env={"COLUMNS": "120"})
    assert done.exit_code == 0, (path, done.output, done.exception)
    return json.loads(done.stdout), done.stderr


def refused(path, revision=None):
    with pytest.raises(CheckpointError) as caught, find_checkpoint(path, revision):
        pass
    assert not list(headers_cache().glob("*"))
    return caught.value


def check_same(hub, name, folder, verb="plan", *options):
    """Compares the report for a Hub id with that for its folder, and returns its text."""
    before = hub.sent
    local, _ = run(verb, folder, *options)
    named, told = run(verb, name, *options)
    if verb == "plan" and "model" in named and "path" in named["model"]:
        assert named["model"].pop("commit") == hub.commit("/".join(name.split("/")[:2]))
        assert named["model"].pop("fetched_nbytes") == hub.sent - before
        assert named["model"].pop("path") == name
        assert local["model"].pop("path") == str(folder)
        for report, path in ((named, name), (local, str(folder))):
            if "load.py" in report["files"]:
                report["files"]["load.py"] = report["files"]["load.py"].replace(json.dumps(path), "PATH")
    elif verb == "inspect":
        assert (named.pop("path"), local.pop("path")) == (name, str(folder))
    assert named == local
    return told


@pytest.mark.parametrize("models", [TINY, SHARED], ids=["tests", "shared"])
def test_plans_by_name_are_those_of_the_folders(hub, models):
    if not models:
        pytest.skip("no shared checkpoints here")
    options = "--cpu", "2MB", "--max-model-len", "16"
    for name, folder in models.items():
        told = check_same(hub, name, folder, "plan", *options)
        heads = {path: nbytes for path, asked, nbytes in hub.answers if path.startswith(f"{name}/") and asked}
        headers = Checkpoint.open(folder).headers
        weights = sum(header.nbytes for header in headers.values())
        assert len(heads) == len(headers)
        assert sum(n for path, asked, n in hub.answers if path.startswith(f"{name}/") and asked) == sum(
            header.data_start for header in headers.values()
        )
        assert f"the files have {weights:,} B" in told


def test_other_kinds_of_plans_take_names_too(hub):
    folder = TINY[GPTQ]
    assert "B fetched" in check_same(hub, GPTQ, folder, "inspect")
    sent = hub.sent
    assert "from hfq's cache" in check_same(
        hub, GPTQ, folder, "plan", "--zero-stage", "3", "--num-processes", "2", "--optimizer", "none"
    )
    check_same(hub, GPTQ, folder, "plan", "--zero-stage", "3", "--num-processes", "2", "--cpu", "1GB")
    assert hub.sent == sent  # the headers of a commit are fetched once
    planned, told = run("plan", GPTQ, "--revision", "v1", "--cpu", "1GB")
    assert f'from_pretrained("{GPTQ}", revision="v1", ' in planned["files"]["load.py"]
    assert planned["model"]["path"] == GPTQ
    assert hub.commit(GPTQ)[:8] in told


def test_verbs_that_need_weights_download_them(hub, tmp_path):
    folder = shutil.copytree(TINY[GPTQ], tmp_path / "source")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    hub.models[GPTQ] = folder
    for revision in ([], ["--revision", "v1"]):
        out = tmp_path / f"out{len(revision)}"
        run("reshard", GPTQ, str(out), *revision)
        assert tiny_models.digests(out) == tiny_models.digests(folder)
    assert not [path for path, _, _ in hub.answers if path.endswith(".bin")]
    sent = hub.sent
    found, _ = run("compare", GPTQ, GPTQ, "--revision-b", "v1")
    assert (found["first"], found["second"]) == (GPTQ, GPTQ)
    assert hub.sent == sent  # the Hub's cache has it
    done = CliRunner().invoke(app, ["compare", GPTQ, "nobody/no-model"])
    assert done.exit_code == 2
    assert "neither a folder nor an accessible model on the Hub" in done.stderr


def test_one_small_file_is_downloaded_alone(hub, monkeypatch):
    download = functools.partial(huggingface_hub.hf_hub_download, revision=hub.commit(GPTQ))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    file = small_file(GPTQ, "tokenizer_config.json")
    assert file.read_bytes() == (TINY[GPTQ] / "tokenizer_config.json").read_bytes()
    assert [path for path, _, _ in hub.answers] == [f"{GPTQ}/tokenizer_config.json"]
    assert small_file(GPTQ, "chat_template.jinja") is None
    assert small_file(f"{GPTQ}/model.gguf", "tokenizer_config.json") is None
    with pytest.raises(CheckpointError, match="neither a folder nor an accessible model"):
        small_file("nobody/no-model", "tokenizer_config.json")


def test_a_model_without_an_organization_is_looked_up_on_the_hub(hub, tmp_path, monkeypatch):
    hub.models["gpt2"] = TINY[GPTQ]
    download = functools.partial(huggingface_hub.hf_hub_download, revision=hub.commit("gpt2"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert has_legacy_model("gpt2")
    assert small_file("gpt2", "tokenizer_config.json").parent.parent.parent.name == "models--gpt2"
    assert small_file("gpt2", "chat_template.jinja") is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("gpt3", "folder", "gpt2.gguf", "no name", GPTQ):
        assert not has_legacy_model(name)


def test_an_unreachable_hub_is_not_a_missing_file(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE prevents a download"):
        small_file(GPTQ, "tokenizer_config.json")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def unreachable(*_):  # the error of hf_hub_download after its retries, which take long
        raise LocalEntryNotFoundError("Please check your connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(CheckpointError, match="hfq cannot fetch the model from the Hub"):
        small_file(GPTQ, "tokenizer_config.json")


def test_a_damaged_archive_is_fetched_again_and_a_commit_needs_no_hub(hub):
    with find_checkpoint(GPTQ) as found:
        assert found.fetched_nbytes == hub.sent > 0
    [archive] = headers_cache().iterdir()
    archive.write_bytes(archive.read_bytes()[:-40])
    with find_checkpoint(GPTQ) as found:
        assert found.fetched_nbytes > 0
    hub.models.clear()
    with find_checkpoint(GPTQ, hub.commit(GPTQ)) as found:
        assert found.fetched_nbytes == 0
        assert Checkpoint.open(found.folder).tensors


def test_the_cache_of_the_hub_comes_first_if_it_is_whole(hub, tmp_path):
    repo = tmp_path / "hub" / "models--tests--tiny-llama-gptq"
    snapshot = repo / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("1" * 40)
    shutil.copy(TINY[GPTQ] / "config.json", snapshot)
    with find_checkpoint(GPTQ) as found:  # only the config was downloaded
        assert found.commit == hub.commit(GPTQ)
    shutil.copy(TINY[GPTQ] / "model.safetensors", snapshot)
    with find_checkpoint(GPTQ) as found:
        assert (found.folder, found.commit) == (str(snapshot), None)


def test_what_has_no_weights_is_never_loaded(hub, tmp_path):
    with find_checkpoint(GPTQ) as found:
        checkpoint = Checkpoint.open(found.folder)
        for load in (
            lambda: AutoModelForCausalLM.from_pretrained(
                found.folder, quantization_config=HfqConfig(), device_map={"": "cpu"}
            ),
            lambda: AutoModelForCausalLM.from_pretrained(
                found.folder, quantization_config=HfqConfig(), device_map="auto"
            ),
            lambda: hfq.pretrained_config(found.folder),
            lambda: Reader(checkpoint).read_into(
                next(iter(checkpoint.tensors.values())).range, memoryview(bytearray(1 << 20))
            ),
            lambda: Reader(checkpoint).map(next(iter(checkpoint.headers))),
            lambda: Reader(checkpoint).read_into(
                ByteRange(next(iter(checkpoint.headers)), 0, 0), memoryview(bytearray())
            ),
        ):
            with pytest.raises(CheckpointError, match="headers without weights") as caught:
                load()
            assert MARKER in str(caught.value)
        sizes = [os.stat(file) for file in checkpoint.headers]
        assert all(status.st_blocks * 512 < status.st_size / 2 for status in sizes)
    assert not os.path.exists(found.folder)


def test_shards_that_lie_in_folders_of_their_own(hub, tmp_path):
    source = SHARED.get("shared/ct-fp8-sharded") or pytest.skip("no shared checkpoints here")
    folder = shutil.copytree(source, tmp_path / "sharded")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / "parts").mkdir()
    for name in set(index["weight_map"].values()):
        (folder / name).rename(folder / "parts" / name)
    index["weight_map"] = {tensor: f"parts/{name}" for tensor, name in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.models["tests/parts"] = folder
    check_same(hub, "tests/parts", folder, "inspect")
    index["weight_map"]["more"] = "parts/absent.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.rmtree(headers_cache())
    assert "does not have all files of the checkpoint" in refused("tests/parts").message
    index["weight_map"]["more"] = "../outside.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside" in refused("tests/parts").message


@pytest.mark.parametrize(
    ("faults", "what"),
    [
        ({"no ranges"}, "does not support range requests"),
        ({"cut"}, "too short"),
        ({"other tag"}, "changed while hfq read it"),
        ({"other size"}, "changed while hfq read it"),
        ({"other commit"}, "changed while hfq read it"),
        ({"no commit"}, "sent no commit"),
        ({"busy"}, "cannot fetch the model"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_answers_that_are_not_what_was_asked_for(hub, faults, what):
    hub.faults |= faults
    error = refused(GPTQ)
    assert what in error.message
    assert error.fix
    assert (
        hub.sent < Checkpoint.open(TINY[GPTQ]).nbytes + 50_000
    )  # at most one file was started, and none twice


def test_who_may_not_see_a_model_is_told_so(hub, monkeypatch):
    hub.token = "right"
    error = refused(GPTQ)
    assert "denies access" in error.message
    assert "HF_TOKEN" in error.fix
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "denies access" in refused(GPTQ).message
    monkeypatch.setenv("HF_TOKEN", "right")
    with find_checkpoint(GPTQ) as found:
        assert found.commit == hub.commit(GPTQ)


def test_what_the_hub_does_not_have(hub, monkeypatch):
    assert "neither a folder nor an accessible model on the Hub" in refused("nobody/no-model").message
    assert "no such revision" in refused(GPTQ, "nowhere").message
    assert (
        "neither a folder nor an accessible model on the Hub" in refused("nobody/a..b").message
    )  # not a valid Hub id
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    error = refused("nobody/no-model")
    assert "HF_HUB_OFFLINE" in error.message
    assert "hf download nobody/no-model" in error.fix
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    error = refused("nobody/no-model")
    assert "cannot fetch the model" in error.message
    assert "HF_ENDPOINT" in error.fix


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (struct.pack("<Q", HeaderLimits().header_nbytes + 1), "header length is out of bounds"),
        (struct.pack("<Q", 1 << 18), "ends inside its header"),
        (b"PK\x03\x04\x14\x00\x00\x00", "pickle or a zip"),
        (b"\x01", "too short"),
    ],
)
def test_headers_are_validated_as_those_of_files(hub, tmp_path, start, what):
    folder = shutil.copytree(TINY[GPTQ], tmp_path / "bad")
    (folder / "model.safetensors").write_bytes(start + b" " * (1000 if len(start) == 8 else 0))
    hub.models["tests/bad"] = folder
    error = refused("tests/bad")
    assert what in error.message
    assert error.file == "tests/bad/model.safetensors"
    assert sum(nbytes for _, asked, nbytes in hub.answers if asked) <= 8


def test_a_model_without_safetensors_is_refused_by_what_it_has(hub, tmp_path):
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"")
    hub.models["tests/pickled"] = folder
    error = refused("tests/pickled")
    assert "pytorch_model.bin" in error.found
    assert not hub.answers


def test_local_paths_and_names():
    assert is_hub_id("a/b")
    for path in ("a/b@main", "./a", "/a/b", "~/a", "a", "a/b/c", "a/", "../a", str(tiny_models.DATA)):
        assert not is_hub_id(path)


def test_an_archive_gives_back_what_was_packed():
    headers_only = HeadersOnlyCheckpoint({"config.json": b"{}"}, {"sub/a.safetensors": (b"head", 99)})
    assert HeadersOnlyCheckpoint.unpack(headers_only.pack()) == headers_only
    assert headers_only.nbytes == 99
    with pytest.raises(ValueError, match="no archive"):
        HeadersOnlyCheckpoint.unpack(b"PK")


@pytest.fixture
def gguf_models(hub, tmp_path):
    """Adds models with one GGUF file, with two, with a split, and without config.json to the Hub."""
    one, several = tmp_path / "one", tmp_path / "several"
    write_random_llama(one, "Q4_K")
    shutil.copytree(one, several)
    shutil.copy(several / "model.gguf", several / "other.gguf")
    shutil.copytree(one, tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    (tmp_path / "bare" / "folder").mkdir()
    (tmp_path / "bare" / "model.gguf").rename(tmp_path / "bare" / "folder" / "model.gguf")
    hub.models |= {"gguf/one": one, "gguf/several": several, "gguf/bare": tmp_path / "bare"}
    return hub


@pytest.mark.parametrize("verb", ["plan", "inspect"])
def test_a_gguf_file_is_planned_from_its_header(gguf_models, verb):
    options = ("--cpu", "8GiB") if verb == "plan" else ()
    folder = gguf_models.models["gguf/one"]
    check_same(gguf_models, "gguf/one", folder, verb, *options)
    check_same(gguf_models, "gguf/several/model.gguf", folder / "model.gguf", verb, *options)
    assert gguf_models.sent < (folder / "model.gguf").stat().st_size
    with find_checkpoint("gguf/bare/folder/model.gguf") as found:
        opened = Checkpoint.open(found.folder)
        assert (opened.config, len(opened.tensors)) == ({}, 21)


@pytest.mark.parametrize(
    ("name", "has_factors"), [("gguf/one", False), ("gguf/one", True), ("gguf/one/folder/model.gguf", True)]
)
def test_a_template_is_downloaded_only_if_tensors_are_copied_from_it(hub, tmp_path, name, has_factors):
    model, extra = make_model("llama"), {}
    if has_factors:
        rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
        model = make_model("llama", rope_parameters=rope)
        extra["rope_freqs.weight"] = ("F32", (16,), torch.full((16,), 2.0).numpy().tobytes())
    source = write_model(tmp_path / "one" / "folder", "llama", model, extra=extra)
    hub.models["gguf/one"] = source if name == "gguf/one" else source.parent
    run("convert", source, str(tmp_path / "packed"), "--to", "pack-quantized")
    run("convert", tmp_path / "packed", str(tmp_path / "back"), "--to", "gguf", "--template", name)
    headers = [read_gguf_header(folder / "model.gguf") for folder in (source, tmp_path / "back")]
    found, expected = ({name: stored_bytes(info) for name, info in each.tensors.items()} for each in headers)
    assert found == expected
    assert ("rope_freqs.weight" in found) is has_factors
    assert (hub.sent < (source / "model.gguf").stat().st_size) is not has_factors


def test_one_of_several_gguf_files_must_be_named(gguf_models):
    error = refused("gguf/several")
    assert "There are several GGUF models" in error.message
    assert "gguf/several/model.gguf on the command line" in error.fix
    assert "x.gguf" in refused("gguf/one/x.gguf").problems


def test_a_gguf_file_of_the_hub_is_loaded_with_its_config(gguf_models):
    folder, tokens = gguf_models.models["gguf/one"], torch.tensor([[1, 5, 9]])
    config = HfqConfig()
    expected = logits(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config), tokens)
    commit = gguf_models.commit("gguf/several")
    for name, options in (("gguf/several", {"gguf_file": "model.gguf"}), ("gguf/several/model.gguf", {})):
        model = AutoModelForCausalLM.from_pretrained(
            name, quantization_config=config, revision=commit, **options
        )
        assert torch.equal(logits(model, tokens), expected)
        assert model.name_or_path == "gguf/several"
    with pytest.raises(CheckpointError, match="hfq cannot fetch the model from the Hub"):
        AutoModelForCausalLM.from_pretrained("gguf/several", gguf_file="x.gguf", quantization_config=config)
