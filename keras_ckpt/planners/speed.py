"""The plan that never runs an expensive step again: cheap steps are recomputed, others are kept.

Matmuls, convolutions, attention and recurrent steps take nearly all the time, while norms,
activations and the like hold much of the memory. So no segment contains an expensive step,
with one exception: the last step of a segment, if all of it is free (nothing reads its result
during the recompute, see `StepCost.free_flops`). The exception matters: outside the segment, the
expensive step would keep its input, which is just what the segment before it wants to drop. The
same policy is known as `dots_saveable` in JAX; this planner also leaves plain what need not be
recomputed for the least peak that the policy allows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keras_ckpt.costs import ModelCosts
from keras_ckpt.planners.lifetimes import Lifetimes, is_free
from keras_ckpt.planners.memory import least_peak
from keras_ckpt.planners.search import OneLevelSearch
from keras_ckpt.planners.spans import Spans
from keras_ckpt.segment import Segment


def plan_speed(costs: ModelCosts) -> tuple[Segment, ...]:
    """The plan with the least simulated peak that recomputes cheap steps only.

    Exact to the same extent as `plan_memory`, over all one-level plans in which no expensive
    step's FLOPs are spent twice.

    Args:
        costs: what the model's steps cost; `StepCost.expensive` says which to keep.

    Returns:
        Disjoint segments in order. `()` if recomputing cheap steps saves nothing.

    Raises:
        ValueError: if the costs contradict themselves.

    Example:

    >>> from keras_ckpt.costs import StepCost
    >>> steps = [
    ...     StepCost(f"s{i}", (i,), (i + 1,), (i,), 0, 9.0, 18.0, 9.0, expensive=i % 3 == 0)
    ...     for i in range(9)
    ... ]
    >>> plan_speed(ModelCosts(tuple(steps), (8,) * 10, (True,) * 10, (0,), (9,)))
    (Segment(start=1, stop=4, segments=()), Segment(start=4, stop=7, segments=()))
    """
    if not costs.steps:
        return ()
    return least_peak(OneLevelSearch(Spans.of(Lifetimes.of(costs)), _cheap_segments(costs)))


def _cheap_segments(costs: ModelCosts) -> NDArray[np.bool_]:
    """[i, j] whether recomputing `[i, j)` runs no expensive operation."""
    steps = costs.steps
    expensive = np.concatenate([[0], np.cumsum([step.expensive for step in steps])])
    free = [
        step.expensive and is_free(costs, index) and step.free_flops >= step.forward_flops
        for index, step in enumerate(steps)
    ]
    inside = expensive[None, :] - expensive[:, None] - np.array([0, *free])[None, :]
    return np.asarray(inside <= 0)
