from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.engine.timeline import Event, SlotSummary, Timeline

EVENTS = [
    Event("d1", 1, 0, "recv.x", "recv", 11.5, 12.0, 100),
    Event("d1", 1, 0, "recv.x", "wait", 10.0, 12.0),
    Event("d0", 0, 0, "d0.0", "compute", 10.0, 11.0),
    Event("d0", 0, 0, "send.x", "send", 11.0, 12.0, 100),
    Event("d0", 0, 1, "d0.0", "compute", 11.0, 12.5),
    Event("d0", 0, 1, "sum", "collective", 11.5, 13.0, 50),
]


def test_events_stand_in_the_order_of_their_start() -> None:
    assert [event.start for event in Timeline.of(EVENTS).events] == sorted(
        event.start for event in EVENTS
    )


def test_summary() -> None:
    assert Timeline.of(EVENTS).summary() == [
        SlotSummary("d0", 0, calls=2, compute=2.5, communication=2.0, waiting=0.0, sent=150),
        SlotSummary("d1", 1, calls=1, compute=0.0, communication=0.5, waiting=2.0, sent=0),
    ]


def test_an_empty_timeline() -> None:
    assert Timeline.of([]).summary() == []


def test_chrome_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    Timeline.of(EVENTS).save_chrome_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = [event for event in events if event["ph"] == "M"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {(e["pid"], e["args"]["name"]) for e in names if e["name"] == "process_name"} == {
        (0, "rank 0: d0"),
        (1, "rank 1: d1"),
    }
    assert len(spans) == len(EVENTS)
    send = next(event for event in spans if event["cat"] == "send")
    assert (send["name"], send["ts"], send["dur"]) == ("send.x", 1e6, 1e6)
    assert send["args"] == {"call": 0, "bytes": 100}
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    Timeline.of(EVENTS).save_chrome_trace(path)
    before = path.read_text()

    def fill_the_disk(self: Path, content: bytes) -> None:
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        Timeline.of(EVENTS[:1]).save_chrome_trace(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
