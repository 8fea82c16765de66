"""Makes a long model short: neighbouring steps become one, so that O(n³) planners can be used.

A group has the live sets, saved bytes and FLOPs of its steps taken together; what comes and goes
inside it becomes workspace. Cuts are made where little is alive, one in each of equally
many steps, so that what the planners lose are cuts that they would rarely choose.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

from keras_ckpt.costs import ModelCosts, StepCost
from keras_ckpt.planners.lifetimes import Lifetimes, is_free
from keras_ckpt.planners.spans import Spans
from keras_ckpt.segment import Segment


def cheap_cuts(spans: Spans, count: int) -> list[int]:
    """The boundaries of at most `count` groups, both ends included.

    Example:

    >>> from keras_ckpt.costs import StepCost
    >>> steps = tuple(StepCost(f"s{i}", (i,), (i + 1,)) for i in range(4))
    >>> model = ModelCosts(steps, (9, 9, 1, 9, 9), (True,) * 5, (0,), (4,))
    >>> cheap_cuts(Spans.of(Lifetimes.of(model)), 2)
    [0, 2, 4]
    """
    steps = spans.steps
    if steps <= count:
        return list(range(steps + 1))
    count = math.ceil(steps / math.ceil(steps / count))  # groups of equal size waste least
    edges = [round(index * steps / count) for index in range(count + 1)]
    middles = [
        min(
            range((a + b) // 2 + 1, (b + c) // 2 + 1),
            key=lambda i: (int(spans.live[i]), abs(i - b)),
        )
        for a, b, c in zip(edges, edges[1:], edges[2:], strict=False)
    ]
    return sorted({0, *middles, steps})


def group_steps(spans: Spans, cuts: list[int]) -> ModelCosts:
    """The model whose steps are the runs between neighbouring cuts.

    Args:
        spans: the tables of the model.
        cuts: the boundaries, 0 and the number of steps among them, ascending.
    """
    costs = spans.lifetimes.costs
    ranges = list(pairwise(cuts))
    steps = tuple(_group(spans.lifetimes, start, stop) for start, stop in ranges)
    grouped = dataclasses.replace(costs, steps=steps)
    seen = Spans.of(Lifetimes.of(grouped))  # what the group shows before it has workspace
    with_workspace = []
    for index, (start, stop) in enumerate(ranges):
        step = steps[index]
        kept = step.residual_bytes + _bytes(costs, set(step.saved) & set(step.outputs))
        last = costs.steps[stop - 1]
        saving = int(spans.recompute[start, stop] - spans.gradients[stop])
        if is_free(costs, stop - 1):  # a group that ends no segment does run its last operation
            saving += last.forward_workspace + _bytes(costs, set(last.outputs))
        forward = max(saving, int(spans.forward[start, stop]))
        backward = int(spans.backward[start, stop] + spans.weight_gradients[stop])
        shown = step.residual_bytes + _bytes(costs, set(step.outputs))
        with_workspace.append(
            dataclasses.replace(
                step,
                forward_workspace=max(0, forward - shown),
                backward_workspace=max(0, backward - kept - int(seen.plain_backward[index])),
            )
        )
    return dataclasses.replace(costs, steps=tuple(with_workspace))


def ungroup(segments: tuple[Segment, ...], cuts: list[int]) -> tuple[Segment, ...]:
    """Segments of groups as segments of steps.

    Example:

    >>> ungroup((Segment(0, 2),), [0, 3, 5, 9])
    (Segment(start=0, stop=5, segments=()),)
    """
    return tuple(Segment(cuts[s.start], cuts[s.stop], ungroup(s.segments, cuts)) for s in segments)


def _group(lifetimes: Lifetimes, start: int, stop: int) -> StepCost:
    """One group without its workspace."""
    costs = lifetimes.costs
    steps = costs.steps[start:stop]
    inputs = dict.fromkeys(s for step in steps for s in step.inputs)
    made = dict.fromkeys(s for step in steps for s in step.outputs)
    outputs = tuple(s for s in made if lifetimes.last_reader(s, len(costs.steps) + 1) >= stop)
    saved = dict.fromkeys(s for step in steps for s in step.saved)
    hidden = [s for s in saved if s in made and s not in outputs]
    return StepCost(
        name=steps[0].name if len(steps) == 1 else f"{steps[0].name}..{steps[-1].name}",
        inputs=tuple(s for s in inputs if s not in made),
        outputs=outputs,
        saved=tuple(s for s in saved if s not in hidden),
        residual_bytes=sum(step.residual_bytes for step in steps) + _bytes(costs, set(hidden)),
        forward_flops=sum(step.forward_flops for step in steps),
        backward_flops=sum(step.backward_flops for step in steps),
        free_flops=steps[-1].free_flops if is_free(costs, stop - 1) else 0.0,
        weight_gradient_bytes=sum(step.weight_gradient_bytes for step in steps),
        expensive=any(step.expensive for step in steps),
    )


def _bytes(costs: ModelCosts, storages: set[int]) -> int:
    return sum(costs.storage_bytes[storage] for storage in storages)
