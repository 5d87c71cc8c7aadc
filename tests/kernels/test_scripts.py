"""Functions in TorchScript: compiled in silence, and called as they are where torch compiles none."""

import warnings

import pytest
import torch

from hfq.kernels.cpu import fp8_bfloat16, fp8_panels, torchscript


def shifted(values: torch.Tensor, by: int) -> bool:
    values.add_(by)
    return int(values.amax()) == by


@pytest.fixture(autouse=True)
def nothing_compiled():
    torchscript._compile.cache_clear()
    yield
    torchscript._compile.cache_clear()


@pytest.mark.parametrize("error", [None, RuntimeError, OSError, AttributeError, NotImplementedError, TypeError, ValueError])
def test_a_function_does_the_same_with_and_without_torchscript(error, monkeypatch, caplog):
    caplog.set_level("INFO")
    if error is not None:

        def refuse(function):
            raise error("no TorchScript here")

        monkeypatch.setattr(torch.jit, "script", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call = torchscript.scripted(shifted)
        values = torch.zeros(3, dtype=torch.int32)
        assert call(values, 2)
        assert not call(values, by=3)
    assert values.tolist() == [5, 5, 5]
    assert isinstance(torchscript._compile(shifted), torch.jit.ScriptFunction) == (error is None)
    assert ("TorchScript does not take shifted" in caplog.text) == (error is not None)
    assert call.__name__ == "shifted"


@pytest.mark.parametrize("function", [fp8_bfloat16._shift, fp8_bfloat16._scale_blocks, fp8_panels._multiply_share])
def test_every_script_is_compiled_here(function):
    """Else it would run in Python, and only be slow."""
    assert isinstance(torchscript._compile(function.__wrapped__), torch.jit.ScriptFunction)
