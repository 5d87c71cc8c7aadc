"""Links what a wheel declares that it requires, and what that requires in turn, from this environment into
another.

An environment of 1.2 GB is not installed twice, and a module of a package that nobody declared is still not
found.

    .venv/bin/python .ci/link_declared.py dist/hfq-1.0-py3-none-any.whl
    .venv-wheel/lib/python3.11/site-packages
"""

import email
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def declared(texts: list[str], extras: set[str], found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Every distribution that requirements name, directly or not, by name."""
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            continue
        known = requirement.name in found
        if known and not requirement.extras:
            continue
        found[requirement.name] = installed = distribution(requirement.name)
        if not requirement.specifier.contains(installed.version, prereleases=True):
            raise SystemExit(f"{requirement} is required, {installed.version} is here")
        declared(installed.requires or [], set(requirement.extras), found)
    return found


def link(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    for installed in declared(metadata.get_all("Requires-Dist"), set(), {}).values():
        home = Path(installed.locate_file(""))
        for top in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
            if not (target / top).exists():
                (target / top).symlink_to((home / top).resolve())


if __name__ == "__main__":
    link(Path(sys.argv[1]), Path(sys.argv[2]))
