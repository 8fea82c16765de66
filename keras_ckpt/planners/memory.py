"""The plan with the least peak in which every step is recomputed at most once.

Textbook rules cut every √n steps, or at every block, and hope that all steps are alike. Here the
limit itself is searched for (parametric search, Megiddo 1979): for a given limit, `search`
decides exactly whether a plan fits, over all ways to cut the model and to leave steps plain. Plain
steps in the middle do help the peak: a step that saves less than it reads, such as a pooling,
spares the segment before it the recompute of its own large output.
"""

from __future__ import annotations

from keras_ckpt.costs import ModelCosts
from keras_ckpt.planners.group import cheap_cuts, group_steps, ungroup
from keras_ckpt.planners.lifetimes import Lifetimes
from keras_ckpt.planners.search import OneLevelSearch
from keras_ckpt.planners.simulate import simulate
from keras_ckpt.planners.spans import Spans
from keras_ckpt.segment import Segment

_MOST_STEPS = 400  # at which every boundary is looked at
_GROUPS = 200  # of neighbouring steps, above that


def plan_memory(costs: ModelCosts) -> tuple[Segment, ...]:
    """The one-level plan with the least simulated peak, and among those the least extra work.

    The peak is exact over all plans without nesting, for any graph of up to 400 steps, as long as
    at most 256 partial plans (125 for 400 steps) compete at one boundary; it takes many skip
    connections over one boundary, about eight that can be combined freely, to get there. Beyond
    that, some are dropped. The work is the least up to a quarter as many competitors, which long
    models with steps of many different sizes exceed. Above 400 steps, neighbouring steps are
    grouped, and the plan found is then improved step by step by a narrow search, until it can
    find nothing lower by 1/500.

    Args:
        costs: what the model's steps cost.

    Returns:
        Disjoint segments in order. `()` if recomputing saves nothing.

    Raises:
        ValueError: if the costs contradict themselves.

    Example:

    >>> from keras_ckpt.costs import StepCost
    >>> chain = ModelCosts(
    ...     steps=tuple(StepCost(f"s{i}", (i,), (i + 1,), (i + 1,), 0, 1.0, 2.0) for i in range(9)),
    ...     storage_bytes=(8,) * 10, differentiable=(True,) * 10, inputs=(0,), outputs=(9,))
    >>> simulate(chain, ()).peak_bytes, simulate(chain, plan_memory(chain)).peak_bytes
    (88, 40)
    """
    if not costs.steps:
        return ()
    spans = Spans.of(Lifetimes.of(costs))
    if spans.steps <= _MOST_STEPS:
        return least_peak(OneLevelSearch(spans))
    cuts = cheap_cuts(spans, _GROUPS)
    groups = Spans.of(Lifetimes.of(group_steps(spans, cuts)))
    plan = ungroup(_lowest_peak(OneLevelSearch(groups)), cuts)
    search = OneLevelSearch(spans)
    possible = search.least_possible()
    plan = _lower_peak(search, plan, possible, first=possible, width=2, close=500)
    return _less_work(search, plan, width=2)


def least_peak(search: OneLevelSearch) -> tuple[Segment, ...]:
    """The plan with the least simulated peak, and then the least work, that a search allows."""
    return _less_work(search, _lowest_peak(search), width=max(2, search.width // 4))


def _lowest_peak(search: OneLevelSearch) -> tuple[Segment, ...]:
    """The plan with the least simulated peak, to the byte."""
    possible = search.least_possible()
    # A narrow search is fast and nearly always right, so the wide one mostly has to look once.
    plan = _lower_peak(search, (), possible, first=possible, width=8, close=2000)
    reached = simulate(search.spans.lifetimes.costs, plan).peak_bytes
    return _lower_peak(search, plan, possible, first=reached - 1, width=search.width)


def _less_work(
    search: OneLevelSearch, plan: tuple[Segment, ...], width: int
) -> tuple[Segment, ...]:
    """A plan with no higher peak and as little work as the search finds."""
    costs = search.spans.lifetimes.costs
    reached = simulate(costs, plan).peak_bytes
    return min(
        plan,
        search.find(reached, least_work=True, width=width) or plan,
        key=lambda segments: simulate(costs, segments).recomputed_flops,
    )


def _lower_peak(
    search: OneLevelSearch,
    plan: tuple[Segment, ...],
    possible: int,
    first: int,
    width: int,
    close: int | None = None,
) -> tuple[Segment, ...]:
    """The plan with the least peak that the search finds, `plan` if none is better.

    Args:
        search: the search over the model.
        plan: the best plan so far.
        possible: bytes below which no plan fits. Limits close to it are tried first, since most
            models come close.
        first: the limit to start with.
        width: how wide to search.
        close: stop when the peak is known to one part in this many; by default, to the byte.
    """
    costs = search.spans.lifetimes.costs
    reached = simulate(costs, plan).peak_bytes
    limit, distance = first, 1 + possible // 1024
    while reached - possible > (reached // close if close else 0):
        found = search.find(min(limit, reached - 1), least_work=False, width=width)
        if found is not None:
            plan, reached = found, simulate(costs, found).peak_bytes
        else:
            possible, distance = limit + 1, 2 * distance
        limit = min(possible + distance, (possible + reached) // 2)
    return plan
