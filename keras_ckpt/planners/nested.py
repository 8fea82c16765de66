"""The memory/work trade-off of nested plans, in one table.

This is rotor's recurrence (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019) generalised
from chains to live sets. `cost(i, J, m)` is the least work that lets the steps `[i, J)` run
forward and backward in m bytes, when everything before i is somebody else's business. The first
item of `[i, J)` is a plain step, or a segment `[i, k)`, whose inside is the same problem again:

    cost(i, J, m) = min( cost(i + 1, J, m - kept(i)),
                         min over k of work(i, k) + cost(i, k, m - arguments)
                                                  + cost(k, J, m - arguments - carried(i, k)) )

each allowed only where m covers the transients. Bytes are rounded up to `levels` units, and the
limit down, so that a plan within a limit stays within it. An outermost item's weights are
updated while the item before it begins its backward pass, so the whole model has a table for
each kind of item that may come next.

On a chain this is exact (up to the rounding): the one thing that the future must know of the past
is whether the tensor at the boundary is already held by the plain step that made it, so there
is a table for either case. (Above 8 steps, the gradients of weights that are being updated while
a segment runs backward count for its whole backward pass, and above 16, their bytes are rounded
up; both are safe.) On other graphs a tensor that skips over a boundary is charged to
the item that made it, from there on. That is safe, but may charge it while it is not there yet
or no longer: `cost` is then an upper bound, and the simulator has the last word.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

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

_KINDS = 16  # of outermost items told apart by the bytes of their weights
_VARIANTS = 64  # of the insides of outermost segments, over all steps


class _Item(NamedTuple):
    """One way to begin `[i, J)`, in units; a segment's are besides its arguments."""

    stop: int  # the boundary after it
    least: int  # the least that fits it
    after: int  # what it takes away from the items after it
    following: int  # the largest kind of item that may come next, see `NestedTable._updates`
    column: int = -1  # of its inside, if it is a segment
    inside: int = 0  # what is taken away from its inside
    work: float = 0.0  # FLOPs of its recompute, without that of its inside

    @property
    def is_segment(self) -> bool:
        return self.column >= 0


