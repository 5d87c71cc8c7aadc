"""Tests that no regular expression of a checkpoint's config runs for long."""

import itertools
import signal

import pytest

from hfq.errors import FormatError
from hfq.formats.configs.gptq_config import module_options
from hfq.formats.configs.safe_regex import limited_matching, matches
from hfq.formats.detection.detect import detect_formats
from hfq.tensor_spec import ByteRange, TensorInfo

NAMES = ["model.layers.11.mlp.gate_proj", "a" * 512, "a." * 256]
REPEATED = [
    "a",
    ".",
    "[a.]",
    r"\w",
    "(a|a)",
    "(a|aa)",
    "(a?)",
    "(a*)",
    "(a+)+",
    "((a|b)*c?)*",
    "(?=a*)a",
    "()",
]
REPEATS = ["?", "*", "+", "{0,30}", "{30}", "*?"]
ENDS = ["!", "$", "Z{9}", r"\b!"]


def hostile_patterns():
    """Returns 1,008 patterns, most of which run without end in a backtracking engine."""
    families = itertools.product(REPEATED, REPEATS, (1, 12, 60), ENDS)
    patterns = [f"{(part + repeat) * count}{end}" for part, repeat, count, end in families]
    return patterns + ["(" * depth + "a" + "*)" * depth + end for depth in range(1, 37) for end in ENDS]


@pytest.fixture
def alarm():
    """Returns a function that ends a test after some seconds of this process's own time."""

    def stop(*_):
        raise TimeoutError

    previous = signal.signal(signal.SIGPROF, stop)
    yield lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, previous)


@pytest.mark.parametrize("name", NAMES, ids=["module", "letters", "dots"])
def test_each_of_a_thousand_hostile_patterns_ends_within_a_second(name, alarm):
    patterns = hostile_patterns()
    assert len(set(patterns)) >= 1000
    refused = 0
    for pattern in patterns:
        alarm(1.0)
        try:
            found = matches(pattern, name, "dynamic")
        except FormatError:
            refused += 1
        else:
            assert isinstance(found, bool)
        alarm(0)
    assert refused < len(patterns) / 2  # most are matched, not refused


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [(".?" * 60 + "Z", False), ("(a?){30}a{30}$", False), ("(a|aa)+$", True), (".*" * 12 + "!", False)],
)
def test_a_hostile_pattern_is_matched_correctly(pattern, is_match, alarm):
    alarm(1.0)
    assert matches(pattern, "a" * 29, "dynamic") is is_match


def test_all_patterns_and_modules_share_a_limit(monkeypatch):
    monkeypatch.setattr("hfq.formats.configs.safe_regex._MOST_STEPS_OF_A_CHECKPOINT", 200_000)
    config = {"dynamic": {f"{'.?' * 60}Z{index}": {} for index in range(3000)}}
    with pytest.raises(FormatError, match="200000 steps for all patterns and modules"), limited_matching():
        for index in range(196):
            module_options(f"model.layers.{index}.mlp.gate_proj", config)


def test_detection_applies_the_limit(monkeypatch):
    monkeypatch.setattr("hfq.formats.configs.safe_regex._MOST_STEPS_OF_A_CHECKPOINT", 100)
    info = TensorInfo("x.qweight", "I32", (16, 16), ByteRange("f", 0, 1024))
    config = {"quant_method": "gptq", "bits": 4, "dynamic": {"y.*z.*": {}}}
    modules = {f"y{index}": {"qweight": info} for index in range(100)}
    with pytest.raises(FormatError, match="100 steps for all patterns and modules"):
        detect_formats(modules, config)


def test_three_thousand_ordinary_patterns_of_two_hundred_layers_are_allowed():
    config = {"dynamic": {rf"model\.layers\.{index}\.mlp\.(gate|up)_proj": {} for index in range(3000)}}
    with limited_matching():
        for index in range(0, 196, 20):
            module_options(f"model.layers.{index}.self_attn.k_proj", config)
