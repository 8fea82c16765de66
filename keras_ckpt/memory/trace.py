"""The timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One track counts the bytes in use; others show the phases, the segments that are recomputed, and
every block of memory from when it is handed out to when it is taken back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras_ckpt.memory.report import Report, require_timeline
from keras_ckpt.memory.timeline import Row, spans_of

_PHASES, _SEGMENTS = 1, 2
_PROCESS = 1
Entry = dict[str, Any]


def write_trace(report: Report, path: str | Path) -> None:
    """Writes a report's timeline as a trace in Chrome's JSON format.

    Args:
        report: the report, with a timeline.
        path: the file; an existing one is replaced.

    Raises:
        ValueError: if the report has no timeline.
    """
    require_timeline(report)
    entries = [
        *_names(report),
        *_counters(report),
        *_slices(report),
        *_blocks(report),
        _peak(report),
    ]
    trace = {"traceEvents": entries, "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


def _names(report: Report) -> Iterator[Entry]:
    title = f"{report.model} ({report.mode} mode, {report.device})"
    yield _entry("process_name", "M", 0.0, args={"name": title})
    yield _entry("thread_name", "M", 0.0, tid=_PHASES, args={"name": "phase"})
    yield _entry("thread_name", "M", 0.0, tid=_SEGMENTS, args={"name": "segment recomputed"})


def _counters(report: Report) -> Iterator[Entry]:
    """The bytes in use: above resting memory, and resting memory itself."""
    resting = report.resting_bytes
    yield _entry("memory (bytes)", "C", 0.0, args={"resting": resting, "train step": 0})
    for row in report.timeline:
        in_use = {"resting": resting, "train step": row.bytes}
        yield _entry("memory (bytes)", "C", row.seconds, args=in_use)


def _blocks(report: Report) -> Iterator[Entry]:
    """A slice for each block of memory, from when it was handed out to when it was taken back."""
    given: dict[int, Row] = {}
    end = report.timeline[-1].seconds
    released = []
    for row in report.timeline:
        if row.change > 0:
            given[row.address] = row
        elif row.address in given:
            released.append((given.pop(row.address), row.seconds))
    released.extend((row, end) for row in given.values())
    for number, (row, stop) in enumerate(released):
        args = {"bytes": row.change, "operation": row.operation, "phase": row.phase}
        name, track = f"{row.step or row.operation or 'block'}", f"{number}"
        # Blocks overlap without nesting, so each is a pair of asynchronous events.
        yield _entry(name, "b", row.seconds, cat="block", id=track, args=args)
        yield _entry(name, "e", stop, cat="block", id=track)


def _slices(report: Report) -> Iterator[Entry]:
    """A slice for each phase, and one for each segment that is recomputed."""
    for span in spans_of(report.timeline):
        duration = (span.stop - span.start) * 1e6
        yield _entry(span.phase, "X", span.start, tid=_PHASES, dur=duration)
        if span.segment is not None:
            name = f"segment {span.segment}"
            yield _entry(name, "X", span.start, tid=_SEGMENTS, dur=duration)


def _peak(report: Report) -> Entry:
    peak = max(report.timeline, key=lambda row: row.bytes)
    args = {"bytes above resting": peak.bytes, "step": peak.step, "phase": peak.phase}
    return _entry("peak", "i", peak.seconds, s="p", args=args)


def _entry(name: str, kind: str, seconds: float, tid: int = 0, **more: Any) -> Entry:
    """One event of the format: times are in microseconds."""
    return {"name": name, "ph": kind, "ts": seconds * 1e6, "pid": _PROCESS, "tid": tid, **more}
