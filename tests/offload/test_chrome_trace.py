"""Chrome trace JSON: one event per span, in order, on named tracks without overlaps."""

import itertools
import json
import random

from hfq.offload.chrome_trace import chrome_trace
from hfq.offload.spans import TRACKS, Span

SPANS = [
    Span("compute", "layers.1", 0.003, 0.006),
    Span("read", "layers.2", -0.001, 0.005, 2000),
    Span("pass", "", 0.0, 0.010),
    Span("read", "layers.3", 0.004, 0.0065, 4000),
    Span("copy", "layers.1", 0.001, 0.002, 500),
    Span("other", "embed", 0.001, 0.002),
    Span("wait", "layers.1", 0.002, 0.003),
]


def events_of(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def tracks_of(trace):
    return {
        event["tid"]: event["args"]["name"]
        for event in events_of(trace, "M")
        if event["name"] == "thread_name"
    }


def test_every_span_is_one_event_with_its_times_in_microseconds():
    trace = json.loads(json.dumps(chrome_trace(SPANS)))
    events = events_of(trace, "X")
    assert len(events) == len(SPANS)
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [
        ("layers.2", 0, 6000),
        ("pass", 1000, 10000),
        ("layers.1", 2000, 1000),
        ("embed", 2000, 1000),
        ("layers.1", 3000, 1000),
        ("layers.1", 4000, 3000),
        ("layers.3", 5000, 2500),
    ]
    assert [event["args"] for event in events if event["cat"] in ("read", "copy")] == [
        {"nbytes": 2000},
        {"nbytes": 500},
        {"nbytes": 4000},
    ]
    assert {event["pid"] for event in trace["traceEvents"]} == {1}


def test_tracks_are_named_and_overlapping_spans_get_tracks_of_their_own():
    trace = chrome_trace(SPANS)
    tracks = tracks_of(trace)
    assert list(tracks.values()) == ["pass", "read", "read 2", "copy", "wait", "compute"]
    assert [(tracks[event["tid"]], event["cat"]) for event in events_of(trace, "X")] == [
        ("read", "read"),
        ("pass", "pass"),
        ("copy", "copy"),
        ("compute", "other"),
        ("wait", "wait"),
        ("compute", "compute"),
        ("read 2", "read"),
    ]


def test_events_are_in_order_and_no_two_of_one_track_overlap():
    numbers = random.Random(0)
    starts = [numbers.uniform(-1, 1) for _ in range(500)]
    spans = [
        Span(numbers.choice(list(TRACKS)), "a", start, start + numbers.expovariate(20)) for start in starts
    ]
    spans += [Span("wait", "next", span.end, span.end + 1e-6) for span in spans]  # begins where another ends
    trace = chrome_trace(spans)
    events = events_of(trace, "X")
    assert len(events) == len(spans)
    assert all(event["dur"] >= 0 for event in events)
    assert all(one["ts"] <= other["ts"] for one, other in itertools.pairwise(events))
    for track in tracks_of(trace):
        own = [event for event in events if event["tid"] == track]
        assert own
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in itertools.pairwise(own))
        assert all(float(1000 * event[time]).is_integer() for event in own for time in ("ts", "dur"))


def test_an_empty_recording_is_an_empty_trace():
    assert events_of(chrome_trace([]), "X") == []


def test_the_spans_of_each_of_several_devices_have_tracks_of_their_own():
    spans = [Span("copy", "a", 0.0, 2.0, 1, f"cuda:{index}") for index in (1, 0)]
    spans += [Span("copy", "b", 1.0, 3.0, 1, "cuda:0"), Span("pass", "", 0.0, 3.0, 0, "cuda:0")]
    assert list(tracks_of(chrome_trace(spans)).values()) == [
        "pass",
        "copy cuda:0",
        "copy cuda:0 2",
        "copy cuda:1",
    ]
