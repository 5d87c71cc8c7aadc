"""`hfq formats` and its page: what the registry says is what the docs say, and what the tests do."""

from pathlib import Path

from typer.testing import CliRunner

from hfq.cli.formats import as_markdown
from hfq.cli.main import app
from hfq.formats import FORMATS
from hfq.formats.detection.unsupported import REFUSED
from tests.contract.cases import CASES

DOCS = Path(__file__).parents[2] / "docs"
TARGET_FORMATS = [dialect for cls in FORMATS.values() for dialect in cls.variants]


def test_the_page_is_what_the_registry_says():
    text = (DOCS / "reference" / "formats.md").read_text(encoding="utf-8")
    assert text.startswith(as_markdown()), "run `make docs`"


def test_every_contract_row_belongs_to_a_dialect_and_every_dialect_has_one():
    named = [case for dialect in TARGET_FORMATS for case in dialect.cases]
    assert sorted(named) == sorted(case.id for case in CASES)
    assert all(dialect.cases for dialect in TARGET_FORMATS)


def test_the_rows_of_a_dialect_are_of_its_own_format():
    formats = {case.id: type(case.format) for case in CASES}
    for cls in FORMATS.values():
        assert {formats[case] for dialect in cls.variants for case in dialect.cases} <= {cls}


def test_the_command_lists_every_dialect_and_what_is_refused():
    result = CliRunner().invoke(app, ["formats"], env={"COLUMNS": "250"})
    assert result.exit_code == 0
    for name in (*(dialect.name for dialect in TARGET_FORMATS), *REFUSED):
        assert name in result.stdout
    assert CliRunner().invoke(app, ["formats", "--markdown"]).stdout == as_markdown()
