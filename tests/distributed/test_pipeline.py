"""Tests of `examples/07_pipeline.py` on two CPU ranks.

The logits equal those of the whole model. Each rank reads and holds only its stage.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from tests.support import tiny_models
from tests.support.zero_launch import BIN, ROOT, launch, start

pytestmark = pytest.mark.slow

WORKER = Path(__file__).parent / "pipeline_worker.py"
EXAMPLE = ROOT / "examples" / "07_pipeline.py"
GPTQ = tiny_models.DATA / "tiny-llama-gptq"
TORCHRUN = [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port"]
CASES = {
    f"{name} {schedule}": (tiny_models.DATA / name, schedule)
    for name in ("tiny-llama-gptq", "tiny-llama-fp8")
    for schedule in ("ScheduleGPipe", "Schedule1F1B")
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    cases = [
        {"id": name, "checkpoint": str(path), "schedule": schedule}
        for name, (path, schedule) in CASES.items()
    ]
    return launch(tmp_path_factory.mktemp("pipeline"), cases, 2, TORCHRUN, WORKER)


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
        # Loading checks the scales and indices of all stages. Norms between quantized tensors are read with
        # them.
        assert 0 <= rank["read"] - rank["own"] - rank["small"] <= 4 * 128 * 2
        assert rank["small"] < 0.15 * rank["own"]


def test_the_example_prints_the_tokens_of_the_whole_model(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(GPTQ, quantization_config=HfqConfig(cpu_memory="private"))
    tokens = torch.randint(3, 90, (4, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = [model(row, use_cache=False).logits[0, -1].argmax().item() for row in tokens.chunk(4)]
    text = start([str(EXAMPLE), str(GPTQ)], 2, tmp_path / "printed", TORCHRUN)
    printed = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert sorted(line["rank"] for line in printed if "rank" in line) == [0, 1]
    assert [line["greedy"] for line in printed if "greedy" in line] == [expected]
