"""The textbook rule: segments of equal step count, √n of them by default (Chen et al. 2016).

It looks at no costs, so it is right only where all steps are alike. It is here because people
know it, and as the yardstick for the planners that do look.
"""

from __future__ import annotations

import math
from typing import Literal

from keras_ckpt.costs import ModelCosts
from keras_ckpt.segment import Segment, segments_between


def plan_equal(costs: ModelCosts | int, count: int | Literal["sqrt"]) -> tuple[Segment, ...]:
    """Cuts a model into segments whose step counts differ by at most one.

    Args:
        costs: the costs of the model's steps, or just how many steps there are.
        count: the number of segments, or "sqrt" for the rounded root of the number of steps.
            The last one is the tail: nothing is gained by recomputing it, so it stays plain.

    Returns:
        `count - 1` segments in order; the steps after them are the tail.

    Raises:
        ValueError: if `count` is below 1 or above the number of steps.

    Example:

    >>> plan_equal(7, 3)
    (Segment(start=0, stop=2, segments=()), Segment(start=2, stop=5, segments=()))
    >>> len(plan_equal(100, "sqrt"))
    9
    """
    steps = costs if isinstance(costs, int) else len(costs.steps)
    pieces = max(1, round(math.sqrt(steps))) if count == "sqrt" else count
    if not 1 <= pieces <= max(steps, 1):
        raise ValueError(
            f"A model of {steps} steps can be cut into 1 to {steps} segments; received {pieces}."
        )
    return segments_between([round(index * steps / pieces) for index in range(pieces)], steps)
