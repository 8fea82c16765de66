"""Memory over the course of a train step, from the profiler's record of every allocation.

TensorFlow's allocator tells the profiler about each block that it hands out or takes back, with
the bytes then in use. So the curve is the allocator's own, and its maximum is the reported peak.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from keras_ckpt.memory.naming import MARK, Phase, Place

TRAIN_STEP = f"{MARK}train step"
_ALLOCATION = "MemoryAllocation"
_BLOCKS = {_ALLOCATION, "MemoryDeallocation"}
# Into how many parts a train step is cut to tell its phases.
_BINS = 240
# Phases are told from this many parts before and after as well.
_INTERLUDE = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One block of memory handed out or taken back.

    Attributes:
        seconds: since the train step began.
        bytes: in use from then on, above resting memory.
        change: the size of the block in bytes, negative if it was taken back.
        operation: TensorFlow's name, within its step, of the operation that the block was for.
        step: the model's step that the block was for; "" for loss, metrics and optimizer.
        segment: the index of the plan's segment that the step is in; None outside of segments.
        phase: what the train step was doing: "forward", "recompute", "backward" or "update".
        address: where the block begins.
    """

    seconds: float
    bytes: int
    change: int
    operation: str
    step: str
    segment: int | None
    phase: Phase
    address: int


@dataclass(frozen=True)
class Span:
    """A time in which a train step was in one phase and, if recomputing, in one segment."""

    phase: Phase
    segment: int | None
    start: float
    stop: float


@dataclass(frozen=True)
class _Event:
    """An event on one thread: a block of memory, or the beginning or the end of a mark."""

    nanoseconds: float
    name: str
    details: Mapping[str, Any]


@contextmanager
def recording() -> Iterator[list[_Event]]:
    """Records the allocator's events during the block.

    Yields:
        a list that holds the events, in order, once the block has ended.

    Raises:
        RuntimeError: if TensorFlow's profiler is already at work.
    """
    events: list[_Event] = []
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=3, python_tracer_level=0, device_tracer_level=0
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            tf.profiler.experimental.start(folder, options=options)
        except tf.errors.AlreadyExistsError as error:
            raise RuntimeError(
                "The timeline needs TensorFlow's profiler, which is recording something else. "
                "Stop that (`tf.profiler.experimental.stop()`), or use `timeline=False`."
            ) from error
        try:
            yield events
        finally:
            tf.profiler.experimental.stop()
        for path in Path(folder).glob("**/*.xplane.pb"):
            events.extend(_read(path.read_bytes()))
    events.sort(key=lambda event: event.nanoseconds)


def make_timeline(
    events: Sequence[_Event],
    number: int,
    offset: int,
    device: str,
    place: Callable[[str, list[str]], Place],
    segments: Mapping[str, int],
) -> tuple[Row, ...]:
    """The timeline of one train step.

    Args:
        events: what `recording` recorded.
        number: the number of the train step among those recorded.
        offset: bytes that the allocator counted as in use when the step began.
        device: the device, such as "CPU:0".
        place: tells the place of an operation from its name and the marks that it lies in.
        segments: the index of the segment that each step is in.
    """
    step = _events_of_step(events, number)
    replay = _Replay(step[0].nanoseconds, offset, place, segments)
    for event in step[1:]:
        if event.name.startswith(MARK):
            replay.mark(event)
        elif _is_of(device, event):
            replay.block(event)
    return tuple(replay.rows)


class _Replay:
    """Goes through the events of one train step, knowing which blocks are held for what."""

    def __init__(
        self,
        start: float,
        offset: int,
        place: Callable[[str, list[str]], Place],
        segments: Mapping[str, int],
    ) -> None:
        self.rows: list[Row] = []
        self._start = start
        self._offset = offset
        self._place = place
        self._segments = segments
        self._blocks: dict[int, Place] = {}
        self._marks: list[str] = []
        self._phase: Phase = ""

    def mark(self, event: _Event) -> None:
        """Enters or leaves a mark; they are nested, as they come from one thread."""
        if event.details["ends"]:
            self._marks.pop()
        else:
            self._marks.append(event.name.removeprefix(MARK))

    def block(self, event: _Event) -> None:
        """Adds the row of a block handed out or taken back."""
        address, size = event.details["addr"], event.details["allocation_bytes"]
        if event.name == _ALLOCATION:
            place = self._place(event.details.get("tf_op", ""), self._marks)
            self._blocks[address] = place
            self._phase = place.phase
        else:
            place, size = self._blocks.pop(address, Place()), -size
        self.rows.append(
            Row(
                seconds=(event.nanoseconds - self._start) / 1e9,
                bytes=event.details["bytes_allocated"] - self._offset,
                change=size,
                operation=place.operation,
                step=place.step,
                segment=self._segments.get(place.step),
                phase=self._phase,
                address=address,
            )
        )


