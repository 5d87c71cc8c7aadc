"""Tests of GGUF files under ZeRO-3 on two CPU ranks: bit-identical to one process, and read in shares."""

import pytest

from tests.support.gguf_models import make_model, write_model, write_random_llama
from tests.support.zero_launch import check_exact, launch, once

pytestmark = pytest.mark.slow

SHARDED = {
    "Q4_K none": ("Q4_K", "none", {}),
    "Q4_0 cpu": ("Q4_0", "cpu", {}),
    "IQ3_XXS in place": ("IQ3_XXS", "nvme", {}),
    "gemma3 cpu": ("gemma3", "cpu", {}),
    "gemma3 in place": ("gemma3", "nvme", {}),
    "qwen3moe in place": ("qwen3moe", "nvme", {"disk_io": "direct"}),
    "deepseek3 none": ("deepseek3", "none", {}),
}
"""{case: (type of a Llama's blocks or architecture, device of the shards, options)}."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    cases = []
    for index, (name, (model, device, options)) in enumerate(SHARDED.items()):
        path = folder / str(index)
        if model[0].isupper():
            write_random_llama(path, model)
        else:
            write_model(path, model, make_model(model))
        cases.append({"id": name, "checkpoint": str(path), "shard_device": device, "options": options})
    return once(tmp_path_factory, "gguf-ranks", lambda: launch(folder, cases, 2))


@pytest.mark.parametrize("case", SHARDED)
def test_every_rank_computes_what_one_process_does(results, case):
    for rank in results:
        check_exact(rank[case], 2, is_read=False)
