"""Segments are well formed, and walked in order."""

import pytest

from keras_ckpt.segment import Segment, check_segments, segments_between, walk


def test_walk_gives_plain_steps_and_segments_in_order() -> None:
    first, second = Segment(1, 3), Segment(4, 5)
    assert list(walk([first, second], 0, 6)) == [0, first, 3, second, 5]


def test_segments_between_cuts_leave_the_tail_plain() -> None:
    assert segments_between([4, 2, 2, 0, 6], 6) == (Segment(0, 2), Segment(2, 4))
    assert segments_between([], 6) == ()


@pytest.mark.parametrize(("start", "stop"), [(2, 2), (3, 1), (-1, 2)])
def test_an_empty_segment_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="0 <= start < stop"):
        Segment(start, stop)


def test_misplaced_inner_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="overlaps its neighbour or leaves"):
        Segment(0, 4, (Segment(0, 3), Segment(2, 4)))
    with pytest.raises(ValueError, match="overlaps its neighbour or leaves"):
        check_segments([Segment(0, 4)], 1, 5)
    with pytest.raises(ValueError, match="holds itself"):
        Segment(0, 4, (Segment(0, 4),))
