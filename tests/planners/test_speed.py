"""Expensive steps are never run twice, and the peak is the least that this allows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from planner_models import chain, costs, densenet, resnet, unet
from planner_reference import one_level_plans

from keras_ckpt.costs import ModelCosts
from keras_ckpt.planners.lifetimes import is_free
from keras_ckpt.planners.simulate import simulate
from keras_ckpt.planners.speed import plan_speed
from keras_ckpt.segment import Segment


def recomputes_an_expensive_step(model: ModelCosts, segments: tuple[Segment, ...]) -> bool:
    for segment in segments:
        for index in range(segment.start, segment.stop):
            step = model.steps[index]
            free = step.free_flops == step.forward_flops and is_free(model, index)
            if step.expensive and not (index + 1 == segment.stop and free):
                return True
    return False


@settings(max_examples=100, deadline=None)
@given(costs(7, skips=True))
def test_no_plan_that_keeps_expensive_steps_has_a_lower_peak_or_less_work(model) -> None:
    legal = [
        (result.peak_bytes, result.recomputed_flops)
        for plan in one_level_plans(0, len(model.steps))
        if not recomputes_an_expensive_step(model, plan)
        for result in [simulate(model, plan)]
    ]
    plan = plan_speed(model)
    result = simulate(model, plan)
    assert not recomputes_an_expensive_step(model, plan)
    assert (result.peak_bytes, result.recomputed_flops) == min(legal)


@pytest.mark.parametrize("model", [unet(4, convolutions=2), resnet(6)], ids=["unet", "resnet"])
def test_known_shapes_save_memory_for_little_work(model: ModelCosts) -> None:
    result = simulate(model, plan_speed(model))
    assert result.overhead < 0.05
    assert result.peak_bytes < 0.9 * simulate(model, ()).peak_bytes


def test_only_expensive_outputs_are_kept() -> None:
    plan = plan_speed(resnet(6))
    kept = {storage for s in plan for storage in resnet(6).steps[s.start].inputs}
    made_by = {out: step for step in resnet(6).steps for out in step.outputs}
    assert plan
    assert all(made_by[storage].expensive for storage in kept if storage in made_by)


def test_nothing_to_save() -> None:
    assert plan_speed(chain(1)) == ()
    assert plan_speed(ModelCosts((), (), ())) == ()
    assert simulate(densenet(1, 4), plan_speed(densenet(1, 4))).overhead >= 0