class NestedTable:
    """The least work for every part of a model and every number of bytes up to a limit.

    Takes O(n³ · levels) time and O(n² · levels) bytes; meant for up to about 100 steps.

    Args:
        spans: the tables of the model.
        limit_bytes: the largest limit of interest, in bytes above what is in use before the
            train step and throughout it (`ModelCosts.standing_bytes`).
        levels: into how many units to divide it; one byte is the smallest unit.
        inside: plan the inside of a segment of all steps but the first, which stands for what
            comes before. Its arguments are not part of the limit.
    """

    def __init__(
        self, spans: Spans, limit_bytes: int, levels: int = 500, *, inside: bool = False
    ) -> None:
        self.steps = spans.steps
        self.unit = max(1, -(-limit_bytes // levels))
        self.levels = limit_bytes // self.unit
        self._needs = _Needs(spans)
        self._work = spans.work
        self._weights = spans.weight_gradients
        # [i] the kinds of outermost items that may begin at i, by the bytes of their weights,
        # which are updated while the item before them runs backward.
        self._updates = [
            [0] if inside else self._kinds_of_updates(start) for start in range(self.steps + 1)
        ]
        # The column J is for `[i, J)`; J = steps + 1 stands for the whole model with its loss.
        # More columns are for the insides of outermost segments, while updates take some bytes.
        self._columns: list[tuple[int, int]] = [(end, 0) for end in range(self.steps + 2)]
        self._variants: list[list[tuple[int, int]]] = []  # [J] bytes of updates, column
        for end, updates in enumerate(self._updates):
            extra = _thin_out([size for size in updates if size], _VARIANTS // max(1, self.steps))
            columns = range(len(self._columns), len(self._columns) + len(extra))
            self._variants.append([(0, end), *zip(extra, columns, strict=True)])
            self._columns += [(end, size) for size in extra]
        # [state, column, i, m]
        shape = (3, len(self._columns), self.steps + 2, self.levels + 1)
        self._cost: Work = np.full(shape, np.inf)
        # [i][state, kind, m] of the whole model, if the next item is of this kind or smaller.
        self._whole: list[Work] = [
            np.full((3, len(updates), self.levels + 1), np.inf) for updates in self._updates
        ]
        self._first = int(inside)
        self._last_column = self.steps if inside else self.steps + 1
        for end in range(1, self.steps + 1):
            for _, column in self._variants[end]:
                self._fill(column)
        if not inside:
            self._fill(self._last_column)

    def work(self, level: int) -> float:
        """The least FLOPs to recompute within `level` units; infinite if that is too few."""
        return float(self._cost[_AT_START, self._last_column, self._first, level])

    def plan(self, level: int) -> tuple[Segment, ...]:
        """The plan that has this work."""
        return self._trace(self._first, self._last_column, level)

    def improvements(self) -> list[int]:
        """The levels at which the work gets less, ascending."""
        levels, before = [], float("inf")
        for level in range(self.levels + 1):
            if self.work(level) < before:
                before = self.work(level)
                levels.append(level)
        return levels

    def _kinds_of_updates(self, start: int) -> list[int]:
        """Bytes of the weights of outermost items that begin here, rounded up, ascending."""
        if start in (0, self.steps):  # nothing runs backward after the former; the latter is none
            return [0]
        sizes = self._weights[start + 1 :] - self._weights[start]
        units = np.unique(self._units(np.minimum(sizes, self.levels * self.unit + 1)))
        return _thin_out((units * self.unit).tolist(), _KINDS)

    def _kind(self, start: int, stop: int, column: int) -> int:
        """Of which kind the item `[start, stop)` is; only outermost ones are told apart."""
        if column != self.steps + 1 or start == 0:
            return 0
        size = min(int(self._weights[stop] - self._weights[start]), self.levels * self.unit + 1)
        return bisect_left(self._updates[start], size)

    def _fill(self, column: int) -> None:
        """Works out the costs of all `[i, J)`."""
        end, _ = self._columns[column]
        whole = end > self.steps
        if whole:
            for state in range(3):
                needed = self._units(self._needs.at_loss[state])
                self._whole[-1][state, :, needed:] = 0.0
            self._cost[:, column, self.steps] = self._whole[-1][:, -1]
        else:
            self._cost[:, column, end] = 0.0
        for start in reversed(range(self._first, min(end, self.steps))):
            kinds = len(self._updates[start]) if whole else 1
            segment = np.full((kinds, self.levels + 1), np.inf)
            for item in self._segments(start, column):
                kind = self._kind(start, item.stop, column)
                self._improve(segment[kind], item, _AFTER_SEGMENT, start, column)
            for state in range(3):
                unheld = int(self._units(self._needs.unheld[state, start]))
                best = np.full_like(segment, np.inf)
                best[:, unheld:] = segment[:, : max(0, self.levels + 1 - unheld)]
                kind = self._kind(start, start + 1, column)
                for item in self._plain_steps(start, column, state):
                    self._improve(best[kind], item, _AFTER_STEP, start, column)
                if whole:
                    np.minimum.accumulate(best, axis=0, out=best)
                    self._whole[start][state] = best
                self._cost[state, column, start] = best[-1]

    def _improve(self, best: Work, item: _Item, state: int, start: int, column: int) -> None:
        """Puts the costs with this item first where they are lower."""
        least, levels = item.least, self.levels + 1
        if least >= levels:
            return
        after = self._after(item, state, column)
        cost = after[least - item.after : levels - item.after]
        if item.is_segment:
            inside = self._cost[_AT_START, item.column, start]
            cost = cost + inside[least - item.inside : levels - item.inside]
            cost += item.work
        np.minimum(best[least:], cost, out=best[least:])

    def _after(self, item: _Item, state: int, column: int) -> Work:
        """[m] the cost of what comes after an item."""
        if column == self.steps + 1:
            return self._whole[item.stop][state, item.following]
        return self._cost[state, column, item.stop]

    def _plain_steps(self, start: int, column: int, state: int) -> Iterator[_Item]:
        """The first step as a plain one, once for each kind of item that may come next."""
        end, updates = self._columns[column]
        kept, forward, backward = self._needs.of_step(start, end, state)
        after = int(self._units(kept))
        if end > self.steps:
            for kind, size in enumerate(self._updates[start + 1]):
                least = int(self._units(max(forward, backward + size)))
                yield _Item(start + 1, least, after, kind)
        else:
            backward += updates if start + 1 == end else 0
            yield _Item(start + 1, int(self._units(max(forward, backward))), after, 0)

    def _segments(self, start: int, column: int) -> Iterator[_Item]:
        """The segments that may come first, once for each kind of item that may come next."""
        end, _ = self._columns[column]
        if end <= start + 1:
            return
        stops = np.arange(start + 1, end)
        needs = [self._units(need) for need in self._needs.of_segments(start, stops, end)]
        work = self._work[start, start + 1 : end]
        rows = zip(stops.tolist(), *(need.tolist() for need in needs), work.tolist(), strict=True)
        for stop, gated, carried, transient, flops in rows:
            least = max(gated, carried, transient)
            if end <= self.steps:
                yield _Item(stop, least, carried, 0, stop, gated, flops)
                continue
            for kind, size in enumerate(self._updates[stop]):
                # What no variant of the inside allows for is taken away from all of it.
                variants = self._variants[stop]
                below, inside = variants[bisect_right(variants, (size, len(self._columns))) - 1]
                gated = (size - below) // self.unit
                yield _Item(stop, max(least, gated), carried, kind, inside, gated, flops)

    def _trace(self, start: int, column: int, level: int) -> tuple[Segment, ...]:
        """The segments behind a cost."""
        found = []
        state, most = _AT_START, len(self._updates[start])
        while start < min(self._columns[column][0], self.steps):
            room = level - int(self._units(self._needs.unheld[state, start]))
            options = [(item, level) for item in self._plain_steps(start, column, state)]
            options += [(item, room) for item in self._segments(start, column)]
            item, level = min(
                (
                    (item, left)
                    for item, left in options
                    if item.least <= left and self._kind(start, item.stop, column) <= most
                ),
                key=lambda option: self._cost_of(start, column, *option),
            )
            if item.is_segment:
                inner = self._trace(start, item.column, level - item.inside)
                found.append(Segment(start, item.stop, inner))
            start, level, most = item.stop, level - item.after, item.following
            state = _AFTER_SEGMENT if item.is_segment else _AFTER_STEP
        return tuple(found)

    def _cost_of(self, start: int, column: int, item: _Item, level: int) -> float:
        """The cost if this item comes first."""
        state = _AFTER_SEGMENT if item.is_segment else _AFTER_STEP
        cost = self._after(item, state, column)[level - item.after] + item.work
        if item.is_segment:
            cost += self._cost[_AT_START, item.column, start, level - item.inside]
        return float(cost)

    def _units(self, size: Bytes | int) -> Bytes:
        """Bytes as units, rounded up."""
        return np.asarray(-(-np.asarray(size) // self.unit))


def _thin_out(sizes: list[int], most: int) -> list[int]:
    """At most so many of the sizes, the largest among them, closer together where small."""
    if len(sizes) <= most:
        return sizes
    places = np.geomspace(1, len(sizes), most).round().astype(int) - 1
    return [sizes[place] for place in np.unique(places)]


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

    def of_step(self, step: int, end: int, state: int) -> tuple[int, int, int]:
        """What a plain step keeps, and what it needs while it runs forward and backward."""
        spans = self.spans
        kept = int(self.outputs[step, end] + self.unheld_saved[state, step])
        pruned = end <= spans.steps and step + 1 == end and self.free[step]
        forward = self.unheld[state, step] + self.forward[int(pruned), step]
        if end > spans.steps:
            return kept, int(forward), int(kept + spans.plain_backward[step])
        weights = spans.weight_gradients
        later = weights[end] - weights[step + 1]  # behind the gate; the step's own are counted
        backward = kept + spans.plain_backward[step] + later
        return kept, int(forward + spans.gradients[end]), int(backward)

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
