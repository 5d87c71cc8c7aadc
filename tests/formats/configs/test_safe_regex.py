"""Tests of safe regular expressions: they match like `re.match`, and none runs for long."""

import re
import signal

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
    ],
)
def test_the_patterns_of_writers_match_from_the_front(pattern):
    assert matches(pattern, NAME, "dynamic") is (re.match(pattern, NAME) is not None)


@pytest.mark.parametrize(
    "pattern", ["(", "*a", "[", "a{2,1}", "(?P<x", "(a+)+$", "(a*)*", "(?:a+b?)*c", "x" * 1001]
)
def test_a_pattern_that_is_none_or_that_nests_repetitions_is_refused(pattern):
    with pytest.raises(FormatError, match="A pattern in config_groups") as caught:
        matches(pattern, NAME, "config_groups")
    assert caught.value.found == repr(pattern)[:80]
    assert "config_groups" in caught.value.fix


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|aa)+$",
        "(a|a)*$",
        ".*" * 12 + "!",
        "(a?){30}a{30}$",
        ".*a.*a.*a.*a!",
    ],
)
def test_no_pattern_takes_long(pattern):
    def stop(*_):
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        matches(pattern, "a" * 500, "dynamic")
    except FormatError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
