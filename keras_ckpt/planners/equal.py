"""Segments of equal step count: the textbook rule (Chen et al. 2016, section 4.1)."""

from __future__ import annotations

import math
from typing import Literal

from keras_ckpt.segment import Segment, segments_between


def plan_equal(steps: int, segments: int | Literal["sqrt"]) -> tuple[Segment, ...]:
    """Divides steps into segments whose sizes differ by at most one; the last stays plain.

    Args:
        steps: the number of steps.
        segments: how many segments, or "sqrt" for the rounded square root of `steps`.

    Raises:
        ValueError: if there are fewer steps than segments, or no segment.

    Example:

    >>> plan_equal(6, 3)
    (Segment(start=0, stop=2, segments=()), Segment(start=2, stop=4, segments=()))
    """
    count = round(math.sqrt(steps)) if segments == "sqrt" else segments
    if not 1 <= count <= max(steps, 1):
        raise ValueError(f"{steps} steps cannot be divided into {count} segments.")
    return segments_between([steps * i // count for i in range(1, count)], steps)
