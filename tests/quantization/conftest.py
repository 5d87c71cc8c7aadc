"""GPTQ run of the small trained model, for several tests."""

import pytest
import torch
from transformers import AutoTokenizer

import hfq
from hfq import Recipe
from tests.support import tiny_models

pytest.importorskip("optimum.gptq")
SOURCE = tiny_models.DATA / "tiny-llama"
LENGTH, SAMPLES = 64, 12


@pytest.fixture(scope="session")
def text() -> str:
    return (SOURCE / "held_out.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def tokens(text) -> list[torch.Tensor]:
    """Calibration sequences. The rest of the text is for tests."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(SOURCE)(text[:6000])["input_ids"])
    return list(ids[: SAMPLES * LENGTH].view(SAMPLES, LENGTH))


@pytest.fixture(scope="session")
def gptq(tmp_path_factory, tokens):
    """(folder, report, progress reports) of a run with 4 bits in groups of 64."""
    seen = []
    folder = tmp_path_factory.mktemp("quantized") / "gptq"
    recipe = Recipe("gptq", bits=4, group_size=64)
    report = hfq.quantize(
        SOURCE,
        recipe,
        output_dir=folder,
        dataset=tokens,
        num_calibration_samples=SAMPLES,
        max_seq_length=LENGTH,
        on_progress=seen.append,
    )
    return folder, report, seen
