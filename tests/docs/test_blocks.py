"""Every block of code in the documentation is run: Python as it stands, commands of hfq through its command
line.

A page's blocks run one after the other in a folder that holds what the pages name: checkpoints, a text, a
config; `path` is a small GPTQ checkpoint. What cannot run here has a comment before it,
`<!-- not run: WHY; WHAT RUNS IT -->`, and stands in NOT_RUN.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from hfq.cli.main import app
from tests.support import tiny_models
from tests.support.gguf_models import write_random_llama

ROOT = Path(__file__).parents[2]
DOCS = ("tutorials", "how_to", "reference", "explanation", "contributing", "benchmarks")
FOLDERS = (".", *(f"docs/{name}" for name in DOCS), "configs/deepspeed", "configs/accelerate", "examples")
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).glob("*.md")
)

NOT_RUN = {
    "README.md": ["make demo", "pip install"],
    "configs/deepspeed/README.md": ["accelerate launch"],
    "docs/how_to/use_ibm_fms.md": ["import torch"],
    "docs/how_to/generate_with_fewer_passes.md": ["tokens ="],
    "docs/how_to/plan_memory.md": ["hfq plan"],
    "docs/how_to/quantize_and_publish.md": ["make tables"],
    "docs/how_to/run_other_programs.md": ["hfq launch", "HF_HUB_OFFLINE=1 hfq", "hfq serve"],
    "docs/tutorials/moe_on_16gb.md": ["hfq profile-machine"],
    "docs/tutorials/quickstart.md": ["make demo"],
    "docs/how_to/use_tensor_parallelism.md": ["from hfq", "torchrun --nproc_per_node"],
    "docs/how_to/use_zero3.md": ["import deepspeed", "accelerate launch"],
}
"""The first two words of each block that cannot run here, by page."""

SLOW = (
    "docs/how_to/evaluate_and_compare.md",
    "docs/how_to/quantize_and_publish.md",
    "docs/how_to/record_a_timeline.md",
    "docs/how_to/train_adapters.md",
    "docs/tutorials/lora_on_gptq.md",
)
NEEDS = {
    "docs/how_to/quantize_and_publish.md": "optimum",
    "docs/how_to/record_a_timeline.md": "matplotlib",
    "docs/how_to/train_adapters.md": "peft",
    "docs/tutorials/lora_on_gptq.md": "peft",
}
"""What a page says that has to be installed."""

STAND_INS = {
    "A": "tiny-llama-gptq",
    "B": "tiny-llama-gptq",
    "tiny-llama-gptq": "tiny-llama-gptq",
    "tiny-llama-fp8": "tiny-llama-fp8",
    "tiny-llama": "tiny-llama",
    "path/to/floats": "tiny-llama",
    "path/to/small": "tiny-llama-gptq",
    "path/to/checkpoint": "tiny-llama-gptq",
}
"""The names of checkpoints on the pages, and which of tests/data they are; MODEL depends on the page."""


HUB = "Qwen/Qwen3-30B-A3B-GPTQ-Int4"
"""The Hub id that pages show; the checkpoint in `path` is loaded in its place."""
FLOATS = ("README.md", "docs/how_to/quantize_and_publish.md")
"""Pages whose MODEL is unquantized."""


class PageBlock(NamedTuple):
    reason: str
    language: str
    text: str


def blocks_of(page: str) -> list[PageBlock]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        PageBlock(*found)
        for found in re.findall(
            r"^(?:<!-- not run: (.*?) -->\n\n)?```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
        )
    ]


def is_code(block: PageBlock) -> bool:
    return block.language in ("python", "bash")


def run_command(line: str) -> None:
    """A command of hfq; `> FILE` takes what it prints."""
    words = shlex.split(line, comments=True)
    file = words[words.index(">") + 1] if ">" in words else None
    done = CliRunner().invoke(app, words[1 : words.index(">")] if file else words[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"
    if file:
        Path(file).write_text(done.stdout, encoding="utf-8")


def run(page: str, block: PageBlock, names: dict) -> None:
    if block.language == "python":
        exec(compile(block.text.replace(HUB, names["path"]), page, "exec"), names)
        return
    for line in block.text.replace("\\\n", " ").replace(HUB, names["path"]).splitlines():
        assert line.startswith("hfq "), f"{page}: {line}: mark the block as not run"
        run_command(line)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with everything that pages name."""
    for name, checkpoint in STAND_INS.items():
        shutil.copytree(tiny_models.DATA / checkpoint, tmp_path / name)
    for name, kind, file in (("Llama-GGUF", "Q4_K", "Llama-Q4_K_M"), ("Llama-Q8", "Q8_0", "Llama-Q8_0")):
        write_random_llama(tmp_path / name, kind)
        (tmp_path / name / "model.gguf").rename(tmp_path / name / f"{file}.gguf")
    text = (tiny_models.DATA / "tiny-llama" / "held_out.txt").read_text(encoding="utf-8")
    for name in ("text.txt", "held_out.txt"):
        (tmp_path / name).write_text(text[:6000], encoding="utf-8")
    shutil.copy(ROOT / "configs" / "deepspeed" / "inference_zero3.json", tmp_path / "zero3.json")
    shutil.copy(ROOT / "docs" / "pictures" / "run.json", tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else [])
        for page in PAGES
        if any(is_code(block) and not block.reason for block in blocks_of(page))
    ],
)
def test_every_block_of_a_page_runs(page, folder):
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    shutil.copytree(
        tiny_models.DATA / ("tiny-llama" if page in FLOATS else "tiny-llama-gptq"),
        folder / "MODEL",
    )
    names = {"path": str(tiny_models.DATA / "tiny-llama-gptq")}
    for block in blocks_of(page):
        if is_code(block) and not block.reason:
            run(page, block, names)


