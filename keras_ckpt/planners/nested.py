"""The memory/work trade-off of nested plans, in one table.

This is rotor's recurrence (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019) generalised
from chains to live sets. `cost(i, J, m)` is the least work that lets the steps `[i, J)` run
forward and backward in m bytes, when everything before i is somebody else's business. The first
item of `[i, J)` is a plain step, or a segment `[i, k)`, whose inside is the same problem again:

    cost(i, J, m) = min( cost(i + 1, J, m - kept(i)),
                         min over k of work(i, k) + cost(i, k, m - arguments)
                                                  + cost(k, J, m - arguments - carried(i, k)) )

each allowed only where m covers the transients. Bytes are rounded up to `levels` units, and the
limit down, so that a plan within a limit stays within it.

On a chain this is exact (up to the rounding): the one thing that the future must know of the past
is whether the tensor at the boundary is already held by the plain step that made it, so there
is a table for either case. On other graphs a tensor that skips over a boundary is charged to
the item that made it, from there on. That is safe, but may charge it while it is not there yet
or no longer: `cost` is then an upper bound, and the simulator has the last word.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from keras_ckpt.planners.lifetimes import Lifetimes, is_free
from keras_ckpt.planners.spans import Bytes, Spans
from keras_ckpt.segment import Segment

Work = NDArray[np.float64]

# What the last item did with the tensors at the boundary after it, if only the next step reads
# them: a segment holds none, a plain step those it saves, and at the start of a block all of
# them are the block's arguments, which are charged to whoever made the block.
_AFTER_SEGMENT, _AFTER_STEP, _AT_START = range(3)


class NestedTable:
    """The least work for every part of a model and every number of bytes up to a limit.

    Takes O(n³ · levels) time and O(n² · levels) bytes; meant for up to about 100 steps.

    Args:
        spans: the tables of the model.
        limit_bytes: the largest limit of interest, in bytes above resting memory.
        levels: into how many units to divide it; one byte is the smallest unit.
    """

    def __init__(self, spans: Spans, limit_bytes: int, levels: int = 500) -> None:
        self.steps = spans.steps
        self.unit = max(1, -(-limit_bytes // levels))
        self.levels = limit_bytes // self.unit
        self._needs = _Needs(spans)
        self._work = spans.work
        # [state, J, i, m]; J = steps + 1 stands for the whole model with its loss. The last
        # column stands for all m below zero.
        shape = (3, self.steps + 2, self.steps + 2, self.levels + 2)
        self._cost: Work = np.full(shape, np.inf)
        self._level = np.arange(self.levels + 1)
        for end in range(1, self.steps + 2):
            self._fill(end)

    def work(self, level: int) -> float:
        """The least FLOPs to recompute within `level` units; infinite if that is too few."""
        return float(self._cost[_AT_START, self.steps + 1, 0, level])

    def plan(self, level: int) -> tuple[Segment, ...]:
        """The plan that has this work."""
        return self._trace(0, self.steps + 1, _AT_START, level)

    def _fill(self, end: int) -> None:
        """Works out the costs of all `[i, end)`."""
        if end > self.steps:
            for state in range(3):
                needed = self._units(self._needs.at_loss[state])
                self._cost[state, end, self.steps, needed : self.levels + 1] = 0.0
        else:
            self._cost[:, end, end, :-1] = 0.0
        for start in reversed(range(min(end, self.steps))):
            segment = np.append(self._segment_first(start, end), np.inf)
            for state in range(3):
                unheld = self._units(self._needs.unheld[state, start])
                column = np.maximum(self._level - unheld, -1)
                best = np.minimum(self._step_first(start, end, state), segment[column])
                self._cost[state, end, start, :-1] = best

    def _step_first(self, start: int, end: int, state: int) -> Work:
        """[m] the cost if the first step is plain."""
        kept, transient = self._needs.of_step(start, end, state)
        after = self._cost[_AFTER_STEP, end, start + 1]
        cost = after[np.maximum(self._level - self._units(kept), -1)]
        cost[: self._units(transient)] = np.inf
        return cost

    def _segment_first(self, start: int, end: int) -> Work:
        """[m] the cost if a segment comes first and m bytes are left besides its arguments."""
        best = np.full(self.levels + 1, np.inf)
        for stop, gated, carried, least in self._segments(start, end):
            if least > self.levels:
                continue
            cost = self._cost[_AT_START, stop, start, least - gated : self.levels + 1 - gated]
            after = self._cost[_AFTER_SEGMENT, end, stop]
            cost = cost + after[least - carried : self.levels + 1 - carried]
            cost += self._work[start, stop]
            np.minimum(best[least:], cost, out=best[least:])
        return best

    def _segments(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """What each first segment of `[start, end)` needs, in units.

        As (stop, gated gradients behind it, what it carries, least that fits it).
        """
        if end <= start + 1:
            return
        stops = np.arange(start + 1, end)
        needs = [self._units(need) for need in self._needs.of_segments(start, stops, end)]
        least = np.maximum(needs[2], np.maximum(needs[0], needs[1]))
        yield from zip(
            stops.tolist(), needs[0].tolist(), needs[1].tolist(), least.tolist(), strict=True
        )

    def _trace(self, start: int, end: int, state: int, level: int) -> tuple[Segment, ...]:
        """The segments behind a cost."""
        found = []
        while start < min(end, self.steps):
            goal = self._cost[state, end, start, level]
            if self._step_first(start, end, state)[level] == goal:
                kept, _ = self._needs.of_step(start, end, state)
                level -= int(self._units(kept))
                start, state = start + 1, _AFTER_STEP
                continue
            room = level - int(self._units(self._needs.unheld[state, start]))
            _, stop, gated, carried = min(
                (
                    self._segment_cost(start, end, stop, room - gated, room - carried),
                    stop,
                    gated,
                    carried,
                )
                for stop, gated, carried, least in self._segments(start, end)
                if least <= room
            )
            inner = self._trace(start, stop, _AT_START, room - gated)
            found.append(Segment(start, stop, inner))
            start, state, level = stop, _AFTER_SEGMENT, room - carried
        return tuple(found)

    def _segment_cost(self, start: int, end: int, stop: int, inside: int, after: int) -> float:
        """The cost of a segment given the levels left for its inside and for what comes after."""
        return float(
            self._cost[_AT_START, stop, start, inside]
            + self._cost[_AFTER_SEGMENT, end, stop, after]
            + self._work[start, stop]
        )

    def _units(self, size: Bytes | int) -> Bytes:
        """Bytes as units, rounded up."""
        return np.asarray(-(-np.asarray(size) // self.unit))


class _Needs:
    """What single items need and leave behind, in bytes."""

    def __init__(self, spans: Spans) -> None:
        lifetimes = spans.lifetimes
        costs = lifetimes.costs
        steps = spans.steps
        size = costs.storage_bytes
        self.spans = spans
        self.free = [is_free(costs, step) for step in range(steps)]
        self.forward = np.zeros((2, steps), np.int64)  # [pruned, step]
        self.unheld = np.zeros((3, steps + 1), np.int64)  # [state, boundary]
        self.unheld_saved = np.zeros((3, steps + 1), np.int64)  # those that the next step saves
        self.outputs = np.zeros((steps, steps + 2), np.int64)  # [step, end] held because of it
        for index, step in enumerate(costs.steps):
            runs = step.forward_flops > step.free_flops
            made = sum(size[storage] for storage in step.outputs)
            self.forward[:, index] = step.residual_bytes
            self.forward[:, index] += np.array([1, runs]) * step.forward_workspace
            self.forward[0, index] += made
            self.outputs[index] = step.residual_bytes
            for storage in step.outputs:
                readers = lifetimes.readers[storage]
                saved = storage in step.saved
                unheld = np.array([1, not saved]) * size[storage]
                if saved:
                    self.outputs[index] += size[storage]
                if _read_next_only(lifetimes, storage):
                    self.unheld[:2, index + 1] += unheld
                    if index + 1 < steps and storage in costs.steps[index + 1].saved:
                        self.unheld_saved[:2, index + 1] += unheld
                elif readers and not saved:
                    self.outputs[index, readers[0] + 1 :] += size[storage]
        self.at_loss = self.unheld[:, steps] + spans.gradients[steps]
        self.carried = _carried(lifetimes)

    def of_step(self, step: int, end: int, state: int) -> tuple[int, int]:
        """What a plain step keeps, and the most that it needs while it runs either way."""
        spans = self.spans
        kept = int(self.outputs[step, end] + self.unheld_saved[state, step])
        pruned = end <= spans.steps and step + 1 == end and self.free[step]
        forward = self.unheld[state, step] + self.forward[int(pruned), step]
        if end > spans.steps:
            return kept, int(max(forward, kept + spans.plain_backward[step]))
        weights = spans.weight_gradients
        later = weights[end] - weights[step + 1]  # behind the gate; the step's own are counted
        backward = kept + spans.plain_backward[step] + later
        return kept, int(max(forward + spans.gradients[end], backward))

    def of_segments(self, start: int, stops: Bytes, end: int) -> tuple[Bytes, Bytes, Bytes]:
        """Of the segments `[start, stop)`: gated gradients behind, what they carry, transients."""
        spans = self.spans
        forward = spans.forward[start, np.minimum(stops, spans.steps)]
        carried = self.carried[start, np.minimum(stops, spans.steps), end]
        if end > spans.steps:
            return np.zeros_like(stops), carried, forward
        gated = spans.weight_gradients[end] - spans.weight_gradients[stops]
        return gated, carried, forward + spans.gradients[end]


def _read_next_only(lifetimes: Lifetimes, storage: int) -> bool:
    return lifetimes.readers[storage] == (lifetimes.producer[storage] + 1,)


def _carried(lifetimes: Lifetimes) -> Bytes:
    """[i, j, J] made in `[i, j)` and read in `[j, J)`, but not by step j alone."""
    steps = len(lifetimes.costs.steps)
    table = np.zeros((steps + 1, steps + 1, steps + 2), np.int64)
    for storage, producer in lifetimes.producer.items():
        readers = lifetimes.readers[storage]
        if _read_next_only(lifetimes, storage):
            continue
        previous = producer
        for reader in readers:
            for boundary in range(previous + 1, min(reader, steps) + 1):
                table[: producer + 1, boundary, reader + 1 :] += lifetimes.costs.storage_bytes[
                    storage
                ]
            previous = reader
    return table
