"""The table of quantization methods: it has every method of transformers, and says what hfq does with it."""

import transformers
from generate.methods import METHODS, TRANSFORMERS, as_markdown
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from hfq.formats.detection.unsupported import REFUSED
from tests.contract.cases import CASES
from tests.formats.detection.test_unsupported import SEEN

ROWS = {method.name: method for method in METHODS}


def test_every_method_of_transformers_has_a_row():
    installed = AUTO_QUANTIZER_MAPPING.keys() | AUTO_QUANTIZATION_CONFIG_MAPPING.keys()
    listed = {name for name, method in ROWS.items() if "T" in method.registries}
    assert installed - {"hfq"} - listed == set(), "add a row to docs/generate/methods.py"
    if transformers.__version__ == TRANSFORMERS:
        assert listed <= installed


def test_a_name_has_one_row_with_one_answer():
    assert len(ROWS) == len(METHODS)
    for method in METHODS:
        answers = [method.found_variants(), method.refusal, method.same_as]
        assert sum(map(bool, answers)) == 1 or (not any(answers) and method.note), method.name
        assert method.same_as is None or ROWS[method.same_as].variants, method.name
        assert method.refusal is None or (method.refusal in REFUSED and method.writers), method.name


def test_each_part_of_a_name_is_that_of_a_variant():
    for method in METHODS:
        found = [variant.name for variant in method.found_variants()]
        assert [part for part in method.variants if not any(part in name for name in found)] == []


def test_methods_that_are_read_are_those_of_the_contract_tests():
    named = {(case.config or {}).get("quant_method") for case in CASES}
    silent = {"quanto", "hqq"}  # their files name no method, or another tool's config does
    for name, method in ROWS.items():
        if method.variants:
            known = "bitsandbytes" if name.startswith("bitsandbytes") else name
            assert known in named or name in silent, name


def test_methods_that_are_refused_are_those_of_the_tests_of_errors():
    named = {(config.get("quant_method"), variant) for variant, config, _ in SEEN}
    kernels = {"gptq_marlin_24"}  # vLLM's name for files of gptq
    for name, method in ROWS.items():
        assert method.refusal is None or name in kernels or (name, method.refusal) in named, name


def test_a_row_names_tool_and_version():
    text = as_markdown()
    assert (
        "| `gemma` | yes |  | read: Gemma QAT (2, 4, 8 bits); Gemma QAT embeddings | 0.1.0 | Google |" in text
    )
    assert "| `qqq` |  | yes | unsupported: QQQ |  | gptqmodel, QQQ |" in text
