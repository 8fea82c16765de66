"""The table of nested plans, against brute force over every nested plan."""

from __future__ import annotations

from math import comb

import pytest
from hypothesis import given, settings
from planner_models import chain, costs, random_costs
from planner_reference import nested_plans

from keras_ckpt.costs import ModelCosts
from keras_ckpt.planners.lifetimes import Lifetimes
from keras_ckpt.planners.nested import NestedTable
from keras_ckpt.planners.simulate import simulate
from keras_ckpt.planners.spans import Spans


def byte_table(model: ModelCosts) -> NestedTable:
    """A table whose unit is one byte, beyond the peak of plain Keras."""
    top = simulate(model, ()).peak_bytes - model.standing_bytes + 20
    return NestedTable(Spans.of(Lifetimes.of(model)), top, levels=top)


def least_works(model: ModelCosts, levels: int) -> list[float]:
    """For every limit, the least work of all nested plans that fit it."""
    best = [float("inf")] * (levels + 1)
    for plan in nested_plans(0, len(model.steps)):
        result = simulate(model, plan)
        level = result.peak_bytes - model.standing_bytes
        if level <= levels:
            best[level] = min(best[level], result.recomputed_flops)
    for level in range(1, levels + 1):
        best[level] = min(best[level], best[level - 1])
    return best


@settings(max_examples=60, deadline=None)
@given(costs(4, skips=False))
def test_on_chains_no_nested_plan_does_better_at_any_limit(model: ModelCosts) -> None:
    table = byte_table(model)
    works = [table.work(level) for level in range(table.levels + 1)]
    assert works == least_works(model, table.levels)


@pytest.mark.parametrize("seed", range(2))
def test_five_steps(seed: int) -> None:
    model = random_costs(seed, 5, skips=False)
    table = byte_table(model)
    works = [table.work(level) for level in range(table.levels + 1)]
    assert works == least_works(model, table.levels)


@settings(max_examples=60, deadline=None)
@given(costs(7, skips=True))
def test_on_graphs_plans_fit_and_cost_what_the_table_says(model: ModelCosts) -> None:
    table = byte_table(model)
    for level in range(table.levels + 1):
        if table.work(level) < float("inf"):
            result = simulate(model, table.plan(level))
            assert result.peak_bytes - model.standing_bytes <= level
            assert result.recomputed_flops == table.work(level)


@settings(max_examples=30, deadline=None)
@given(costs(8, skips=True))
def test_coarse_units_keep_plans_safe(model: ModelCosts) -> None:
    top = simulate(model, ()).peak_bytes + 20
    table = NestedTable(Spans.of(Lifetimes.of(model)), top, levels=16)
    for level in range(table.levels + 1):
        if table.work(level) < float("inf"):
            result = simulate(model, table.plan(level))
            assert result.peak_bytes - model.standing_bytes <= level * table.unit


def revolve(steps: int, slots: int) -> int:
    """The least forward steps done again on a uniform chain (Griewank & Walther 2000).

    With c checkpoint slots, and r the least number with binomial(c + r, c) >= n, reversing n steps
    takes r n - binomial(c + r, c + 1) forward steps.
    """
    repeats = next(r for r in range(steps + 1) if comb(slots + r, slots) >= steps)
    return repeats * steps - comb(slots + repeats, slots + 1)


@pytest.mark.parametrize("steps", [4, 9, 16, 30])
def test_uniform_chains_follow_revolve(steps: int) -> None:
    """Steps that save only their input, and whose result is free: the model behind Revolve.

    Two tensors come on top of Revolve's slots: the gradients on either side of the step that
    runs backward. Revolve counts the first sweep over n - 1 steps as well, which is not extra.
    """
    table = byte_table(chain(steps, 1, saves="input", free=1.0))
    for slots in range(1, steps):
        assert table.work(slots + 2) == revolve(steps, slots) - (steps - 1)
    assert table.work(2) == float("inf")


def test_a_long_chain_reaches_a_twentieth() -> None:
    model = chain(96, 1)
    table = NestedTable(Spans.of(Lifetimes.of(model)), 12, levels=12)
    result = simulate(model, table.plan(12))
    assert result.peak_bytes <= 12
    assert result.recomputed_flops < 4 * 96
