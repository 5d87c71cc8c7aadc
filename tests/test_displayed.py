"""Tests of the text and the table by which results show themselves."""

import hfq
from hfq.placement.plan import Plan, PlanEntry
from tests.support.models import GPTQ, load


def check(result, *words):
    text, table = repr(result), result._repr_html_()
    assert text.count("\n") < 24
    assert len(text) < 2400
    assert table.startswith("<table>")
    for word in words:
        assert word in table


def test_a_report_and_a_plan_show_the_bytes_of_each_device():
    model = load(device_map={"": "cpu", "model.layers.0": "disk"})
    check(hfq.report(model), "<td>disk</td>", "bytes onloaded per forward")
    plan = model.hf_quantizer.loading.plan
    check(plan, "<td>disk</td>", f"<td>{plan.onloaded_nbytes():,}</td>")


def test_a_comparison_shows_its_verdict_and_the_first_differences():
    found = hfq.compare(GPTQ, GPTQ)
    check(found, "the same model")
    other = hfq.compare(GPTQ, GPTQ.with_name("tiny-llama"), logits=False)
    check(other, *(each.name for each in other.differences[:3]))


def test_quality_shows_its_perplexity(tmp_path):
    (tmp_path / "text.txt").write_text("def f():\n    return 1\n" * 30)
    (found,) = hfq.evaluate([GPTQ], tmp_path / "text.txt", max_seq_length=32)
    check(found, "perplexity", f"{found.score.perplexity:.4f}")
    assert str(GPTQ) in repr(found)


def test_markup_in_names_is_escaped():
    table = Plan((PlanEntry("<b>", "<cpu>", "cpu", 1, False),))._repr_html_()
    assert "<cpu>" not in table
    assert "&lt;cpu&gt;" in table
