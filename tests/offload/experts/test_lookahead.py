"""Tests of reads ahead of the router: what is guessed, what it costs, and that outputs stay the same."""

import logging
import threading

import pytest
import torch

from hfq.errors import CheckpointError
from hfq.offload.experts.lookahead import token_ids
from hfq.offload.reader_threads import Ticket
from tests.support import moe_models
from tests.support.moe_models import IDS, SCHEMES, is_quantized, load, logits


@pytest.fixture
def guessing(build_experts):
    """guessing(places) → eight experts on disk, with guesses also where reads are buffered."""

    def guessing(places: int, **options):
        experts = build_experts(places, **options)
        experts.cache._may_guess = lambda: True
        return experts

    return guessing


def finish(experts) -> None:
    """Waits for all reads."""
    for place in experts.places().places:
        if place.contents is not None:
            place.contents.ticket.wait()


def hold_reader(experts, leave) -> None:
    """Keeps one reader thread busy until `leave` is set."""
    has_begun = threading.Event()

    def hold() -> None:
        has_begun.set()
        leave.wait(20)

    experts.offloader.pool.submit(Ticket([hold]))
    assert has_begun.wait(20)


def counts(experts) -> tuple[int, int, int]:
    guesses = experts.cache.guesses
    return guesses.made, guesses.used, guesses.wasted_nbytes


def test_what_was_guessed_is_there_and_the_rest_is_waste_that_leaves_first(guessing):
    experts = guessing(places=5)
    experts.use(0, 1, ahead=[4, 5])
    finish(experts)
    assert counts(experts) == (2, 0, 0)
    misses = experts.cache.misses
    experts.use(4, 6)
    assert experts.cache.misses - misses == 1
    assert counts(experts) == (2, 1, experts.cache.experts[5].layout.needed_nbytes)
    assert experts.kept() == [5, 0, 1, 4, 6]
    experts.use(2)
    assert experts.kept() == [0, 1, 4, 6, 2]
    assert experts.are_free()


def test_a_guess_whose_read_has_not_begun_costs_nothing(guessing):
    experts, leave = guessing(places=6, threads=1), threading.Event()
    experts.use(0, 1)
    read = experts.offloader.source.nbytes_read
    hold_reader(experts, leave)
    experts.use(0, 1, ahead=[4, 5])
    experts.use(0, 1)
    leave.set()
    assert counts(experts) == (2, 0, 0)
    experts.offloader.pool.submit(Ticket([lambda: None])).wait()
    assert experts.offloader.source.nbytes_read == read
    experts.use(4, 5)  # their dropped reads are no contents
    assert experts.offloader.source.nbytes_read > read


