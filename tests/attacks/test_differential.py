"""Promises 10 and 11: only errors of hfq escape, and safetensors accepts the same headers.

safetensors reads every header that hfq accepts, with the same result.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from hfq import HfqError
from hfq.checkpoint import read_header
from tests.support import programs
from tests.support.header_mutations import MUTATIONS, as_file, mutate, random_header, serialised

EXAMPLES = 300


def assert_read_alike(path, header):
    """Checks that hfq and safetensors read the same values."""
    with safe_open(path, "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()} == {
            name: (info.dtype, list(info.shape)) for name, info in header.tensors.items()
        }
        assert (file.metadata() or {}) == header.metadata


# 10. Only errors of hfq escape. 11. hfq accepts only headers that safetensors reads.


def test_only_hfq_errors_escape_and_what_hfq_accepts_safetensors_reads_alike(tmp_path):
    refused, accepted = [], []

    @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None)
    @given(st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=2), st.randoms(use_true_random=False))
    def check(kinds, random):
        pairs, nbytes = random_header(random)
        sizes = {"length": 0, "data": nbytes}
        for kind in kinds:
            mutate(random, kind, pairs, sizes)
        path = tmp_path / "x.safetensors"
        path.write_bytes(
            as_file(serialised(pairs).encode() if pairs else b"{}", sizes["data"], sizes["length"])
        )
        try:
            header = read_header(path)
        except HfqError as error:
            refused.append(str(error))
        else:
            assert_read_alike(path, header)
            accepted.append(kinds)

    check()
    assert [text for text in refused if "\nFix: " not in text or str(tmp_path) not in text] == []
    assert min(len(refused), len(accepted)) >= EXAMPLES // 10


def is_accepted_by_safetensors(path):
    try:
        with safe_open(path, "np"):
            return True
    except SafetensorError:
        return False


def one(shape="[1]", offsets="[0,4]", metadata='{"k":"v"}'):
    return f'{{"__metadata__":{metadata},"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}'


@pytest.mark.parametrize(
    ("raw", "nbytes"),
    [
        (one(shape="[1.0]"), 4),
        (one(shape="[01]"), 4),
        (one(shape="[true]"), 4),
        (one(shape="[-1]"), 4),
        (one(shape="[2]"), 4),
        (one(offsets="[0,5]"), 5),
        (one(offsets="[4,8]"), 8),
        (one(metadata='{"k":1}'), 4),
        (one(metadata='"k"'), 4),
        (one() + "x", 4),
        (one() + one(), 4),
        (one(metadata='{"k":"\x01"}'), 4),
        (one(metadata="NaN"), 4),
        (one(shape="[-0]", offsets="[0,0]"), 0),
        (one(offsets="[-0,4]"), 4),
        (one(shape=f"[{2**62},4,0]", offsets="[0,0]"), 0),
        (one(metadata='{"k":"\\ud800"}'), 4),
        (one(metadata='{"\\udc00":"v"}'), 4),
    ],
)
def test_what_safetensors_refuses_hfq_refuses(tmp_path, raw, nbytes):
    path = tmp_path / "x.safetensors"
    path.write_bytes(as_file(raw.encode(), nbytes))
    assert not is_accepted_by_safetensors(path)
    with pytest.raises(HfqError):
        read_header(path)


def test_the_fuzzer_of_headers_finds_no_disagreement():
    done = programs.run("fuzz_headers", 3000, "--seed", 7)
    assert done.returncode == 0, done.stdout
    assert "3,000 headers, seeds 7 to 7" in done.stdout
    assert "| accepted by hfq alone | 0 |" in done.stdout
