"""The least peak at one level, against brute force over every one-level plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from planner_models import chain, costs, densenet, random_costs, resnet, unet
from planner_reference import one_level_plans

from keras_ckpt.costs import ModelCosts, StepCost
from keras_ckpt.planners.memory import plan_memory
from keras_ckpt.planners.simulate import simulate
from keras_ckpt.segment import Segment, segments_between


def peak_and_work(model: ModelCosts, segments: tuple[Segment, ...]) -> tuple[int, float]:
    result = simulate(model, segments)
    return result.peak_bytes, result.recomputed_flops


def brute_force(model: ModelCosts) -> tuple[int, float]:
    return min(peak_and_work(model, plan) for plan in one_level_plans(0, len(model.steps)))


@settings(max_examples=60, deadline=None)
@given(costs(7, skips=True))
def test_no_one_level_plan_of_a_graph_has_a_lower_peak_or_less_work(model: ModelCosts) -> None:
    assert peak_and_work(model, plan_memory(model)) == brute_force(model)


@settings(max_examples=40, deadline=None)
@given(costs(7, skips=False))
def test_no_one_level_plan_of_a_chain_has_a_lower_peak_or_less_work(model: ModelCosts) -> None:
    assert peak_and_work(model, plan_memory(model)) == brute_force(model)


def test_nine_steps() -> None:
    model = random_costs(1, 9, skips=True)
    assert peak_and_work(model, plan_memory(model)) == brute_force(model)


def equal_cuts(steps: int, count: int) -> tuple[Segment, ...]:
    return segments_between([round(i * steps / count) for i in range(count)], steps)


@pytest.mark.parametrize(
    "model",
    [
        chain(48),
        chain(48, saves="input", free=1.0),
        unet(4, convolutions=2),
        densenet(3, 8),
        resnet(8),
    ],
    ids=["chain", "free_chain", "unet", "densenet", "resnet"],
)
def test_never_worse_than_any_equal_cut(model: ModelCosts) -> None:
    steps = len(model.steps)
    best = min(simulate(model, equal_cuts(steps, k)).peak_bytes for k in range(1, steps))
    found = simulate(model, plan_memory(model))
    assert found.peak_bytes <= best < simulate(model, ()).peak_bytes
    assert max(found.forward_runs) <= 2


def test_a_plain_step_in_the_middle_can_lower_the_peak() -> None:
    """A pooling reads a large tensor and saves a small mask: outside, the tensor stays dropped."""
    steps = (
        StepCost("convolution", (0,), (1,), (), 50, 9.0, 9.0, 9.0),
        StepCost("pool", (1,), (2,), (), 5, 1.0, 1.0),
        StepCost("a", (2,), (3,), (2,), 80, 9.0, 9.0, 9.0),
        StepCost("b", (3,), (4,), (3,), 80, 9.0, 9.0, 9.0),
    )
    model = ModelCosts(steps, (0, 100, 10, 10, 1), (False,) * 5, (0,), (4,))
    segmented = [p for p in one_level_plans(0, 4) if p and p[-1].stop == sum(map(length, p))]
    best_without = min(simulate(model, plan).peak_bytes for plan in segmented)
    assert simulate(model, plan_memory(model)).peak_bytes < best_without


def length(segment: Segment) -> int:
    return segment.stop - segment.start


@pytest.mark.parametrize("model", [chain(1), ModelCosts((), (), ())], ids=["one_step", "empty"])
def test_nothing_to_save_gives_an_empty_plan(model: ModelCosts) -> None:
    assert plan_memory(model) == ()


def test_a_chain_reaches_the_square_root_law() -> None:
    peak = simulate(chain(400, size=1), plan_memory(chain(400, size=1))).peak_bytes
    assert peak <= 2 * 20 + 4


def test_a_thousand_steps_raise_no_recursion_error() -> None:
    model = chain(1000)
    assert simulate(model, plan_memory(model)).peak_bytes < simulate(model, ()).peak_bytes / 10
