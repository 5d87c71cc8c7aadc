"""Tests of tables that fit narrow terminals."""

import io

from rich.console import Console

from hfq.cli.fitting_table import FittingTable


def printed(table, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_no_word_is_cut_and_no_line_is_too_long():
    table = FittingTable("module", "a long heading of many words", title="some modules")
    table.add_row("model.layers.0.self_attn.q_proj", "different format and different numbers")
    for width in (40, 60, 80, 200):
        text = printed(table, width)
        assert {"some", "model.layers.0.self_attn.q_proj", "different", "heading"} <= set(
            text.replace(":", " ").split()
        )
        if width >= 50:
            assert max(map(len, text.splitlines())) <= width
    assert "│" in printed(table, 60)
    assert "│" not in printed(table, 30)


def test_brackets_are_no_markup():
    table = FittingTable("shape")
    table.add_row("[64, 32] [red]")
    assert "[64, 32] [red]" in printed(table, 80)
