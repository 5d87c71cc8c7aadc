"""Tests that an editable install is imported from the folder above a clone named hfq, too."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")

from tests.support.packages import ROOT, copied, pip, setup_arguments

ORIGIN = "from importlib.util import find_spec; print(find_spec('hfq').origin)"


def test_an_editable_install_puts_the_clone_on_sys_path(monkeypatch):
    """setuptools writes a static path file if `package_dir` has one root, and else an import hook."""
    assert setup_arguments(monkeypatch)["package_dir"] == {"": "."}


def test_a_package_later_on_sys_path_wins_over_the_clone_as_a_namespace(tmp_path):
    package = tmp_path / "hfq" / "hfq" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "hfq")}
    run = [sys.executable, "-S", "-c", ORIGIN]
    assert subprocess.check_output(run, cwd=tmp_path, env=environment, text=True).strip() == str(package)


@pytest.mark.slow
def test_a_real_editable_install_is_found_from_above_the_clone(tmp_path):
    clone, venv = copied(ROOT, tmp_path / "hfq"), tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "below.pth").write_text(sysconfig.get_path("purelib"))
    pip("install", "-e", clone, python=venv / "bin" / "python")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.check_output(
        [venv / "bin" / "python", "-c", ORIGIN], cwd=tmp_path, env=environment, text=True
    )
    assert Path(found.strip()) == clone / "hfq" / "__init__.py"
