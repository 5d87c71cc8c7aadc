"""docs/reference/errors.md has every error of the sources, and an error that is raised is found there by its
text.
"""

import functools
import re

import pytest
from generate import troubleshooting
from generate.errors import error_calls, error_classes, read_modules
from transformers import AutoModelForCausalLM

import hfq
from hfq import Recipe
from hfq.checkpoint import Checkpoint
from hfq.formats.detection.unsupported import REFUSED, refused
from tests.support import tiny_models


@pytest.fixture(scope="module")
def modules():
    return read_modules(troubleshooting.ROOT / "hfq")


@pytest.fixture(scope="module")
def entries():
    return troubleshooting.entries()


def pattern(template: str) -> re.Pattern:
    """What a template may be filled in to."""
    return re.compile(
        "".join(
            ".*" if index % 2 else re.escape(part)
            for index, part in enumerate(re.split(r"(\{[^}]*\})", template))
        ),
        re.DOTALL,
    )


def explained(error: hfq.HfqError, entries) -> list:
    """The entries that an error has on the page."""
    return [
        entry
        for entry in entries
        if entry.cls == type(error).__name__
        and any(pattern(what).fullmatch(error.message) for what in entry.message)
        and any(pattern(fix).fullmatch(error.fix) for fix in entry.fix)
    ]


def test_classes_are_those_of_the_package(modules):
    def below(cls) -> set[str]:
        return {cls.__name__}.union(*map(below, cls.__subclasses__()))

    from hfq import formats  # noqa: F401  (defines more of them)

    assert below(hfq.HfqError) <= set(error_classes(modules))
    assert all(summary for summary in error_classes(modules).values())


def test_every_place_that_makes_an_error_is_read(modules):
    made = sum(
        text.count(f"{name}(")
        for path in (troubleshooting.ROOT / "hfq").rglob("*.py")
        for text in [re.sub(r"^class .*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)]
        for name in error_classes(modules)
    )
    names = error_classes(modules)
    calls = {
        (module.name, node.lineno)
        for module in modules
        for name in names
        for node in module.calls.get(name, ())
    }
    assert 250 < len(calls) <= made
    assert (
        len(error_calls(modules)) >= len(calls) - 12
    )  # those that repeat another error's texts, and are on the page as that one


def test_every_entry_says_what_and_how_to_mend_it(entries):
    for entry in entries:
        assert entry.message, entry
        assert all(re.sub(r"\{[^}]*\}|\W", "", text) for text in entry.message), entry
        is_of_another_rank = entry.message[0].startswith("Another rank of this run failed")
        assert is_of_another_rank or (
            entry.fix and all(re.sub(r"\{[^}]*\}|\W", "", text) for text in entry.fix)
        ), entry


def test_the_page_shows_each_message_and_fix(entries):
    page = troubleshooting.as_markdown()
    for entry in entries:
        assert all(" ".join(text.split()) in page for text in (*entry.message, *entry.fix))


def test_errors_that_are_raised_are_on_the_page(entries, tmp_path):
    path = tiny_models.DATA / "tiny-llama-gptq"
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-100])
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    load = functools.partial(AutoModelForCausalLM.from_pretrained, path, quantization_config=hfq.HfqConfig())
    attempts = [
        lambda: Checkpoint.open(tmp_path / "nowhere"),
        lambda: Checkpoint.open(tmp_path),
        lambda: hfq.HfqConfig(kernl="native"),
        lambda: hfq.HfqConfig(cpu_memory="swap"),
        lambda: hfq.HfqConfig(quantize_weights=Recipe("gptq", bits=5)),
        lambda: hfq.report(AutoModelForCausalLM),
        lambda: load(device_map={"": "cpu", "model.layer.1": "disk"}),
        lambda: load(device_map={"": "dsik"}),
        lambda: load(max_memory={"cpu": "1MB"}),
    ]
    shown = []
    for attempt in attempts:
        with pytest.raises(hfq.HfqError) as caught:
            attempt()
        assert explained(caught.value, entries), caught.value
        shown.append(f"```\n{type(caught.value).__name__}: {caught.value}\n```")
    assert any(text in troubleshooting.as_markdown() for text in shown)  # the example at its head
    for dialect in REFUSED:
        assert explained(refused(dialect, "model.safetensors", None, "x"), entries), dialect


def test_what_a_helper_is_given_by_its_callers_stands_on_the_page(entries):
    texts = {what for entry in entries for what in entry.message}
    assert (
        "The calibration data cannot be used: it is shorter than one sequence." in texts
    )  # a helper that puts texts together
    assert any(
        "zero_optimization.zero_quantized_weights quantizes bytes" in text for text in texts
    )  # a table in a loop
    assert any(
        text.startswith("Format mxfp6-pack-quantized is not supported") for text in texts
    )  # a helper elsewhere
