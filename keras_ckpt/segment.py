"""Segments: which steps are recomputed together.

A model is a list of steps. A segment is a run of consecutive steps whose intermediate
tensors are dropped after the forward pass and recomputed just before their backward pass;
it may hold further segments, which are then dropped and recomputed in their turn while the
outer one is being recomputed (Griewank & Walther 2000, "Revolve"; Beaumont et al. 2019, "rotor").
Steps outside every segment keep what their backward pass needs, as in plain Keras.

This is the one description of a schedule that planners, the simulator and the executor share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Segment:
    """The steps `[start, stop)`, recomputed together.

    Attributes:
        start: index of the first step.
        stop: index after the last step.
        segments: segments inside this one, in order, recomputed once more each time this
            one has been recomputed.

    Raises:
        ValueError: if the segment is empty, or an inner segment is misplaced.

    Example:

    >>> Segment(0, 4, (Segment(0, 2),)).depth
    2
    """

    start: int
    stop: int
    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(
                f"A segment needs 0 <= start < stop; received [{self.start}, {self.stop})."
            )
        check_segments(self.segments, self.start, self.stop)
        if any(inner.start == self.start and inner.stop == self.stop for inner in self.segments):
            raise ValueError(
                f"Segment [{self.start}, {self.stop}) holds itself as an inner segment. "
                "Remove the inner one: it would be recomputed twice in a row for nothing."
            )

    @property
    def depth(self) -> int:
        """How many levels of segments there are, this one included."""
        return 1 + max((inner.depth for inner in self.segments), default=0)


def check_segments(segments: Sequence[Segment], start: int, stop: int) -> None:
    """Checks that segments are ordered, disjoint and inside the steps `[start, stop)`.

    Raises:
        ValueError: naming the first segment that is misplaced.
    """
    position = start
    for segment in segments:
        if segment.start < position or segment.stop > stop:
            raise ValueError(
                f"Segment [{segment.start}, {segment.stop}) overlaps its neighbour or leaves "
                f"the steps [{start}, {stop}) that it belongs to."
            )
        position = segment.stop


def walk(segments: Sequence[Segment], start: int, stop: int) -> Iterator[int | Segment]:
    """The steps `[start, stop)` in order: an index for a plain step, a `Segment` for a group.

    Example:

    >>> list(walk([Segment(1, 3)], 0, 4))
    [0, Segment(start=1, stop=3, segments=()), 3]
    """
    position = start
    for segment in segments:
        yield from range(position, segment.start)
        yield segment
        position = segment.stop
    yield from range(position, stop)


def segments_between(cuts: Sequence[int], steps: int) -> tuple[Segment, ...]:
    """One segment between each two neighbouring cuts; the steps after the last cut stay plain.

    The tail is never recomputed: its backward pass starts when its forward pass ends, so
    dropping its tensors would save nothing.

    Args:
        cuts: step indices; a cut at `i` lies just before step `i`. 0 and `steps` may be left out.
        steps: the number of steps.

    Example:

    >>> segments_between([2, 4], 6)
    (Segment(start=0, stop=2, segments=()), Segment(start=2, stop=4, segments=()))
    """
    inner = sorted({cut for cut in cuts if 0 < cut < steps})
    return tuple(Segment(a, b) for a, b in zip([0, *inner], inner, strict=False))


def segments_without(segments: Sequence[Segment], excluded: Collection[int]) -> tuple[Segment, ...]:
    """The same segments, each taken apart where it would hold an excluded step.

    Example:

    >>> segments_without([Segment(0, 5)], {1, 2})
    (Segment(start=0, stop=1, segments=()), Segment(start=3, stop=5, segments=()))
    """
    parts = []
    for segment in segments:
        inside = segments_without(segment.segments, excluded)
        between = [i for i in range(segment.start, segment.stop) if i in excluded]
        for before, stop in pairwise([segment.start - 1, *between, segment.stop]):
            start = before + 1
            if start < stop:
                inner = [x for x in inside if start <= x.start and x.stop <= stop]
                whole = len(inner) == 1 and (inner[0].start, inner[0].stop) == (start, stop)
                parts.append(inner[0] if whole else Segment(start, stop, tuple(inner)))
    return tuple(parts)
