"""Predicted and measured speed of a loaded model."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from hfq.loading.dry_run import count_calls, count_products, routed_share
from hfq.loading.kv_layers import kv_layers
from hfq.loading.model_loader import ModelLoader
from hfq.offload.experts.expert_cache import ExpertCache
from hfq.offload.unit import is_on_disk
from hfq.placement.device_map import ancestors
from hfq.placement.estimate.estimate import list_stages
from hfq.placement.estimate.kv_cache import kv_nbytes
from hfq.placement.estimate.profile import Profile, read_profile
from hfq.placement.estimate.roofline import TERMS, Prediction, Work, predict
from hfq.runtime.record_routing import Routing

__all__ = ["ExpertHits", "SpeedReport", "expert_hits", "predict_step", "report_speed", "takes_tokens"]

_STEPS = 3


@dataclass(frozen=True)
class ExpertHits:
    """Share of routed experts that the expert cache holds.

    Attributes:
        share: The share.
        source: What tells it: even routing, recorded routing, or hits that were measured.
    """

    share: float
    source: str

    def __str__(self) -> str:
        return f"{self.share:.0%} of the routed experts of a token are hits, {self.source}"


@dataclass(frozen=True)
class SpeedReport:
    """Predicted and measured seconds of a load and of a step of one token.

    Attributes:
        load_predicted_seconds: Seconds of a load that reads the same bytes as this load.
        load_achieved_seconds: Seconds from the meta model to the placed model.
        step_predicted_seconds: Seconds of one token with a short context; None if unknown.
        step_achieved_seconds: Median of three measurements in seconds; None if not measured.
        dominant: Term that takes most of the predicted step.
        source: Origin of the rates: `measured` by `hfq profile-machine`, or limits from hardware standards.
        expert_hits: Hits of the expert cache in the predicted step; None if no experts are offloaded.
    """

    load_predicted_seconds: float
    load_achieved_seconds: float
    step_predicted_seconds: float | None
    step_achieved_seconds: float | None
    dominant: str
    source: str
    expert_hits: ExpertHits | None = None

    def __str__(self) -> str:
        achieved = (
            "not measured"
            if self.step_achieved_seconds is None
            else f"achieved {1 / self.step_achieved_seconds:.3g} tokens/s"
        )
        predicted = (
            "not predicted"
            if self.step_predicted_seconds is None
            else f"predicted {1 / self.step_predicted_seconds:.3g} tokens/s"
        )
        hits = "" if self.expert_hits is None else f"\nexpert cache: {self.expert_hits}"
        return (
            f"load: predicted {self.load_predicted_seconds:.3g} s, "
            f"achieved {self.load_achieved_seconds:.3g} s\n"
            f"one token: {predicted}, {achieved}; decided by {self.dominant}\n"
            f"rates: {self.source}{hits}"
        )


def report_speed(
    loading: ModelLoader,
    measure: bool = False,
    profile: Profile | None = None,
    routing: Routing | None = None,
) -> SpeedReport | None:
    """Returns predicted and measured seconds; None for a model that ranks share.

    Args:
        loading: The load of the model.
        measure: True also runs the model on one token, three times.
        profile: Rates of the machine. None reads the machine profile of `hfq profile-machine`, or uses limits
            from hardware standards.
        routing: Recorded routing, see `expert_hits`.

    Raises:
        SetupError: The machine profile cannot be read, or the routing is another model's.
    """
    if type(loading) is not ModelLoader or loading.load_seconds is None:
        return None
    rates = read_profile() if profile is None else profile
    prediction = predict_step(loading, rates, routing=routing)
    where = f" on {rates.machine.get('processor', 'an unnamed processor')}" if rates.is_measured else ""
    return SpeedReport(
        prediction.load_seconds,
        loading.load_seconds,
        prediction.known_seconds,
        _time_step(loading) if measure else None,
        TERMS[prediction.dominant],
        prediction.source + where,
        expert_hits(loading, routing),
    )


def predict_step(
    loading: ModelLoader,
    profile: Profile,
    rows: int = 1,
    context: int = 0,
    routing: Routing | None = None,
) -> Prediction:
    """Predicts the seconds of a load, and of one forward pass of the loaded model.

    Args:
        loading: The load of the model.
        profile: Rates of the machine.
        rows: Number of tokens that the forward pass computes.
        context: Number of tokens in the KV cache; 0 for a cache that is too small to count.
        routing: Recorded routing, see `expert_hits`.

    Raises:
        SetupError: The routing is another model's.
    """
    work = _work(loading, expert_hits(loading, routing))
    cache = 0
    if context:
        dtype = str(loading.model.dtype).removeprefix("torch.")
        cache = kv_nbytes(kv_layers(loading.model)[0], 1, context, dtype)
    return predict(replace(work, rows=rows, cache=cache), profile)


def expert_hits(loading: ModelLoader, routing: Routing | None = None) -> ExpertHits | None:
    """Returns the hits when a token is decoded; None if no experts are offloaded.

    Args:
        loading: The load of the model.
        routing: Recorded routing, from which hits are computed. None takes the hits of the tokens that this
            model has decoded; without any, those of even routing.

    Raises:
        SetupError: The routing is another model's.
    """
    if routing is not None:
        routing.check(loading.model)
    if loading.offloader is None or not loading.offloader.experts.experts:
        return None
    experts = loading.offloader.experts
    if routing is not None:
        return ExpertHits(routing.hit_rate(experts.share), f"computed from {routing}")
    if tokens := experts.decoding.tokens:
        return ExpertHits(experts.decoding.hit_rate, f"measured over {tokens} tokens")
    return ExpertHits(experts.share, "if routing is even: no token has been decoded")


def _work(loading: ModelLoader, hits: ExpertHits | None) -> Work:
    """Returns the work of one token of a loaded model, and of its load."""
    model = loading.model
    offloader = loading.offloader
    read = loading.read_report
    config = model.config.get_text_config(decoder=True)
    dtype, routed = str(model.dtype).removeprefix("torch."), routed_share(config)
    moved = 0 if offloader is None else offloader.pass_nbytes
    on_disk = min(moved, loading.plan.nbytes_by_device().get("disk", 0))
    on_demand = 0
    if offloader is not None and hits is not None:
        on_demand = int(routed * (1 - hits.share) * _nbytes_on_disk(offloader.experts))
    is_on_cpu = loading.main == "cpu"
    is_cached = offloader is not None and offloader.source.mode == "buffered"
    return Work(
        weights=count_products(model, dtype, routed),
        streamed=on_disk + on_demand,
        copied=0 if is_on_cpu else moved + on_demand,
        cache=0,
        rows=1,
        layers=int(getattr(config, "num_hidden_layers", 0)),
        stored_nbytes=read.populated + read.read,
        is_cached=is_cached,
        is_on_cpu=is_on_cpu,
        calls=count_calls(model, dtype, routed),
        stages=_stages(loading, routed),
        buffer=0 if offloader is None else offloader.buffer_nbytes,
        on_demand=on_demand,
    )


def _nbytes_on_disk(experts: ExpertCache) -> int:
    infos = (info for each in experts.experts if is_on_disk(each.modules[0]) for info in each.infos)
    return sum(info.nbytes for info in infos)


def _stages(loading: ModelLoader, routed: float) -> tuple[tuple[int, int], ...]:
    """Returns the stages of a loaded model; empty if nothing is offloaded."""
    if loading.offloader is None:
        return ()
    units = loading.gather_units()
    devices = {unit.name: loading.main for unit in units}
    for name, device in loading.devices.items():
        paths = (name, *reversed(ancestors(name)))
        own = next((path for path in paths if path in devices), None)  # experts lie within a decoder layer
        if own is not None:
            devices[own] = device
    return list_stages(units, devices, loading.main, routed)


def takes_tokens(model: PreTrainedModel) -> bool:
    """Returns True if token ids are the only input that a model requires."""
    return not model.config.is_encoder_decoder and getattr(model, "main_input_name", "") == "input_ids"


def _time_step(loading: ModelLoader) -> float | None:
    """Returns the seconds of a forward pass of one token; None if a model requires more inputs."""
    model = loading.model
    if not takes_tokens(model):
        return None
    tokens, seconds = torch.zeros(1, 1, dtype=torch.long, device=loading.main), []
    with torch.inference_mode():
        model(tokens)
        for _ in range(_STEPS):
            started = time.perf_counter()
            float(model(tokens)[0].flatten()[0])  # waits for an accelerator
            seconds.append(time.perf_counter() - started)
    return sorted(seconds)[_STEPS // 2]
