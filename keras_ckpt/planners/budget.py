"""The plan with the least extra work that fits a limit, and the whole memory/work trade-off.

Two searches compete, and the simulator, which has the last word on what fits, picks the winner:

* `search`: one level only, with exact live sets on any graph;
* `nested`: rotor's recurrence, nested to any depth, exact on chains.

What is optimal: on a chain of at most 128 steps the plan is the optimum among all nested plans,
up to the rounding of sizes (1/400 of the limit for each tensor kept; none if the limit is below
400 bytes). On other graphs it is at least as good as the best one-level plan that the search
finds; nested plans that need less work may exist. Longer models are planned in at most 128
groups of steps; the insides of the segments found are then planned step by step (`refine`).
"""

from __future__ import annotations

from dataclasses import dataclass

from keras_ckpt.costs import ModelCosts
from keras_ckpt.planners.group import cheap_cuts, group_steps, ungroup
from keras_ckpt.planners.lifetimes import Lifetimes
from keras_ckpt.planners.memory import plan_memory
from keras_ckpt.planners.nested import NestedTable
from keras_ckpt.planners.refine import refine
from keras_ckpt.planners.search import OneLevelSearch
from keras_ckpt.planners.simulate import Simulation, simulate
from keras_ckpt.planners.spans import Spans
from keras_ckpt.segment import Segment

_MOST_STEPS = 128


class InfeasibleError(ValueError):
    """No plan fits the limit.

    Attributes:
        least_bytes: the least peak, in bytes above resting memory, that some plan reaches.
        step: the name of the step at which that plan has its peak.
    """

    def __init__(self, limit_bytes: int, least_bytes: int, step: str) -> None:
        super().__init__(
            f"No plan fits {limit_bytes} bytes above resting memory. The least that recomputation "
            f"can reach is {least_bytes} bytes, and step {step!r} is where it peaks. Raise the "
            "limit, or make this step smaller: a smaller batch, mixed precision, a smaller layer."
        )
        self.least_bytes = least_bytes
        self.step = step


@dataclass(frozen=True)
class FrontierPoint:
    """One plan that no other plan beats in both memory and work.

    Attributes:
        peak_bytes: simulated peak, in bytes above resting memory.
        overhead: recomputed FLOPs over the FLOPs of the plain train step.
        segments: the plan.
    """

    peak_bytes: int
    overhead: float
    segments: tuple[Segment, ...]


def plan_budget(costs: ModelCosts, limit_bytes: int) -> tuple[Segment, ...]:
    """The plan that recomputes the fewest FLOPs and fits a limit, nested where it must be.

    Args:
        costs: what the model's steps cost.
        limit_bytes: the most bytes above resting memory that the simulated peak may reach.

    Returns:
        Segments, nested or not. `()` if everything fits without recomputing.

    Raises:
        InfeasibleError: if no plan fits; it bears the least reachable peak.
        ValueError: if the costs contradict themselves.

    Example:

    >>> from keras_ckpt.costs import StepCost
    >>> chain = ModelCosts(
    ...     steps=tuple(StepCost(f"s{i}", (i,), (i + 1,), (i + 1,), 0, 1.0, 2.0) for i in range(9)),
    ...     storage_bytes=(8,) * 10, differentiable=(True,) * 10, inputs=(0,), outputs=(9,))
    >>> plan_budget(chain, 88)
    ()
    >>> result = simulate(chain, plan_budget(chain, 72))
    >>> result.peak_bytes, result.recomputed_flops
    (72, 2.0)
    """
    if simulate(costs, ()).peak_bytes <= limit_bytes:
        return ()
    planner = _Planner(costs)
    found = [*planner.one_level(limit_bytes), *planner.nested(limit_bytes)]
    results = [(simulate(costs, plan), plan) for plan in found]
    fitting = [pair for pair in results if pair[0].peak_bytes <= limit_bytes]
    if fitting:
        return min(fitting, key=_work_then_peak)[1]
    least, plan = min(
        ((simulate(costs, plan), plan) for plan in planner.leanest()),
        key=lambda pair: (pair[0].peak_bytes, pair[0].recomputed_flops),
    )
    if least.peak_bytes > limit_bytes:
        assert least.peak_event is not None
        raise InfeasibleError(
            limit_bytes, least.peak_bytes, costs.steps[least.peak_event.step].name
        )
    return plan


