"""Tests of the hits of tokens that are decoded one by one."""

from hfq.offload.experts.decoding_counts import DecodingCounts


def test_tokens_are_whole_passes_and_the_rate_is_that_of_all_lookups():
    counts = DecodingCounts(period=3)
    assert (counts.tokens, counts.hit_rate) == (0, 0.0)
    for is_kept in (True, True, False, True):
        counts.note(1, is_kept)
    counts.calls = 7
    assert (counts.tokens, counts.hit_rate) == (2, 0.75)


def test_calls_of_a_token_count_and_those_of_a_prompt_do_not(build_experts):
    experts = build_experts(places=4, routed=2)
    for wanted in ([0, 1], [0, 1, 2], [4], [0, 1], [1, 5]):
        experts.use(*wanted)
    counts = experts.cache.decoding
    assert (counts.tokens, counts.calls, counts.lookups, counts.kept) == (3, 3, 6, 3)
    assert experts.cache.hits + experts.cache.misses == 10
