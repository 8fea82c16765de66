"""Plans the insides of segments again, step by step, where a long model was planned in groups.

Groups are coarse where it matters most: a block that is run backward plainly is at least one
group long. But each segment of a grouped plan is a small planning problem of its own. What others
hold while it runs backward is read off the replay of the plan, and the rest of the limit is its
own to use.
"""

from __future__ import annotations

import dataclasses

from keras_ckpt.costs import ModelCosts, StepCost
from keras_ckpt.planners.group import cheap_cuts, group_steps, ungroup
from keras_ckpt.planners.lifetimes import Lifetimes
from keras_ckpt.planners.nested import NestedTable
from keras_ckpt.planners.simulate import Event, simulate
from keras_ckpt.planners.spans import Spans
from keras_ckpt.segment import Segment

_MOST_STEPS = 64  # of a segment; longer ones are grouped, and the segments inside come next


def refine(costs: ModelCosts, plan: tuple[Segment, ...], limit: int) -> tuple[Segment, ...]:
    """A plan with the same outermost segments that recomputes no more FLOPs.

    Args:
        costs: the model.
        plan: a plan whose peak is within the limit.
        limit: bytes above resting memory.
    """
    refiner = _Refiner(costs, limit)
    while refiner.windows:
        refiner.windows = 0
        events = simulate(costs, plan).events
        refiner.backward = {e.step: i for i, e in enumerate(events) if e.phase == "backward"}
        refiner.events = events
        plan = refiner.improve(plan)
    return plan


class _Refiner:
    """Goes through a plan from the outermost segments inwards, one depth at a time."""

    def __init__(self, costs: ModelCosts, limit: int) -> None:
        self.lifetimes = Lifetimes.of(costs)
        self.limit = limit
        self.events: tuple[Event, ...] = ()
        self.backward: dict[int, int] = {}  # where in the events each step runs backward
        self.windows = 1  # how many segments were planned again in this round
        self._done: set[tuple[int, int]] = set()

    def improve(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Plans again what was not yet."""
        improved = []
        for segment in segments:
            start, stop = segment.start, segment.stop
            if segment.segments and (start, stop) not in self._done:
                self._done.add((start, stop))
                self.windows += 1
                segment = Segment(start, stop, self._inside(segment))
            elif segment.segments and stop - start > _MOST_STEPS:
                segment = Segment(start, stop, self.improve(segment.segments))
            improved.append(segment)
        return tuple(improved)

    def _inside(self, segment: Segment) -> tuple[Segment, ...]:
        """The inner segments with the least work that leave a segment within the limit."""
        window = _window(self.lifetimes, segment)
        now = _Inside(window, segment.start, segment.segments)
        # Other things that are in use when the recompute begins, and at the first backward step.
        before = self.backward.get(segment.stop, -1)
        if before < 0:  # the loss, whose step number is that of the last step
            before = next(i for i, e in enumerate(self.events) if e.phase == "backward")
        held = self.events[before + 1].bytes - now.first
        updating = self.events[self.backward[segment.stop - 1]].bytes - now.entry - held
        spans = Spans.of(Lifetimes.of(window))
        cuts = sorted({1, *cheap_cuts(spans, _MOST_STEPS + 1)})
        if spans.steps > _MOST_STEPS + 1:
            spans = Spans.of(Lifetimes.of(group_steps(spans, cuts)))
        room = self.limit - held
        table = NestedTable(spans, room, inside=True)
        levels = table.improvements()
        low, high = 0, len(levels)  # the plans before `low` fit, as far as seen
        best = now
        while low < high:
            middle = (low + high) // 2
            inner = ungroup(table.plan(levels[middle]), cuts)
            found = _Inside(window, segment.start, _shifted(inner, segment.start - 1))
            if max(found.peak, found.entry + updating) <= room:
                best, low = min(best, found, key=lambda inside: inside.work), middle + 1
            else:
                high = middle
        return best.segments


class _Inside:
    """What a segment needs with certain segments inside."""

    def __init__(self, window: ModelCosts, start: int, segments: tuple[Segment, ...]) -> None:
        self.segments = segments
        inner = _shifted(segments, 1 - start)
        result = simulate(window, (Segment(1, len(window.steps), inner),))
        first = next(i for i, e in enumerate(result.events) if e.phase == "recompute")
        own = [event for event in result.events[first:] if event.step]
        self.first = own[0].bytes
        self.entry = next(event.bytes for event in own if event.phase == "backward")
        self.peak = max(event.bytes for event in own)
        self.work = result.recomputed_flops


def _window(lifetimes: Lifetimes, segment: Segment) -> ModelCosts:
    """A segment as a model, after one step that stands for all that comes before it."""
    costs = lifetimes.costs
    steps = costs.steps[segment.start : segment.stop]
    arguments = lifetimes.arguments(segment.start, segment.stop)
    made = (*arguments, *(storage for step in steps for storage in step.outputs))
    return dataclasses.replace(
        costs,
        steps=(StepCost("before", outputs=arguments, saved=arguments), *steps),
        outputs=tuple(
            s for s in made if lifetimes.readers[s] and lifetimes.readers[s][-1] >= segment.stop
        ),
        standing_bytes=0,
    )


def _shifted(segments: tuple[Segment, ...], by: int) -> tuple[Segment, ...]:
    return tuple(Segment(s.start + by, s.stop + by, _shifted(s.segments, by)) for s in segments)
