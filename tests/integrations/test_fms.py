"""Tests of `hfq.fms` without IBM's Foundation Model Stack, or with an untested version.

tests/interop tests it with the stack.
"""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import hfq
from hfq.errors import SetupError

DOORS = {"load": lambda: hfq.fms.load("checkpoint"), "register": lambda: hfq.fms.register()}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_without_fms(door, monkeypatch):
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(
        SetupError, match=r"(?s)is not installed.*ibm-fms>=1.13,<1.14.*Fix: Run pip install 'hfq\[fms\]'"
    ):
        door()


@pytest.mark.parametrize("version", ["1.2.0", "1.14.0", "2.0"])
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_with_a_version_that_was_not_tested(door, version, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(SetupError, match=rf"(?s)does not support this version.*found: ibm-fms {version}"):
        door()


def test_the_extra_names_the_versions_that_are_tested():
    from hfq.integrations.fms import _NEXT, _OLDEST

    assert f'"ibm-fms>={_OLDEST},<{_NEXT}"' in (Path(__file__).parents[2] / "setup.py").read_text()


def test_hfq_names_it_without_importing_anything():
    code = (
        "import hfq, sys; assert 'fms' in dir(hfq); sys.exit('torch' in sys.modules or 'fms' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
    )