def frontier(costs: ModelCosts) -> list[FrontierPoint]:
    """The memory/work trade-off: plans from the least peak to no extra work at all.

    Args:
        costs: what the model's steps cost.

    Returns:
        Points ascending in peak and strictly descending in overhead, about a hundred at most;
        the last one is plain Keras.

    Raises:
        ValueError: if the costs contradict themselves.

    Example:

    >>> from keras_ckpt.costs import StepCost
    >>> chain = ModelCosts(
    ...     steps=tuple(StepCost(f"s{i}", (i,), (i + 1,), (i + 1,), 0, 1.0, 2.0) for i in range(4)),
    ...     storage_bytes=(8,) * 5, differentiable=(True,) * 5, inputs=(0,), outputs=(4,))
    >>> [(point.peak_bytes, point.segments) for point in frontier(chain)][-1]
    (48, ())
    """
    plans: list[tuple[Segment, ...]] = [()]
    if costs.steps:
        planner = _Planner(costs)
        plans += planner.leanest()
        least = min(simulate(costs, plan).peak_bytes for plan in plans)
        limit = simulate(costs, ()).peak_bytes
        standing = costs.standing_bytes
        while limit > least:
            plans += planner.nested_up_to(limit)
            limit = standing + (limit - standing) // 4
    points: list[FrontierPoint] = []
    results = [(simulate(costs, plan), plan) for plan in dict.fromkeys(plans)]
    for result, plan in sorted(results, key=_work_then_peak):
        if not points or result.peak_bytes < points[-1].peak_bytes:
            points.append(FrontierPoint(result.peak_bytes, result.overhead, plan))
    return points[::-1]


def _work_then_peak(pair: tuple[Simulation, tuple[Segment, ...]]) -> tuple[float, int]:
    return pair[0].recomputed_flops, pair[0].peak_bytes


class _Planner:
    """The two searches over one model, in groups of steps where it is long."""

    def __init__(self, costs: ModelCosts) -> None:
        self.costs = costs
        spans = Spans.of(Lifetimes.of(costs))
        self._cuts = cheap_cuts(spans, _MOST_STEPS)
        if spans.steps > _MOST_STEPS:
            spans = Spans.of(Lifetimes.of(group_steps(spans, self._cuts)))
        self._spans = spans

    def one_level(self, limit: int) -> list[tuple[Segment, ...]]:
        """The one-level plan with the least work within a limit, if there is one."""
        width = max(16, 3000 // self._spans.steps)
        plan = OneLevelSearch(self._spans).find(limit, least_work=True, width=width)
        return [] if plan is None else [ungroup(plan, self._cuts)]

    def nested(self, limit: int) -> list[tuple[Segment, ...]]:
        """The nested plan with the least work that fits a limit, if there is one.

        The table's figures are upper bounds, so plans that it holds to be a little too large
        are tried as well.
        """
        table = NestedTable(self._spans, max(1, (limit - self.costs.standing_bytes) * 5 // 4))
        works = table.improvements()
        low, high = 0, len(works)  # the plans before `low` fit, as far as seen
        best: list[tuple[Segment, ...]] = []
        while low < high:
            middle = (low + high) // 2
            plan = ungroup(table.plan(works[middle]), self._cuts)
            if simulate(self.costs, plan).peak_bytes <= limit:
                best, low = [plan], middle + 1
            else:
                high = middle
        if len(self._cuts) <= len(self.costs.steps):
            return [refine(self.costs, plan, limit) for plan in best]
        return best

    def nested_up_to(self, limit: int, most: int = 40) -> list[tuple[Segment, ...]]:
        """Nested plans for limits from the least that the table knows to `limit`."""
        table = NestedTable(self._spans, limit - self.costs.standing_bytes)
        levels = table.improvements()
        chosen = {levels[index * len(levels) // most] for index in range(most) if levels}
        return [ungroup(table.plan(level), self._cuts) for level in sorted(chosen)]

    def leanest(self) -> list[tuple[Segment, ...]]:
        """Plans with the least peak."""
        best = plan_memory(self.costs)
        peak = simulate(self.costs, best).peak_bytes
        table = NestedTable(self._spans, peak - self.costs.standing_bytes)
        lowest = [table.plan(level) for level in table.improvements()[:10]]
        return [best, *(ungroup(plan, self._cuts) for plan in lowest)]
