"""Least work within a limit, and the trade-off curve."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import chain, costs, densenet, random_costs, resnet, unet
from planner_reference import nested_plans, one_level_plans

from keras_ckpt.costs import ModelCosts
from keras_ckpt.planners.budget import InfeasibleError, frontier, plan_budget
from keras_ckpt.planners.simulate import Simulation, simulate

known_shapes = pytest.mark.parametrize(
    "model",
    [chain(24, 1000), unet(4), densenet(3, 6), resnet(4)],
    ids=["chain", "unet", "densenet", "resnet"],
)


def results(model: ModelCosts, plans) -> list[Simulation]:
    return [simulate(model, plan) for plan in plans]


@settings(max_examples=60, deadline=None)
@given(costs(4, skips=False), st.data())
def test_chains_against_every_nested_plan(model: ModelCosts, data: st.DataObject) -> None:
    everything = results(model, nested_plans(0, len(model.steps)))
    peaks = sorted({result.peak_bytes for result in everything})
    limit = data.draw(st.sampled_from(peaks))
    plan = simulate(model, plan_budget(model, limit))
    fitting = [r.recomputed_flops for r in everything if r.peak_bytes <= limit]
    assert plan.peak_bytes <= limit
    assert plan.recomputed_flops == min(fitting)
    with pytest.raises(InfeasibleError) as error:
        plan_budget(model, peaks[0] - 1)
    assert error.value.least_bytes == peaks[0]


def test_a_chain_of_five_steps_at_every_limit() -> None:
    model = random_costs(0, 5, skips=False)
    everything = results(model, nested_plans(0, 5))
    for limit in sorted({result.peak_bytes for result in everything}):
        plan = simulate(model, plan_budget(model, limit))
        fitting = [r.recomputed_flops for r in everything if r.peak_bytes <= limit]
        assert plan.peak_bytes <= limit
        assert plan.recomputed_flops == min(fitting)


@settings(max_examples=60, deadline=None)
@given(costs(7, skips=True), st.data())
def test_graphs_are_no_worse_than_any_one_level_plan(model, data) -> None:
    everything = results(model, one_level_plans(0, len(model.steps)))
    limit = data.draw(st.sampled_from(sorted({result.peak_bytes for result in everything})))
    plan = simulate(model, plan_budget(model, limit))
    assert plan.peak_bytes <= limit
    assert plan.recomputed_flops <= min(
        r.recomputed_flops for r in everything if r.peak_bytes <= limit
    )


@known_shapes
def test_every_limit_is_kept_and_work_falls_as_it_grows(model: ModelCosts) -> None:
    plain = simulate(model, ()).peak_bytes
    with pytest.raises(InfeasibleError) as error:
        plan_budget(model, 0)
    least = error.value.least_bytes
    assert error.value.step in {step.name for step in model.steps}
    assert least < 0.6 * plain
    overheads = []
    for third in range(4):
        limit = least + (plain - least) * third // 3
        result = simulate(model, plan_budget(model, limit))
        assert result.peak_bytes <= limit
        overheads.append(result.overhead)
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] == 0


def test_what_fits_plain_stays_plain() -> None:
    model = chain(5)
    assert plan_budget(model, simulate(model, ()).peak_bytes) == ()
    assert plan_budget(ModelCosts((), (), ()), 0) == ()


def test_the_error_says_what_would_help() -> None:
    with pytest.raises(InfeasibleError, match=r"least .* is \d+ bytes, and step 'step\d'.*batch"):
        plan_budget(chain(5), 3)


@settings(max_examples=30, deadline=None)
@given(costs(4, skips=False))
def test_the_frontier_of_a_chain_is_the_true_one(model: ModelCosts) -> None:
    best: list[tuple[int, float]] = []
    points = {(r.peak_bytes, r.overhead) for r in results(model, nested_plans(0, len(model.steps)))}
    for peak, overhead in sorted(points):
        if not best or overhead < best[-1][1]:
            best.append((peak, overhead))
    assert [(p.peak_bytes, p.overhead) for p in frontier(model)] == best


@known_shapes
def test_frontiers_are_monotone_and_replayable(model: ModelCosts) -> None:
    points = frontier(model)
    peaks = [point.peak_bytes for point in points]
    overheads = [point.overhead for point in points]
    assert peaks == sorted(set(peaks))
    assert overheads == sorted(set(overheads), reverse=True)
    assert points[-1].segments == ()
    for point in points:
        result = simulate(model, point.segments)
        assert (result.peak_bytes, result.overhead) == (point.peak_bytes, point.overhead)


@pytest.mark.parametrize(("steps", "part"), [(256, 20), (1000, 40)])
def test_long_chains_are_planned_in_groups(steps: int, part: int) -> None:
    model = chain(steps, 1000)
    limit = simulate(model, ()).peak_bytes // part
    result = simulate(model, plan_budget(model, limit))
    assert result.peak_bytes <= limit
    assert result.recomputed_flops <= 2 * steps  # ungrouped, the optimum for 256 is 1.7
