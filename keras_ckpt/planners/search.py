"""The best one-level plan within a limit, by a search over boundaries with exact live sets.

A plan is a row of items: plain steps and segments. Going through the row, all that the future
needs to know of the past is how many bytes are held for backward passes, and which of the
storages that are still to be read are among them (those cost nothing to whoever needs them
next: a long skip is charged once). That pair is a *label*. A label dominates another at the same
boundary if it could take on what the other holds and still hold no more and have cost no more
work. On a chain there are two kinds of label per boundary; each skip connection over the
boundary may double them, in theory. The weights of the next item are updated while the last step
of this one runs backward, so a label also has to leave room for their gradients.

This is a resource-constrained shortest path by label setting (Desrochers & Soumis 1988); a
backward sweep without live sets gives the most a label may hold and still finish, and cuts off
the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keras_ckpt.planners.lifetimes import Lifetimes
from keras_ckpt.planners.spans import Bytes, Spans, argument_bytes
from keras_ckpt.segment import Segment

_NEVER = np.iinfo(np.int64).max // 4  # more bytes than any limit


class _Label(NamedTuple):
    """One way to get to a boundary."""

    held: int  # bytes held for backward passes of the items so far
    work: float  # FLOPs to be recomputed for them
    charged: int = 0  # bit set of the storages among the held ones that will be read again
    entry: int = -_NEVER  # bytes in use when the first step of the last item runs backward
    start: int = -1  # where the last item begins, if it is a segment
    before: _Label | None = None  # the label that the last item was added to


class OneLevelSearch:
    """Finds plans without nesting for one model, for any number of limits.

    Args:
        spans: the tables of the model.
        allowed: [i, j] whether `[i, j)` may be a segment; all may by default.
    """

    def __init__(self, spans: Spans, allowed: NDArray[np.bool_] | None = None) -> None:
        self.spans = spans
        lifetimes = spans.lifetimes
        self._sizes = lifetimes.costs.storage_bytes
        steps = lifetimes.costs.steps
        own = np.array([*(step.weight_gradient_bytes for step in steps), 0], np.int64)
        # Whatever the next item is, its first step's weights are updated meanwhile.
        self._plain_backward = spans.plain_backward + own[1:]
        self._segment_backward = np.maximum(spans.segment_backward, spans.entry + own)
        if allowed is not None:
            self._segment_backward[~allowed] = _NEVER
        self._saved = [lifetimes.saved(step) for step in range(spans.steps)]
        self._residuals = [step.residual_bytes for step in steps]
        self._next_reads = _next_reads(lifetimes)
        self._live = _live_sets(lifetimes)
        self._bounds = _HeldBounds(spans, self._plain_backward, self._segment_backward)
        self._bytes_of: dict[int, int] = {0: 0}

    def find(
        self, limit: int, *, least_work: bool, width: int | None = None
    ) -> tuple[Segment, ...] | None:
        """A plan whose simulated peak is at most `limit` bytes, or None if none was found.

        Args:
            limit: bytes above resting memory.
            least_work: find the plan that recomputes fewest FLOPs, not just any.
            width: how many labels a boundary may keep, `self.width` by default. The search is
                exact as long as fewer are needed; beyond, some are dropped, evenly from those
                that hold least to those that hold most, and a plan may be missed.
        """
        width = width or self.width
        limit -= self.spans.lifetimes.costs.standing_bytes
        bounds = self._bounds.at(limit)
        labels: list[list[_Label]] = [[] for _ in range(self.spans.steps + 1)]
        labels[0].append(_Label(0, 0.0))
        for start in range(self.spans.steps):
            for label in self._undominated(start, labels[start], limit, least_work, width):
                self._add_plain_step(start, label, limit, bounds.after_step[start + 1], labels)
                self._add_segments(start, label, limit, bounds.after_segment, labels)
            labels[start] = []
        final = [label for label in labels[-1] if self._ends_within(label, limit)]
        if not final:
            return None
        return _segments(min(final, key=lambda label: label.work), self.spans.steps)

    @property
    def width(self) -> int:
        """How many labels a boundary may keep: 256, fewer above 200 steps to bound the time."""
        return min(256, 50_000 // max(self.spans.steps, 1) + 1)

    def least_possible(self) -> int:
        """Bytes below which no one-level plan can fit; a plan that fits them may not exist."""
        low, high = 0, 1
        while not self._bounds.at(high).possible:
            low, high = high + 1, 2 * high
        while low < high:
            middle = (low + high) // 2
            possible = self._bounds.at(middle).possible
            low, high = (low, middle) if possible else (middle + 1, high)
        return low + self.spans.lifetimes.costs.standing_bytes

    def _add_plain_step(
        self, step: int, label: _Label, limit: int, most: int, labels: list[list[_Label]]
    ) -> None:
        spans = self.spans
        new = [s for s in self._saved[step] if not label.charged >> s & 1]
        held = label.held + sum(self._sizes[s] for s in new) + self._residuals[step]
        forward = self._in_use(step, label) + spans.forward[step, step + 1]
        updating = label.entry + int(
            spans.weight_gradients[step + 1] - spans.weight_gradients[step]
        )
        backward = held + int(self._plain_backward[step])
        if held <= most and max(forward, backward, updating) <= limit:
            charged = label.charged
            for storage in new:
                charged |= 1 << storage
            charged &= self._live[step + 1]
            entry = held + int(spans.plain_backward[step])
            labels[step + 1].append(_Label(held, label.work, charged, entry, -1, label))

    def _add_segments(
        self, start: int, label: _Label, limit: int, most: Bytes, labels: list[list[_Label]]
    ) -> None:
        spans = self.spans
        room = limit - self._in_use(start, label)
        end = int(np.searchsorted(spans.forward[start, start + 1 :], room, "right")) + start + 1
        weights = spans.weight_gradients
        gap = limit - label.entry + weights[start]
        end = min(end, int(np.searchsorted(weights, gap, "right")))
        if end <= start + 1:
            return
        held = label.held + spans.arguments[start, start + 1 : end]
        for storage, reader, _ in self._next_reads[start]:
            if label.charged >> storage & 1:
                held[reader - start :] -= self._sizes[storage]
        fits = held + self._segment_backward[start, start + 1 : end] <= limit
        fits &= held <= most[start + 1 : end]
        for index in np.flatnonzero(fits).tolist():
            stop = start + 1 + index
            charged = label.charged & self._live[stop]
            for storage, reader, last in self._next_reads[start]:
                if reader < stop <= last:
                    charged |= 1 << storage
            work = label.work + float(spans.work[start, stop])
            after = int(held[index])
            entry = after + int(spans.entry[start, stop])
            labels[stop].append(_Label(after, work, charged, entry, start, label))

    def _in_use(self, boundary: int, label: _Label) -> int:
        """Bytes in memory at a boundary during the forward pass: held, or still to be read."""
        return label.held - self._bytes(label.charged) + int(self.spans.live[boundary])

    def _ends_within(self, label: _Label, limit: int) -> bool:
        """Whether the loss can make the gradients of the outputs."""
        steps = self.spans.steps
        return self._in_use(steps, label) + int(self.spans.gradients[steps]) <= limit

    def _undominated(
        self, boundary: int, labels: list[_Label], limit: int, least_work: bool, width: int
    ) -> list[_Label]:
        """The labels that may still lead to the best plan, those that hold least first."""
        fronts: dict[int, _Front] = defaultdict(_Front)
        kept: list[_Label] = []
        weights = self.spans.weight_gradients
        harmless = limit - int(weights[-1] - weights[boundary])  # leaves room for any update
        for label in sorted(labels, key=lambda label: (label.held, label.work)):
            work = label.work if least_work else 0.0
            entry = max(label.entry, harmless)
            alike = fronts.get(label.charged)  # most labels are dominated by one of their kind
            if alike is not None and alike.reaches(label.held, work, entry):
                continue
            if any(
                front.reaches(label.held - self._bytes(label.charged & ~charged), work, entry)
                for charged, front in fronts.items()
            ):
                continue
            fronts[label.charged].add(label.held, work, entry)
            kept.append(label)
        return _thin_out(kept, width) if len(kept) > width else kept

    def _bytes(self, charged: int) -> int:
        """The bytes of a bit set of storages."""
        total = self._bytes_of.get(charged)
        if total is None:
            total = sum(self._sizes[storage] for storage in _members(charged))
            self._bytes_of[charged] = total
        return total


class _Front:
    """Labels of one kind, ascending in bytes held."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._needs: list[tuple[float, int]] = []  # work, entry
        self._least: list[tuple[float, int]] = []  # the least of either, up to here

    def add(self, held: int, work: float, entry: int) -> None:
        """Adds a label that holds no less than the others."""
        least = self._least[-1] if self._least else (work, entry)
        self._held.append(held)
        self._needs.append((work, entry))
        self._least.append((min(work, least[0]), min(entry, least[1])))

    def reaches(self, held: int, work: float, entry: int) -> bool:
        """Whether a label here needs no more of anything."""
        position = bisect_right(self._held, held)
        if not position or self._least[position - 1][0] > work:
            return False
        if self._least[position - 1][1] > entry:
            return False
        return any(w <= work and e <= entry for w, e in reversed(self._needs[:position]))


