"""Tests of GGUF files under ZeRO-3 on two CPU ranks: bit-identical to one process, and read in shares."""

import pytest

from tests.support.gguf_models import make_model, write_model, write_random_llama
from tests.support.zero_launch import check_exact, launch, once

pytestmark = pytest.mark.slow

SHARDED = {
    "Q4_K none": ("Q4_K", "none", {}),
    "Q6_K in place": ("Q6_K", "nvme", {}),
    "Q4_0 cpu": ("Q4_0", "cpu", {}),
    "Q5_1 none": ("Q5_1", "none", {}),
    "Q8_0 in place": ("Q8_0", "nvme", {}),
    "IQ3_XXS in place": ("IQ3_XXS", "nvme", {}),
    "IQ1_M cpu": ("IQ1_M", "cpu", {}),
    "IQ4_XS none": ("IQ4_XS", "none", {}),
    "TQ1_0 cpu": ("TQ1_0", "cpu", {}),
    "MXFP4 in place": ("MXFP4", "nvme", {}),
    "NVFP4 none": ("NVFP4", "none", {}),
    "Q1_0 cpu": ("Q1_0", "cpu", {}),
    "floats in place": ("llama-biased BF16 F16", "nvme", {}),
    "gemma3 cpu": ("gemma3", "cpu", {}),
    "gemma3 in place": ("gemma3", "nvme", {}),
    "qwen3moe in place": ("qwen3moe", "nvme", {"disk_io": "direct"}),
    "deepseek3 none": ("deepseek3", "none", {}),
}
"""{case: (type of a Llama's blocks, or architecture and types; device of the shards; options)}.

There are one or more types of each class: legacy blocks, k-quants, codebooks with and without a scale of the
block, nonlinear and ternary codes, FP4 with E8M0 and E4M3 scales, one bit, and floats whose rows have another
order.
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    cases = []
    for index, (name, (model, device, options)) in enumerate(SHARDED.items()):
        path = folder / str(index)
        if model[0].isupper():
            write_random_llama(path, model)
        else:
            architecture, *kinds = model.split()
            write_model(path, architecture, make_model(architecture), kinds or ("Q8_0", "Q4_0"))
        cases.append({"id": name, "checkpoint": str(path), "shard_device": device, "options": options})
    return once(tmp_path_factory, "gguf-ranks", lambda: launch(folder, cases, 2))


@pytest.mark.parametrize("case", SHARDED)
def test_every_rank_computes_what_one_process_does(results, case):
    for rank in results:
        check_exact(rank[case], 2, is_read=False)
