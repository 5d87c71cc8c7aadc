"""Promises 10 and 11 for GGUF: only errors of hfq escape, and ggml and gguf read the same files."""

import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfq import HfqError
from hfq.checkpoint.gguf.header import read_gguf_header
from tests.support import ggml_library, programs
from tests.support.gguf_files import IDS
from tests.support.gguf_mutations import MUTATIONS, mutated

EXAMPLES = 600
READERS = [
    "none",
    pytest.param(
        "gguf",
        marks=pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed"),
    ),
    pytest.param(
        "ggml",
        marks=[
            pytest.mark.peers,
            pytest.mark.skipif(not ggml_library.is_installed(), reason="no ggml is installed"),
        ],
    ),
]


def read_by(reader, path):
    """Returns {name: (number of the type, offset in the data, bytes)} as another reader finds it."""
    if reader == "ggml":
        return ggml_library.read_tensors(path)
    from gguf import GGUFReader

    found = GGUFReader(path)
    start = found.data_offset
    return {
        tensor.name: (int(tensor.tensor_type), int(tensor.data_offset) - start, int(tensor.n_bytes))
        for tensor in found.tensors
    }


@pytest.mark.parametrize("reader", READERS)
def test_only_hfq_errors_escape_and_what_hfq_accepts_others_read_alike(reader, tmp_path):
    refused, accepted = [], []

    @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None)
    @given(st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=2), st.randoms(use_true_random=False))
    def check(kinds, random):
        path = tmp_path / "x.gguf"
        path.write_bytes(mutated(random, kinds))
        try:
            header = read_gguf_header(path)
        except HfqError as error:
            refused.append(str(error))
            return
        found = {
            name: (IDS[info.blocks.type], info.range.offset - header.data_start, info.nbytes)
            for name, info in header.tensors.items()
        }
        known = reader == "gguf" and any(kind >= 42 for kind, _, _ in found.values())  # newer than gguf 0.19
        if reader != "none" and not known:
            assert read_by(reader, path) == found
        accepted.append(kinds)

    check()
    assert [text for text in refused if "\nFix: " not in text or str(tmp_path) not in text] == []
    assert min(len(refused), len(accepted)) >= EXAMPLES // 5


@pytest.mark.parametrize("count", [2000, pytest.param(30_000, marks=pytest.mark.peers)])
def test_the_fuzzer_of_headers_finds_no_disagreement(count):
    done = programs.run("fuzz_gguf_headers", count, "--seed", 7)
    assert done.returncode == 0, done.stdout
    assert f"{count:,} files, seeds 7 to" in done.stdout
    assert "| accepted by hfq alone | 0 |" in done.stdout
    assert count == 2000 or "ggml is compared, gguf is compared" in done.stdout
