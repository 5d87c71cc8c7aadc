"""Spans as Chrome trace JSON, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hfq.offload.spans import Span, overlap_levels

__all__ = ["chrome_trace"]

_PROCESS_ID = 1
_TRACKS = {
    "pass": "pass",
    "read": "read",
    "copy": "copy",
    "wait": "wait",
    "compute": "compute",
    "other": "compute",
}
"""The track of each kind of span, in the order of the trace."""


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Returns a trace with one complete event per span, in the order of their starts.

    Viewers drop events that overlap on one track. Such spans get further tracks: "read 2", "read 3". If spans
    of a kind are of several devices, each device has a track: "copy sim:0", "copy sim:1".

    Args:
        spans: The spans of a recording, in any order. The first one starts at 0 in the trace.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    names: list[str] = []
    events: list[dict[str, Any]] = []
    for track, in_track in _by_track(ordered).items():
        levels = overlap_levels(in_track)
        for span, level in zip(in_track, levels, strict=True):
            events.append(_complete_event(span, ordered[0].start, thread_id=len(names) + level + 1))
        names += [f"{track} {level + 1}" if level else track for level in range(max(levels) + 1)]
    events.sort(key=lambda event: event["ts"])
    threads = [_metadata_event("thread_name", name, thread_id) for thread_id, name in enumerate(names, 1)]
    return {
        "traceEvents": [_metadata_event("process_name", "hfq"), *threads, *events],
        "displayTimeUnit": "ms",
    }


def _by_track(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Returns the spans of each track, one for each device of a kind of spans."""
    found: dict[str, list[Span]] = {}
    for track in dict.fromkeys(_TRACKS.values()):
        own = [span for span in spans if _TRACKS[span.track] == track]
        devices = dict.fromkeys(sorted(span.device for span in own))
        for device in devices:
            name = f"{track} {device}".rstrip() if len(devices) > 1 else track
            found[name] = [span for span in own if span.device == device]
    return found


def _complete_event(span: Span, origin: float, thread_id: int) -> dict[str, Any]:
    start, end = _microseconds(span.start - origin), _microseconds(span.end - origin)
    return {
        "name": span.name or span.track,
        "cat": span.track,
        "ph": "X",
        "ts": start,
        "dur": end - start,
        "pid": _PROCESS_ID,
        "tid": thread_id,
        "args": {"nbytes": span.nbytes} if span.nbytes else {},
    }


def _metadata_event(kind: str, name: str, thread_id: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS_ID, "tid": thread_id, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    """Returns a multiple of 1/8 µs: exact in binary, so no rounding makes neighbors overlap."""
    return round(seconds * 8e6) / 8
