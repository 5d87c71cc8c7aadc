"""Facts about a release that several files state: versions, dates, and tested versions of Python."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from hfq import __version__

ROOT = Path(__file__).parents[1]


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_changelog_and_the_citation_name_this_version():
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["version"] == __version__
    newest = re.search(r"^## (.*)$", text("CHANGELOG.md"), re.MULTILINE)[1]
    assert newest in ("Unreleased", f"{__version__} - {citation['date-released']}")


def test_the_versions_of_python_are_those_that_run_in_ci():
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text("setup.py"))
    jobs = yaml.safe_load(text(".github/workflows/ci.yml"))["jobs"]
    oldest = jobs["oldest-python"]["steps"][1]["with"]["python-version"]
    assert named == [oldest, *jobs["all"]["strategy"]["matrix"]["python"]]
    assert f'python_requires=">={oldest}"' in text("setup.py")
    assert jobs["all"]["steps"][-1] == {"run": ".ci/run"}


def test_every_template_is_valid_yaml():
    files = sorted((ROOT / ".github").rglob("*.yml"))
    assert len(files) == 4
    for file in files:
        assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict)


def test_every_line_of_the_manifest_matches_a_file():
    for line in text("MANIFEST.in").splitlines():
        kind, *names = line.split()
        if kind in ("include", "graft"):
            assert all((ROOT / name).exists() for name in names), line


@pytest.mark.parametrize(
    ("version", "said"),
    [((), "A release requires a version."), (("9.9.9",), "hfq/version.py has another version.")],
)
def test_a_release_of_another_version_is_an_error(version, said):
    done = subprocess.run([ROOT / ".ci" / "release", *version], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{said}\nFix: ")
