"""Tests that `make stress` finds every outcome right, with fewer loads and kills, and fills a page."""

import pytest

from tests.support import programs


@pytest.mark.slow
def test_a_short_run_is_right_and_fills_the_table_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- table: stress, made by `make stress` -->\nold\n<!-- end of table -->\nafter\n"
    )
    done = programs.run("stress", "--divide", 25, "--page", page)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    text = page.read_text()
    assert text.startswith("before\n<!-- table")
    assert text.endswith("<!-- end of table -->\nafter\n")
    assert "old\n" not in text
    assert text.count("\n| ") == 8
