"""Tests that all compilers detect the processor's features and produce the same bits."""

import ctypes
import importlib.util
import platform
import re
import shlex
from pathlib import Path

import pytest
import torch

from hfq.kernels.cpp import build as building
from hfq.kernels.cpp import int8_library as compiled_int8
from hfq.kernels.cpp import kernel, library
from hfq.kernels.cpp.layers import DTYPES
from tests.kernels.cpp.test_kernel import random
from tests.support.kernel_layers import CASES

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
VNNI = AVX512 | {"avx512_vnni"}
BFLOATS = AVX512 | {"avx512_bf16", "avx512vbmi"}
TILES = BFLOATS | {"amx_tile", "amx_bf16", "amx_int8"}


def flags() -> set[str]:
    """Returns the processor flags that the system reports."""
    information = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not information.exists():
        pytest.skip("the system does not say what an x86 processor has")
    return set(re.search(r"^flags\s*:(.*)$", information.read_text(), re.MULTILINE)[1].split())


def detected(native: ctypes.CDLL) -> tuple[int, int, int]:
    """Returns the level, the form of bfloat16 products, and the use of dot products of bytes."""
    return native.hfq_use(-1), native.hfq_use_short(-1), native.hfq_use_vnni(-1)


def test_what_is_found_of_the_processor_is_what_the_system_says(native):
    there = flags()
    level = 2 if there >= AVX512 else 1 if there >= AVX2 else 0
    assert detected(native) == (level, 2 if there >= TILES else 1 if there >= BFLOATS else 0, there >= VNNI)


@pytest.fixture(scope="module")
def zig():
    """Uses the compiler of the package ziglang, even if others exist."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed (pip install 'hfq[compiler]')")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CXX", raising=False)
        patch.setattr(building, "_NAMES", ())
        words = building.find_compiler()
        patch.setenv("CXX", shlex.join(words))
        yield words


@pytest.mark.exhaustive
def test_the_packages_compiler_makes_the_same_of_it(zig, compiled):
    other = library.load(building.build())
    assert detected(other) == detected(compiled)
    for level in range(compiled.hfq_detected() + 1):
        for name, case in CASES.items():
            weight_format, tensors = case.make()
            for dtype in DTYPES:
                for rows in (1, 2, 5, 17):
                    given = random(rows, case.in_features, dtype=dtype)
                    results = []
                    for loaded in (compiled, other):
                        with library.use(loaded):
                            loaded.hfq_use(level)
                            results.append(kernel.linear(given, tensors, weight_format))
                    assert torch.equal(*results), (level, name, dtype, rows)


@pytest.mark.slow
def test_the_packages_compiler_makes_the_same_of_int8(zig, compiled, monkeypatch):
    own, other = (
        compiled_int8._library(),
        compiled_int8._declared(ctypes.CDLL(str(building.build(compiled_int8.SOURCE)))),
    )
    assert own.hfq_int8_engine() == other.hfq_int8_engine()
    for out_features, in_features in ((37, 1), (33, 65), (65, 352), (19, 6200)):
        weight = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8)
        held = compiled_int8.RoundedWeight(weight, random(out_features), 0.5, 127.0, torch.inf)
        for dtype in (torch.float32, torch.bfloat16):
            for engine in compiled_int8.Engine:
                for rows in (1, 5, 17, 128):
                    given, results = random(rows, in_features, dtype=dtype), []
                    for made in (own, other):
                        monkeypatch.setattr(compiled_int8, "_library", lambda made=made: made)
                        results.append(torch.empty(rows, out_features, dtype=dtype))
                        compiled_int8.rounded_linear(given, held, results[-1], engine)
                    assert torch.equal(*results), (out_features, dtype, engine, rows)
