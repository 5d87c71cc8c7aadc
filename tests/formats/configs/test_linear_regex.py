"""Tests of regular expressions without backtracking: they match exactly like `re.match`."""

import random
import re

import pytest

from hfq.formats.configs.linear_regex import Text, TooManyStepsError, UnsupportedError, parse

LEAVES = ["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", r"\d", r"\b", r"\B", "^", "$", "[]a]", r"\Z", "A", "{"]
OPENINGS = ["(", "(?:", "(?=", "(?!", "(?i:"]
BEHIND = ["(?<=a)", "(?<!ab)", "(?<=[ab])", r"(?<!\b)", "(?<=^)"]
REPEATS = ["", "", "", "*", "+", "?", "{2}", "{1,3}", "{,2}", "*?", "{0,}", "??", "{1,2}?", "{,}"]


def matches(pattern, text, most_steps=100_000):
    return bool(parse(pattern).ends(1, Text(text, most_steps)))


def made_up(chosen, depth=0):
    """Returns a random pattern; not all are regular expressions."""
    parts = []
    for _ in range(chosen.randint(0, 4)):
        kind = chosen.random()
        if kind < 0.5 or depth > 3:
            part = chosen.choice(LEAVES)
        elif kind < 0.9:
            options = [made_up(chosen, depth + 1) for _ in range(chosen.randint(1, 3))]
            part = f"{chosen.choice(OPENINGS)}{'|'.join(options)})"
        else:
            part = chosen.choice(BEHIND)
        parts.append(part + chosen.choice(REPEATS))
    return "".join(parts)


def test_random_patterns_match_like_re():
    chosen, compared = random.Random(0), 0
    while compared < 3000:
        pattern = chosen.choice(["", "", "(?i)"]) + made_up(chosen)
        text = "".join(chosen.choices("abc.A1_", k=chosen.randint(0, 9)))
        try:
            expected = re.match(pattern, text) is not None
        except re.error:
            continue
        assert matches(pattern, text) is expected, (pattern, text)
        compared += 1


@pytest.mark.parametrize(
    "pattern", [r"(a)\1", "(?P<x>a)(?P=x)", "(a)?(?(1)b|c)", "é", r"\x61", r"\u0061", "[\\x61]", "(?x)a"]
)
def test_constructs_that_require_backtracking_are_unsupported(pattern):
    with pytest.raises(UnsupportedError):
        parse(pattern)


def test_nested_repetitions_stop_at_the_limit_of_steps():
    with pytest.raises(TooManyStepsError, match="1000 steps"):
        matches("((?=(ab)*c)..)*!", "ab" * 60 + "c", most_steps=1000)
