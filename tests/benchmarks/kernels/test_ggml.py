"""Tests of finding ggml's library, and of its description in the report.

Its products are tested in tests/interop.
"""

import pytest
import torch

from benchmarks.kernels import ggml, kernels_report
from benchmarks.kernels.kernel_peers import GGML, PEERS, REPACKED


@pytest.mark.parametrize("folder", ["lib", "lib64"])
def test_the_library_is_found_in_the_package_that_holds_it(tmp_path, monkeypatch, folder):
    library = tmp_path / "holds_ggml" / folder / "libggml-cpu.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert ggml._library_path("holds_ggml") == library


def test_a_package_without_the_library_is_named(tmp_path, monkeypatch):
    (tmp_path / "holds_none").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("holds_none", "is_not_there"):
        with pytest.raises(RuntimeError, match=f"{package} holds no libggml-cpu.so"):
            ggml._library_path(package)


def test_what_cannot_be_loaded_is_no_peer(tmp_path, monkeypatch):
    from benchmarks.kernels import kernel_peers

    library = tmp_path / "broken_ggml" / "lib" / "libggml-cpu.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"no library")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ggml, "PACKAGES", ("broken_ggml",))
    monkeypatch.setattr(kernel_peers, "PEERS", {(GGML, REPACKED): ("broken_ggml", PEERS[GGML, REPACKED][1])})
    ggml._library.cache_clear()
    assert kernel_peers.make_peers(torch.zeros(256, 256, dtype=torch.bfloat16)) == {}
    assert kernel_peers.missing_peers({}) == {GGML: "does not run here"}


def test_the_report_says_how_close_four_bits_come_to_it(monkeypatch):
    def record(method, weights, rows, threads, seconds):
        return {
            "shape": "s",
            "rows": rows,
            "threads": threads,
            "method": method,
            "weights": weights,
            "round": 0,
            "nbytes": 1,
            "seconds": seconds,
        }

    ours = [record("cpp", "gptq4 g128", rows, threads, 2.0) for rows in (1, 8) for threads in (1, 2)]
    theirs = [
        record(GGML, REPACKED, 1, 1, 1.5),
        record(GGML, REPACKED, 8, 2, 3.0),
        record(GGML, "Q4_0 repack", 1, 1, 9.0),
    ]
    monkeypatch.setattr(kernels_report, "compiled_for", lambda: "AVX2")
    fact = "gptq4 g128, cpp, over ggml Q4_K repack"
    assert kernels_report.report(ours + theirs, 1).facts[fact] == (
        "0.75 (M=1, 1 threads), 1.50 (M=8, 2 threads); ggml compiled for AVX2" + kernels_report._OWN_THREADS
    )
    assert kernels_report.report(ours, 1).facts[fact] == "not measured"