def spans_of(rows: Sequence[Row]) -> list[Span]:
    """The phases that a train step went through, told by what most of the new memory was for.

    Operations run at the same time, and a gradient's first operations as soon as they can, so the
    phases overlap. The forward pass is said to last until its last step has run, and an interlude
    in the backward pass that is very short belongs to what goes on around it.
    """
    made = [row for row in rows if row.change > 0 and row.phase]
    forward = [row.seconds for row in made if row.phase == "forward" and row.step]
    turn = max(forward, default=0.0)
    width = max((row.seconds for row in rows), default=0.0) / _BINS or 1.0
    bins: dict[int, Counter[tuple[Phase, int | None]]] = {}
    for row in made:
        if row.seconds > turn and row.phase != "forward":
            segment = row.segment if row.phase == "recompute" else None
            for near in range(-_INTERLUDE, _INTERLUDE + 1):
                number = int(row.seconds / width) + near
                bins.setdefault(number, Counter())[row.phase, segment] += row.change
    spans = [Span("forward", None, 0.0, turn)] if forward else []
    for number, sizes in sorted(bins.items()):
        if turn <= (number + 1) * width <= (_BINS + 1) * width:
            _extend(spans, *sizes.most_common(1)[0][0], stop=(number + 1) * width)
    return spans


def _extend(spans: list[Span], phase: Phase, segment: int | None, stop: float) -> None:
    """Lengthens the last span, or adds one, so that there is no gap."""
    start = spans[-1].stop if spans else 0.0
    if spans and (spans[-1].phase, spans[-1].segment) == (phase, segment):
        start = spans.pop().start
    spans.append(Span(phase, segment, start, stop))


def held_at_peak(rows: Sequence[Row]) -> list[Row]:
    """The blocks that were handed out during the step and in use when most memory was."""
    held: dict[int, Row] = {}
    peak = max((row.bytes for row in rows), default=0)
    for row in rows:
        if row.change > 0:
            held[row.address] = row
        else:
            held.pop(row.address, None)
        if row.bytes == peak:
            break
    return list(held.values())


def _events_of_step(events: Sequence[_Event], number: int) -> Sequence[_Event]:
    """The events from the beginning to the end of one train step, its beginning included."""
    limits = [
        i
        for i, event in enumerate(events)
        if event.name == TRAIN_STEP and event.details["step_num"] == number
    ]
    return events[limits[0] : limits[1]]


def _read(trace: bytes) -> Iterator[_Event]:
    """The events of a recorded trace that tell of blocks of memory or of our marks."""
    space = xplane_pb2.XSpace()
    space.ParseFromString(trace)
    for plane in space.planes:
        names = {
            key: metadata.name
            for key, metadata in plane.event_metadata.items()
            if metadata.name in _BLOCKS or metadata.name.startswith(MARK)
        }
        for line in plane.lines:
            for event in line.events:
                if event.metadata_id in names:
                    name, details = names[event.metadata_id], _details(plane, event)
                    start = line.timestamp_ns + event.offset_ps / 1e3
                    if name in _BLOCKS:
                        yield _Event(start, name, details)
                    else:
                        yield _Event(start, name, {**details, "ends": False})
                        stop = start + event.duration_ps / 1e3
                        yield _Event(stop, name, {**details, "ends": True})


def _details(plane: Any, event: Any) -> dict[str, Any]:
    details = {}
    for stat in event.stats:
        value = getattr(stat, stat.WhichOneof("value"))
        if stat.HasField("ref_value"):
            value = plane.stat_metadata[value].name
        details[plane.stat_metadata[stat.metadata_id].name] = value
    return details


def _is_of(device: str, event: _Event) -> bool:
    """Whether a block belongs to a device: allocators are named `GPU_0_bfc`, `bfc_cpu_...`."""
    kind, number = device.split(":")
    prefix = "bfc_cpu" if kind == "CPU" else f"{kind}_{number}_bfc"
    return str(event.details["allocator_name"]).startswith(prefix)