def test_what_is_not_run_is_known_and_says_why():
    marked = {page: [block for block in blocks_of(page) if block.reason] for page in PAGES}
    assert {
        page: [" ".join(block.text.split()[:2]) for block in blocks]
        for page, blocks in marked.items()
        if blocks
    } == NOT_RUN
    for block in (block for blocks in marked.values() for block in blocks):
        _, _, runs_it = block.reason.partition("; ")
        files = re.findall(r"[\w./]+/\w+(?:\.py)?", runs_it)
        assert files, f"{block.reason}: say what runs it"
        assert [file for file in files if not (ROOT / file).is_file()] == []


def test_no_block_is_passed_over():
    for page in PAGES:
        text, blocks = (ROOT / page).read_text(encoding="utf-8"), blocks_of(page)
        assert len(re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE)) == 2 * len(blocks), page
        assert len(re.findall(r"^ *<!-- not run", text, re.MULTILINE)) == sum(
            bool(block.reason) for block in blocks
        ), page
        for block in blocks:
            assert block.language in ("python", "bash", "toml", ""), page
            if not block.language:
                assert not re.search(
                    r"^(hfq|make|pip|python|accelerate|deepspeed|torchrun) ", block.text, re.MULTILINE
                ), page


def test_the_readme_sets_up_loads_installs_and_runs_three_commands():
    make, code, install, verbs = (block.text.splitlines() for block in blocks_of("README.md"))
    assert [line.split()[:2] for line in make] == [["make", "demo"], ["make", "test"]]
    assert len([line for line in code if line]) == 8
    assert install[0].startswith("pip install")
    assert [line.split()[1] for line in verbs] == ["plan", "quantize", "compare"]


def test_a_shown_command_prints_what_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = [block.text for page in PAGES for block in blocks_of(page) if block.text.startswith("$ hfq ")]
    assert shown
    for text in shown:
        command, _, expected = text.partition("\n")
        done = CliRunner().invoke(
            app, command.split()[2:], env={"COLUMNS": "100", "XDG_CACHE_HOME": str(tmp_path)}
        )
        assert done.exit_code == 0, done.exception
        assert done.stdout.startswith(expected)