class _Bounds(NamedTuple):
    """[i] the most bytes that a label at boundary i may hold and still finish, by its last item."""

    after_step: Bytes
    after_segment: Bytes

    @property
    def possible(self) -> bool:
        return bool(self.after_segment[0] >= 0)


class _HeldBounds:
    """Upper bounds on what may be held, which look no further back than the last item.

    A storage counts as charged already wherever some earlier item could have charged it.
    """

    def __init__(self, spans: Spans, plain_backward: Bytes, segment_backward: Bytes) -> None:
        self.spans = spans
        self.plain_backward = plain_backward
        self.segment_backward = segment_backward
        lifetimes = spans.lifetimes
        costs = lifetimes.costs
        self.loss_bytes = int(spans.gradients[-1])
        after_step: dict[int, int] = {}
        after_segment: dict[int, int] = {}
        shared = np.zeros(spans.steps + 2, np.int64)
        for storage, producer in lifetimes.producer.items():
            readers = lifetimes.readers[storage]
            if not readers:
                continue
            own = storage in costs.steps[producer].saved
            after_step[storage] = producer + 1 if own else readers[0] + 1
            after_segment[storage] = producer + 2 if own else readers[0] + 1
            if after_step[storage] <= readers[-1]:
                shared[after_step[storage]] += costs.storage_bytes[storage]
                shared[readers[-1] + 1] -= costs.storage_bytes[storage]
        self.in_use = spans.live - shared.cumsum()[:-1]
        self.arguments = [
            spans.arguments - argument_bytes(lifetimes, since)
            for since in (after_step, after_segment)
        ]
        self.saved = [
            [self._new_bytes(step, since) for step in range(spans.steps)]
            for since in (after_step, after_segment)
        ]

    def _new_bytes(self, step: int, since: dict[int, int]) -> int:
        """What a plain step surely adds to the held bytes."""
        costs = self.spans.lifetimes.costs
        new = [s for s in self.spans.lifetimes.saved(step) if since.get(s, step + 1) > step]
        return costs.steps[step].residual_bytes + sum(costs.storage_bytes[s] for s in new)

    def at(self, limit: int) -> _Bounds:
        """The bounds for one limit."""
        spans, steps = self.spans, self.spans.steps
        forward = limit - self.in_use[:, None] - spans.forward
        backward = limit - self.segment_backward
        after_step, after_segment = np.zeros(steps + 1, np.int64), np.zeros(steps + 1, np.int64)
        after_step[-1] = after_segment[-1] = limit - self.in_use[-1] - self.loss_bytes
        for start in reversed(range(steps)):
            later = slice(start + 1, steps + 1)
            segment = np.minimum(backward[start, later], after_segment[later])
            step = min(limit - self.plain_backward[start], after_step[start + 1])
            for bounds, arguments, saved in zip(
                (after_step, after_segment), self.arguments, self.saved, strict=True
            ):
                within = np.minimum(segment - arguments[start, later], forward[start, later])
                plain = min(step - saved[start], forward[start, start + 1])
                bounds[start] = max(within.max(), plain)
        return _Bounds(after_step, after_segment)


