"""Tests of the machine code of the Triton kernels for GPUs that are not there.

The compiler checks types, shapes, and constants, which the interpreter does not verify.
"""

import pytest

from tests.support import programs

pytest.importorskip("triton")

ROWS_OF_NIBBLES = {"int4 in rows", "mxfp4", "nvfp4"}
LIMITS = {80: 166_912, 86: 101_376, 90: 232_448, 120: 101_376}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Returns (format, architecture, kernel) → the counts of a kernel."""
    return counts_of(tmp_path_factory.mktemp("triton"))


def counts_of(cache, *arguments):
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = programs.run("compile_triton", *arguments, timeout=500, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(eval(line) for line in done.stdout.splitlines())


def test_one_row_takes_few_instructions_without_spills(compiled):
    found = {key: counts for key, counts in compiled.items() if key[2].startswith("few") and key[1] == 90}
    assert len(found) == 10
    for (name, *_), counts in found.items():
        assert counts["stack"] == 0, name
        assert counts["registers"] <= 128, name
        assert any(load.startswith("LDG.E.128") for load in counts["loads"]), name
        bound = 5.5 if name in ROWS_OF_NIBBLES else 8.5 if name == "awq" else 7.5
        assert counts["instructions"] <= bound, name


def test_some_rows_use_tensor_cores_within_the_shared_memory_of_every_card(compiled):
    found = {key: counts for key, counts in compiled.items() if key[2].startswith("some")}
    assert {architecture for _, architecture, _ in found} == {80, 86, 90, 120, "gfx942"}
    for (name, architecture, _), counts in found.items():
        assert counts["tensor"] > 0, (name, architecture)
        assert counts["stack"] == 0, (name, architecture)
        if architecture in LIMITS:
            assert counts["registers"] <= 168, (name, architecture)
            assert counts["shared"] <= LIMITS[architecture], (name, architecture)


@pytest.mark.every_dialect
def test_every_type_of_blocks_compiles_without_spills(tmp_path):
    found = counts_of(tmp_path, "blocks")
    assert len(found) == 20
    for (name, _, kernel), counts in found.items():
        assert counts["stack"] == 0, name
        assert counts["shared"] <= LIMITS[90], name
        assert counts["registers"] <= 168, name
        assert (counts["tensor"] > 0) == (kernel == "some"), name
        assert kernel == "some" or counts["instructions"] <= 12.5, name
