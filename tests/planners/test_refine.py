"""Planning the insides of segments again, against brute force over all insides."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import chain, costs, resnet, unet
from planner_reference import nested_plans

from keras_ckpt.costs import ModelCosts
from keras_ckpt.planners import refine as refine_module
from keras_ckpt.planners.refine import refine
from keras_ckpt.planners.simulate import simulate
from keras_ckpt.segment import Segment


def outermost(plan: tuple[Segment, ...]) -> list[tuple[int, int]]:
    return [(segment.start, segment.stop) for segment in plan]


@settings(max_examples=60, deadline=None)
@given(costs(5, skips=False), st.data())
def test_on_chains_no_other_inside_needs_less_work(model: ModelCosts, data) -> None:
    plans = nested_plans(0, len(model.steps))
    plan = data.draw(st.sampled_from([p for p in plans if any(s.segments for s in p)] or plans))
    limit = simulate(model, plan).peak_bytes + data.draw(st.integers(0, 9))
    alike = [simulate(model, p) for p in plans if outermost(p) == outermost(plan)]
    result = simulate(model, refine(model, plan, limit))
    assert result.peak_bytes <= limit
    assert result.recomputed_flops == min(
        r.recomputed_flops for r in alike if r.peak_bytes <= limit
    )


@settings(max_examples=100, deadline=None)
@given(costs(5, skips=True), st.data())
def test_on_graphs_the_limit_is_kept_and_work_does_not_grow(model: ModelCosts, data) -> None:
    plan = data.draw(st.sampled_from(nested_plans(0, len(model.steps))))
    before = simulate(model, plan)
    limit = before.peak_bytes + data.draw(st.integers(0, 9))
    refined = refine(model, plan, limit)
    result = simulate(model, refined)
    assert outermost(refined) == outermost(plan)
    assert result.peak_bytes <= limit
    assert result.recomputed_flops <= before.recomputed_flops


@pytest.mark.parametrize("model", [chain(40), unet(4), resnet(4)], ids=["chain", "unet", "resnet"])
def test_long_segments_are_planned_in_groups_and_then_their_insides(model, monkeypatch) -> None:
    monkeypatch.setattr(refine_module, "_MOST_STEPS", 6)
    steps = len(model.steps)
    third = steps // 3
    plan = (Segment(0, 2 * third, tuple(Segment(i, i + 1) for i in range(2 * third - 1))),)
    before = simulate(model, plan)
    limit = before.peak_bytes * 5 // 4
    result = simulate(model, refine(model, plan, limit))
    assert result.peak_bytes <= limit
    assert result.recomputed_flops < before.recomputed_flops
