"""Tests of safe regular expressions: they match like `re.match`."""

import re

import pytest

from hfq.errors import FormatError
from hfq.formats.configs.safe_regex import matches

NAME = "model.layers.11.mlp.gate_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.mlp\..*",
        r"-?model",
        r".*layers\.(1[0-9]|2[0-9])\..*",
        r"(model\.)?layers",
        r".*(?:gate|up)_proj$",
        r"^lm_head",
        r"mlp",
        r".*layers\.\d+\.self_attn.*",
        r"model\.layers\.[0-9]{1,2}\.",
        r".*\+.*",
        r"(?!.*gate)",
        r"(?i)MODEL",
        r"",
        r"model.layers.1",
        r"(\w+\.)*gate",
        r"(?:[a-z]+\.?|\d+\.)+$",
    ],
)
def test_the_patterns_of_writers_match_from_the_front(pattern):
    assert matches(pattern, NAME, "dynamic") is (re.match(pattern, NAME) is not None)


@pytest.mark.parametrize("pattern", ["(", "*a", "[", "a{2,1}", "(?P<x", r"(a)\1", "((" * 40, "x" * 1001])
def test_a_pattern_that_is_none_or_that_requires_backtracking_is_refused(pattern):
    with pytest.raises(FormatError, match="A pattern in config_groups") as caught:
        matches(pattern, NAME, "config_groups")
    assert caught.value.found == repr(pattern)[:80]
    assert "config_groups" in caught.value.fix
