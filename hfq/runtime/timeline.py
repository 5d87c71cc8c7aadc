"""Timeline of reads, copies, waits, and computation while a model runs."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from hfq.loading.loaded_model import loader_of
from hfq.loading.model_loader import ModelLoader
from hfq.offload.chrome_trace import chrome_trace
from hfq.offload.recorder import Recorder, recording
from hfq.offload.spans import Span
from hfq.output_file import write_output_file
from hfq.runtime.predicted_speed import takes_tokens

__all__ = ["Timeline", "measure_timeline", "timeline"]


@dataclass
class Timeline:
    """Recording of a model; empty until the recording ends.

    Attributes:
        spans: Intervals sorted by start, in seconds since the recording began.
        units: Names of the offloaded units, in model order.
    """

    spans: list[Span] = field(default_factory=list)
    units: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns the timeline as JSON-ready data."""
        return {"units": list(self.units), "spans": [asdict(span) for span in self.spans]}

    def save_trace(self, path: str | os.PathLike) -> None:
        """Writes all spans as Chrome trace JSON, which Perfetto (https://ui.perfetto.dev) opens.

        Raises:
            SetupError: The file cannot be written. An old file keeps its content.
        """
        write_output_file(path, json.dumps(chrome_trace(self.spans)) + "\n")


@contextlib.contextmanager
def timeline(model: nn.Module) -> Iterator[Timeline]:
    """Records a model that hfq loaded, inside a `with` statement.

    Nothing is recorded outside of it.

        with hfq.timeline(model) as timeline:
            model(tokens)
        hfq.report(model, timeline=timeline).save("run.json")

    Embeddings that are read by row appear as modules that are not offloaded. Their reads are not recorded.

    Raises:
        SetupError: hfq did not load the model, or it is being recorded already.
    """
    loading, found = loader_of(model), Timeline()
    with _recorder(loading) as recorder, _hooked(loading, recorder):
        yield found
    found.spans = recorder.spans()
    found.units = [] if loading.offloader is None else [unit.name for unit in loading.offloader.units]


def measure_timeline(loading: ModelLoader) -> Timeline | None:
    """Records one forward pass of one token, after a first pass that is not recorded.

    Returns None for a model that requires more inputs, or that ranks share.
    """
    model = loading.model
    if type(loading) is not ModelLoader or not takes_tokens(model):
        return None
    tokens = torch.zeros(1, 1, dtype=torch.long, device=loading.main)
    with torch.inference_mode():
        model(tokens)
        with timeline(model) as found:
            float(model(tokens)[0].flatten()[0])  # waits for an accelerator
    return found


@contextlib.contextmanager
def _recorder(loading: ModelLoader) -> Iterator[Recorder]:
    if loading.offloader is not None:
        with recording(loading.offloader) as recorder:
            yield recorder
        return
    yield Recorder(torch.device(loading.main))


@contextlib.contextmanager
def _hooked(loading: ModelLoader, recorder: Recorder) -> Iterator[None]:
    """Records forward passes of the whole model, and of modules that are not offloaded."""
    handles = [*_noted(loading.model, "pass", "", recorder, torch.device(loading.main))]
    streamed = set() if loading.offloader is None else {unit.module for unit in loading.offloader.units}
    try:
        for name, module in _units("", loading.model, set(loading.model._no_split_modules or ())):
            if module not in streamed:
                handles += _noted(module, "other", name, recorder, loading.execution_device_of(name))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _noted(module: nn.Module, track: str, name: str, recorder: Recorder, device: torch.device) -> list[Any]:
    begun: dict[int, Any] = {}
    recorder.clock(device)  # made here, since it waits for the device

    def begin(*_: object) -> None:
        begun[threading.get_ident()] = recorder.stamp(device)

    def end(*_: object) -> None:
        if threading.get_ident() in begun:
            recorder.note_computed(track, name, begun.pop(threading.get_ident()), device)

    return [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]


def _units(name: str, module: nn.Module, whole: set[str]) -> Iterable[tuple[str, nn.Module]]:
    """Yields the decoder layers and leaves of a model.

    `find_offload_units` uses the same modules as units if they are offloaded.
    """
    children = list(module.named_children())
    if type(module).__name__ in whole or not children:
        if next(module.parameters(), None) is not None:
            yield name, module
        return
    for local, child in children:
        yield from _units(f"{name}.{local}" if name else local, child, whole)
