"""Builds and installs of the package from the working tree, without a network."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import setuptools

__all__ = ["ROOT", "copied", "pip", "setup_arguments"]

ROOT = Path(__file__).parents[2]
_BUILT = ("build", "dist", "hfq-*", "*.egg-info")  # comes and goes while an sdist is built
_NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "tests", "docs", *_BUILT)


def setup_arguments(monkeypatch: Any) -> dict[str, Any]:
    """Returns what setup.py hands to `setuptools.setup`."""
    arguments: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **given: arguments.update(given))
    runpy.run_path("setup.py")
    return arguments


def copied(source: Path, target: Path) -> Path:
    """Copies a folder with a setup.py or pyproject.toml, so that a build writes nothing into the clone."""
    return shutil.copytree(source, target, ignore=_NOT_COPIED)


def pip(command: str, *arguments: str | Path, python: str | Path = sys.executable) -> None:
    """Runs `pip wheel` or `pip install` with the setuptools of an environment.

    Args:
        command: `wheel` or `install`.
        arguments: Options and folders.
        python: The interpreter of the environment.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", python, command]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *offline, *arguments], check=True)
