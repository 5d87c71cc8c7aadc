"""Spans as Chrome trace JSON, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterable
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

    Viewers drop events that overlap on one track. Such spans get further tracks: "read 2", "read 3".

    Args:
        spans: The spans of a recording, in any order. The first one starts at 0 in the trace.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    names: list[str] = []
    events: list[dict[str, Any]] = []
    for track in dict.fromkeys(_TRACKS.values()):
        in_track = [span for span in ordered if _TRACKS[span.track] == track]
        levels = overlap_levels(in_track)
        for span, level in zip(in_track, levels, strict=True):
            events.append(_complete_event(span, ordered[0].start, thread_id=len(names) + level + 1))
        names += [f"{track} {level + 1}" if level else track for level in range(max(levels, default=-1) + 1)]
    events.sort(key=lambda event: event["ts"])
    threads = [_metadata_event("thread_name", name, thread_id) for thread_id, name in enumerate(names, 1)]
    return {
        "traceEvents": [_metadata_event("process_name", "hfq"), *threads, *events],
        "displayTimeUnit": "ms",
    }


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
