"""Tests that the wheel of hfq holds no folder of another package."""

import zipfile

import pytest

pytest.importorskip("setuptools", minversion="77")

from tests.support.packages import ROOT, copied, pip, setup_arguments


def built(folder, tmp_path):
    """Returns the files in the wheel of a folder, without those of its metadata."""
    pip("wheel", "-w", tmp_path / "wheels", copied(folder, tmp_path / folder.name))
    (wheel,) = (tmp_path / "wheels").iterdir()
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_hfq_is_the_only_top_level_package(monkeypatch):
    packages = setup_arguments(monkeypatch)["packages"]
    assert "hfq.cli" in packages
    assert {name.partition(".")[0] for name in packages} == {"hfq"}


@pytest.mark.slow
def test_the_wheel_of_hfq_holds_files_of_hfq_alone(tmp_path):
    files = built(ROOT, tmp_path)
    assert {"hfq/py.typed", "hfq/kernels/cpp/src/kernels.cpp", "hfq/cli/main.py"} <= files
    assert {name.partition("/")[0] for name in files} == {"hfq"}


@pytest.mark.slow
def test_optimum_hfq_adds_one_file_to_optimum_cli(tmp_path):
    assert built(ROOT / "optimum-hfq", tmp_path) == {"optimum/commands/register/register_hfq.py"}