def _next_reads(lifetimes: Lifetimes) -> list[list[tuple[int, int, int]]]:
    """For every boundary, the storages read after it that may be charged at the time or become so.

    As (storage, next reader, last reader), the loss among the readers.
    """
    steps = lifetimes.costs.steps
    table: list[list[tuple[int, int, int]]] = [[] for _ in steps]
    for storage, producer in lifetimes.producer.items():
        readers = lifetimes.readers[storage]
        own = storage in steps[producer].saved
        previous = producer
        for reader in readers:
            if own or previous > producer or reader < readers[-1]:
                for boundary in range(previous + 1, min(reader + 1, len(steps))):
                    table[boundary].append((storage, reader, readers[-1]))
            previous = reader
    return table


def _live_sets(lifetimes: Lifetimes) -> list[int]:
    """For every boundary, the bit set of the storages made before it and read after it."""
    live = 0
    sets = [0]
    expiring: dict[int, int] = defaultdict(int)
    for storage, readers in lifetimes.readers.items():
        if readers:
            expiring[readers[-1]] |= 1 << storage
    for index, step in enumerate(lifetimes.costs.steps):
        for storage in step.outputs:
            live |= 1 << storage if lifetimes.readers[storage] else 0
        live &= ~expiring[index]
        sets.append(live)
    return sets


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _thin_out(labels: list[_Label], width: int) -> list[_Label]:
    """`width` of the labels, spread evenly; the first and the last are among them."""
    last = len(labels) - 1
    return [labels[index * last // (width - 1)] for index in range(width)]


def _segments(label: _Label, steps: int) -> tuple[Segment, ...]:
    """The segments on the way to a label at the end of the model, in order."""
    found: list[Segment] = []
    current, stop = label, steps
    while current.before is not None:
        if current.start >= 0:
            found.append(Segment(current.start, stop))
        stop = current.start if current.start >= 0 else stop - 1
        current = current.before
    return tuple(reversed(found))
