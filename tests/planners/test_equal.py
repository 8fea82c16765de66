"""Segments of equal step count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_models import chain

from keras_ckpt.planners.equal import plan_equal


@given(st.integers(1, 300), st.data())
def test_sizes_differ_by_at_most_one_and_the_tail_stays_plain(steps: int, data) -> None:
    count = data.draw(st.integers(1, steps))
    segments = plan_equal(steps, count)
    starts = [segment.start for segment in segments]
    tail = segments[-1].stop if segments else 0
    sizes = [segment.stop - segment.start for segment in segments] + [steps - tail]
    assert len(sizes) == count
    assert sum(sizes) == steps
    assert max(sizes) - min(sizes) <= 1
    assert starts == [sum(sizes[:i]) for i in range(len(segments))]


def test_sqrt_rounds() -> None:
    assert plan_equal(chain(36), "sqrt") == plan_equal(36, 6)
    assert plan_equal(8, "sqrt") == plan_equal(8, 3)
    assert plan_equal(0, "sqrt") == ()


@pytest.mark.parametrize("count", [0, -1, 6])
def test_impossible_counts_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="1 to 5"):
        plan_equal(5, count)
