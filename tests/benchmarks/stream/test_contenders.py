"""Tests of contenders: each onloads every byte, and simulated compute leaves nothing behind."""

import time

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.checkpoints import LAYOUTS, make_checkpoint
from benchmarks.stream import contenders as movers
from benchmarks.stream.stream_worker import StreamWorker
from hfq.machine_profile.probe_models import Architecture
from hfq.modules.linear import QuantizedLinear

SMALL = Architecture(128, 2)
TOKENS = torch.ones(1, 4, dtype=torch.long)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {weights: make_checkpoint(folder, SMALL, weights) for weights in ("bf16", "gptq4")}


@pytest.fixture
def touched(monkeypatch):
    """Bytes of every tensor in memory that a layer's modules read."""
    found = []

    def count(tensors):
        found.extend(tensor.nbytes for tensor in tensors if not tensor.is_meta)

    monkeypatch.setattr(movers, "touch", count)
    return found


@pytest.mark.parametrize(
    ("mover", "weights"),
    [
        ("hfq", "gptq4"),
        ("hfq, buffered", "gptq4"),
        ("accelerate", "bf16"),
        ("accelerate's hooks", "bf16"),
        ("accelerate's hooks", "gptq4"),
    ],
)
def test_a_pass_reads_every_byte_of_the_layers(paths, touched, mover, weights):
    with movers.standing_in():
        moving = movers.MOVERS[mover](paths[weights], movers.ON_DISK)
        touched.clear()
        moving.forward(TOKENS)
    layers, nbytes = movers.layer_nbytes(paths[weights])
    config = SMALL.tensors(LAYOUTS[weights])
    outside = (
        0
        if mover == "accelerate's hooks"
        else config["model.norm.weight"].nbytes + config["lm_head.weight"].nbytes
    )
    assert layers == 2
    assert sum(touched) == nbytes + outside


def test_hfq_counts_what_it_reads_and_shares_it_among_micro_batches(paths):
    with movers.standing_in():
        moving = movers.MOVERS["hfq"](paths["gptq4"], movers.ON_DISK)
        nbytes = movers.layer_nbytes(paths["gptq4"])[1]
        moving.forward(TOKENS)
        before = moving.bytes_read()
        moving.forward_all([TOKENS] * 4)
        assert moving.bytes_read() - before < 2 * nbytes  # one pass, and the prefetch for the next


def test_a_layer_sleeps_while_it_stands_in(paths, monkeypatch):
    slept = []
    monkeypatch.setattr(movers.Compute, "seconds", 0.25)
    monkeypatch.setattr(time, "sleep", slept.append)
    with movers.standing_in():
        movers.MOVERS["accelerate's hooks"](paths["bf16"], movers.ON_DISK).forward(TOKENS)
    assert slept == [0.25, 0.25]


def test_classes_get_their_own_forwards_back():
    classes = (LlamaDecoderLayer, torch.nn.Linear, QuantizedLinear)
    own = [cls.forward for cls in classes]
    with pytest.raises(KeyError), movers.standing_in():
        assert [cls.forward for cls in classes] != own
        raise KeyError
    assert [cls.forward for cls in classes] == own


def test_a_worker_measures_passes_and_micro_batches(paths):
    worker = StreamWorker("hfq", str(paths["gptq4"]))
    try:
        worker.load()
        passes, micro = worker.passes(3, 0.0), worker.micro_batches(4, 0.0, 2)
    finally:
        worker.close()
    nbytes = movers.layer_nbytes(paths["gptq4"])[1]
    assert (passes["steps"], passes["expected"]) == (3, 3 * nbytes)
    assert (micro["steps"], micro["expected"]) == (2, 2 * nbytes)
    for answer in (passes, micro):
        assert 0 <= answer["moved"] <= answer["expected"]
        assert answer["seconds"] > 0


def test_decoding_from_disk_gives_the_tokens_of_memory(paths):
    found = []
    for on_disk in (True, False):
        worker = StreamWorker("hfq", str(paths["gptq4"]), stand_in=False, on_disk=on_disk)
        worker.load()
        found.append(worker.decode(3)["tokens"])
    assert len(found[0]) == 3
    assert found[0] == found[1]
