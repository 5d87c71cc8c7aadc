"""`examples/07_pipeline.py` on two CPU ranks: logits of the whole model, and each rank reads and holds its stage alone."""

from pathlib import Path

import pytest
import tiny_models
from zero_launch import BIN, launch

pytestmark = pytest.mark.slow

WORKER = Path(__file__).parent / "pipeline_worker.py"
CASES = {
    f"{name} {schedule}": (tiny_models.DATA / name, schedule)
    for name in ("tiny-llama-gptq", "tiny-llama-fp8")
    for schedule in ("ScheduleGPipe", "Schedule1F1B")
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    cases = [{"id": name, "checkpoint": str(path), "schedule": schedule} for name, (path, schedule) in CASES.items()]
    command = [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port"]
    return launch(tmp_path_factory.mktemp("pipeline"), cases, 2, command, WORKER)


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_through_two_stages_give_the_logits_of_the_whole_model(case, results):
    assert results[1][case]["equal"]


@pytest.mark.parametrize("case", CASES)
def test_each_rank_reads_and_holds_its_stage_alone(case, results):
    first, last = (rank[case] for rank in results)
    assert sorted({*first["stage"], *last["stage"]}) == ["0", "1", "2", "3"]
    assert not {*first["stage"]} & {*last["stage"]}
    assert first["own"] + last["own"] == first["all"]
    for rank in (first, last):
        assert rank["held"] == rank["own"]
        # scales and indices are checked while loading, wherever they rest; norms that lie between packed tensors are read along
        assert 0 <= rank["read"] - rank["own"] - rank["small"] <= 4 * 128 * 2
        assert rank["small"] < 0.15 * rank["own"]
