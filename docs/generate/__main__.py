"""`make docs`: writes every page and table that is made. Run in the repository, with `docs` in PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

from generate import command_line, measured, placements

ROOT = Path(__file__).parents[2]
PAGES = {
    "docs/reference/command_line.md": command_line.as_markdown,
    "docs/reference/formats.md": placements.as_markdown,
}
WITH_TABLES = ("README.md", "docs/explanation/when_offloading_pays.md")
"""Pages in which only the tables between two comments are generated."""


def main() -> None:
    for page, text in PAGES.items():
        (ROOT / page).write_text(text(), encoding="utf-8")
    for page in WITH_TABLES:
        file = ROOT / page
        file.write_text(measured.filled(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