def test_a_guess_that_is_needed_waits_behind_no_other_one(guessing):
    experts, leave, order = guessing(places=8, threads=1), threading.Event(), []
    experts.use(0)
    fill = experts.offloader.source.read
    first = {expert.layout.runs[0].source.offset // 4096: n for n, expert in enumerate(experts.cache.experts)}

    def read(wanted, target):
        order.append(first.get(wanted.offset // 4096))
        fill(wanted, target)

    experts.offloader.source.read = read
    hold_reader(experts, leave)
    experts.use(0, ahead=[3, 4, 5])
    pool, is_asked = experts.offloader.pool, threading.Event()
    submit_all = pool.submit_all
    pool.submit_all = lambda *arguments: (submit_all(*arguments), is_asked.set())
    asking = threading.Thread(target=lambda: experts.use(5), daemon=True)
    asking.start()
    assert is_asked.wait(20)
    leave.set()
    asking.join(20)
    finish(experts)
    assert next(number for number in order if number is not None) == 5


def test_a_guess_takes_no_place_in_use_and_the_budget_holds(guessing):
    experts = guessing(places=0, routed=2)
    for first in (0, 4, 0, 4):
        ahead = [first + 2, first + 3]
        experts.use(first, first + 1, ahead=ahead, during=lambda part: {*part} <= {*experts.kept()} or 1 / 0)
        experts.use(*ahead)
    assert counts(experts) == (8, 8, 0)
    assert len(experts.places().places) == 4
    experts = guessing(places=3)
    for first in range(7):
        experts.use(
            first,
            (first + 1) % 8,
            ahead=[*range(8)],
            during=lambda _: experts.cache.nbytes <= experts.cache.budget or 1 / 0,
        )
    assert experts.cache.guesses.made > 0
    assert experts.are_free()


def test_an_error_of_a_guess_is_raised_only_if_the_expert_is_needed(guessing):
    experts = guessing(places=6)
    experts.use(0)
    read, failing = experts.offloader.source.read, {"is_on": True}

    def fail(wanted, target):
        if failing["is_on"]:
            raise CheckpointError("The disk fails.", fix="check the disk")
        read(wanted, target)

    experts.offloader.source.read = fail
    experts.use(0, ahead=[1, 2])
    while not all(each.contents is None or each.contents.ticket.is_done for each in experts.places().places):
        pass
    experts.use(0)
    with pytest.raises(CheckpointError, match="The disk fails"):
        experts.use(1)
    failing["is_on"] = False
    experts.use(1, 2)
    assert experts.are_free()


def test_nothing_is_guessed_where_reads_are_buffered_or_the_offloader_is_closed(build_experts):
    experts = build_experts(places=6, mode="buffered")
    experts.use(0, ahead=[1, 2])
    assert experts.cache.guesses.made == 0
    experts.offloader.source.mode = "direct"
    experts.offloader.close()
    experts.use(0, ahead=[1, 2])
    assert experts.cache.guesses.made == 0


def test_token_ids_are_the_integers_of_a_call():
    ids = torch.tensor([[1, 2]])
    assert token_ids((ids,), {}) is ids
    assert token_ids((), {"input_ids": ids}) is ids
    assert token_ids((), {"inputs_embeds": ids}) is None
    assert token_ids((torch.zeros(1, 2, 3),), {}) is None


WITH_INDICES = [
    next(scheme for scheme in SCHEMES if scheme.model == model)
    for model in ("qwen3", "mixtral", "qwen2", "gpt-oss")
]


def offloaded(path, block="mlp", size="1MB"):
    """Loads a model with all experts on disk, which guesses also where reads are buffered."""
    layers = {f"model.layers.{layer}.{block}.experts": "disk" for layer in range(moe_models.LAYERS)}
    model = load(path, {"": "cpu", **layers}, expert_cache_size=size)
    model.hf_quantizer.loading.offloader.experts._may_guess = lambda: True
    return model, model.hf_quantizer.loading.offloader.experts


def test_a_budget_of_0_still_reads_the_next_layer_ahead(tmp_path):
    scheme = moe_models.BY_EXPERT
    path = moe_models.write(scheme, is_quantized(scheme)).save(tmp_path)
    model, experts = offloaded(path, size=0)
    (places,) = experts._places.values()
    assert experts.budget == 2 * moe_models.CHOSEN * places.memory.place_nbytes
    resident = load(path)
    for token in IDS.flatten():
        ids = token.view(1, 1)
        assert torch.equal(logits(model, ids), logits(resident, ids))
        assert experts.nbytes <= experts.budget
    assert 0 < experts.guesses.used <= experts.guesses.made


def test_a_prompt_reads_each_expert_once_and_those_of_the_next_layer_in_runs(tmp_path):
    path = moe_models.save_wide(tmp_path, num_experts=64, num_experts_per_tok=8)
    layers = {f"model.layers.{layer}.mlp.experts": "disk" for layer in range(moe_models.LAYERS)}
    model = load(path, {"": "cpu", **layers}, expert_cache_size="16MB", disk_io="direct")
    offloader, filled = model.hf_quantizer.loading.offloader, []
    if offloader.source.mode != "direct":
        pytest.skip("the file system has no direct reads")
    experts, counters = offloader.experts, offloader.source.reader.counters
    (places,) = experts._places.values()
    fill = places.memory.fill
    places.memory.fill = lambda number, expert: (filled.append(expert), fill(number, expert))[1]
    counters.calls = counters.bytes_read = 0
    ids = torch.arange(1, 61)[None]
    found = logits(model, ids)
    for place in places.places:
        if place.contents is not None and not place.contents.ticket.is_cancelled:
            place.contents.ticket.wait()
    assert torch.equal(found, logits(load(path), ids))
    assert len(filled) == len(set(filled)) > 64
    assert experts.guesses.used > 8
    requests = sum(len(expert.chunks) for expert in filled)
    assert counters.calls < requests / 2
    assert counters.bytes_read <= sum(expert.layout.read_nbytes for expert in filled)


@pytest.mark.parametrize("scheme", WITH_INDICES, ids=lambda scheme: scheme.id)
def test_outputs_are_those_of_the_resident_model_and_all_that_is_read_is_counted(scheme, tmp_path):
    path = moe_models.write(scheme, is_quantized(scheme)).save(tmp_path)
    model, experts = offloaded(path)
    resident = load(path)
    for ids in (IDS, IDS[:, :1], IDS[:, 2:3]):
        assert torch.equal(logits(model, ids), logits(resident, ids))
    assert experts.guesses.made > 0
    size = experts.experts[0].layout.needed_nbytes
    assert experts.guesses.used + experts.guesses.wasted_nbytes / size <= experts.guesses.made


def test_routers_are_recorded_as_often_as_without_lookahead(tmp_path):
    scheme = moe_models.BY_EXPERT
    path = moe_models.write(scheme, is_quantized(scheme)).save(tmp_path)
    model, experts = offloaded(path)
    with torch.no_grad():
        found = model(IDS, output_router_logits=True).router_logits
        expected = load(path)(IDS, output_router_logits=True).router_logits
    assert experts.guesses.made > 0
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_a_router_that_trains_or_returns_no_indices_guesses_nothing(tmp_path):
    scheme = next(each for each in SCHEMES if each.model == "llama4")
    model, experts = offloaded(
        moe_models.write(scheme, is_quantized(scheme)).save(tmp_path / "llama4"), "feed_forward"
    )
    logits(model, IDS)
    assert experts.guesses.made == 0
    model, experts = offloaded(moe_models.write(moe_models.BY_EXPERT).save(tmp_path / "qwen3"))
    model.train()
    logits(model, IDS)
    assert experts.guesses.made == 0


def test_a_router_that_fails_on_a_guess_changes_no_forward_pass(tmp_path, monkeypatch, caplog):
    path = moe_models.write(moe_models.BY_EXPERT).save(tmp_path / "qwen3")
    model, experts = offloaded(path)
    expected, guessed = logits(model, IDS), experts.guesses.made
    assert guessed > 0
    router = type(model.model.layers[1].mlp.gate)

    def fails(*_):
        raise ValueError("a router of custom code")

    for layer in model.model.layers:  # its own calls do not look the method up in the class
        layer.mlp.gate.forward = layer.mlp.gate.forward
    monkeypatch.setattr(router, "forward", fails)
    caplog.set_level("WARNING", "hfq")
    monkeypatch.setattr(logging.getLogger("hfq"), "propagate", True)
    for _ in range(2):
        assert torch.equal(logits(model, IDS), expected)
    assert experts.guesses.made == guessed
    assert [record.message for record in caplog.records].count(
        f"hfq: {router.__name__} cannot guess experts ahead: a router of custom code"
    ) == 1
