"""The simulator against hand-computed timelines and against an independent replay."""

from __future__ import annotations

import ast
import dataclasses
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import chain, costs, densenet, resnet, unet
from planner_reference import nested_plans, one_level_plans, reference_replay

import keras_ckpt.planners
from keras_ckpt.costs import ModelCosts, StepCost
from keras_ckpt.planners.simulate import simulate
from keras_ckpt.segment import Segment


def timeline(model: ModelCosts, segments: tuple[Segment, ...]) -> list[tuple[str, int, int]]:
    return [(e.phase, e.step, e.bytes) for e in simulate(model, segments).events]


def test_plain_chain_by_hand() -> None:
    assert timeline(chain(3, size=10), ()) == [
        ("forward", 0, 10), ("forward", 1, 20), ("forward", 2, 30),
        ("backward", 2, 40),  # the loss: the last output and its gradient
        ("backward", 2, 50),  # three outputs, two gradients
        ("backward", 1, 40),
        ("backward", 0, 20),
    ]  # fmt: skip


def test_one_segment_by_hand() -> None:
    assert timeline(chain(4, size=10), (Segment(0, 2),)) == [
        ("forward", 0, 10), ("forward", 1, 20), ("forward", 2, 20), ("forward", 3, 20),
        ("backward", 3, 30), ("backward", 3, 40), ("backward", 2, 30),
        ("recompute", 0, 20), ("recompute", 1, 30),  # the gradient of the segment's output is there
        ("backward", 1, 40), ("backward", 0, 20),
    ]  # fmt: skip


def test_the_output_of_a_segments_free_last_step_is_not_made_again() -> None:
    model = chain(4, size=10, saves="input", free=1.0)
    result = simulate(model, (Segment(0, 2),))
    recompute = [(e.step, e.bytes) for e in result.events if e.phase == "recompute"]
    assert recompute == [(0, 20), (1, 20)]
    assert result.recomputed_flops == 1.0
    assert result.forward_runs == (2, 1, 1, 1)
    assert result.overhead == 1.0 / 12


def test_a_saved_output_is_made_again_although_its_operation_is_last() -> None:
    assert simulate(chain(4, free=1.0), (Segment(0, 2),)).recomputed_flops == 2.0


def test_nested_runs() -> None:
    result = simulate(chain(6), (Segment(0, 4, (Segment(0, 2),)),))
    assert result.forward_runs == (3, 3, 2, 2, 1, 1)
    assert result.recomputed_flops == 6.0


def test_a_nested_segment_at_the_end_does_not_run_forward_twice() -> None:
    tail = simulate(chain(6), (Segment(0, 4, (Segment(2, 4),)),))
    assert tail.forward_runs == (2, 2, 2, 2, 1, 1)
    assert tail.peak_bytes == simulate(chain(6), (Segment(0, 4),)).peak_bytes


def test_weight_gradients_wait_for_the_outermost_gate() -> None:
    model = chain(3, size=0, weight_gradient=5)
    free = [e.bytes for e in simulate(model, ()).events if e.phase == "backward"]
    gated = simulate(model, (Segment(0, 3, (Segment(0, 2),)),))
    assert free == [0, 5, 10, 10]  # and the weights of the step before are being updated
    assert [e.bytes for e in gated.events if e.phase == "backward"] == [0, 5, 10, 15]


def test_weights_of_a_segment_are_updated_while_one_more_step_runs_backward() -> None:
    model = chain(4, size=0, weight_gradient=5)
    events = simulate(model, (Segment(0, 2), Segment(2, 4))).events
    assert [e.bytes for e in events if e.phase == "backward"] == [0, 5, 10, 15, 10]


def test_standing_bytes_are_in_use_throughout() -> None:
    model = chain(4)
    standing = dataclasses.replace(model, standing_bytes=100)
    events = zip(timeline(model, ()), timeline(standing, ()), strict=True)
    assert all(bare[2] + 100 == full[2] for bare, full in events)


def test_a_long_skip_is_counted_once_and_held_until_its_segment_is_done() -> None:
    steps = (
        StepCost("a", (0,), (1,)),
        StepCost("b", (1,), (2,)),
        StepCost("c", (2,), (3,)),
        StepCost("d", (3, 1), (4,)),
    )
    model = ModelCosts(steps, (0, 100, 10, 10, 10), (False,) * 5, (0,), (4,))
    assert timeline(model, (Segment(1, 2), Segment(2, 4))) == [
        ("forward", 0, 100), ("forward", 1, 110), ("forward", 2, 120), ("forward", 3, 130),
        ("backward", 3, 120),
        ("recompute", 2, 120), ("recompute", 3, 130), ("backward", 3, 110), ("backward", 2, 110),
        ("recompute", 1, 110), ("backward", 1, 100), ("backward", 0, 0),
    ]  # fmt: skip


def test_peak_event_names_the_step() -> None:
    result = simulate(chain(3, size=10), ())
    assert result.peak_event is not None
    assert (result.peak_event.phase, result.peak_event.step, result.peak_bytes) == (
        "backward", 2, 50,
    )  # fmt: skip


def test_an_empty_model_has_no_peak() -> None:
    result = simulate(ModelCosts((), (), ()), ())
    assert (result.peak_bytes, result.peak_event, result.overhead) == (0, None, 0.0)


@pytest.mark.parametrize(
    ("steps", "outputs", "message"),
    [
        ((StepCost("late", (2,), (1,)),), (1,), "late"),
        ((StepCost("a", (0,), (1,), (2,)),), (1,), "saves"),
        ((StepCost("a", (0,), (1,)), StepCost("b", (1,), (1,))), (1,), "one producer"),
        ((StepCost("a", (0,), (1,)),), (2,), "loss"),
    ],
)
def test_costs_that_contradict_themselves_are_refused(steps, outputs, message) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(ModelCosts(steps, (1, 1, 1), (True,) * 3, (0,), outputs), ())


def test_segments_outside_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 4\)"):
        simulate(chain(3), (Segment(1, 4),))


@settings(max_examples=300, deadline=None)
@given(costs(5, skips=True), st.data())
def test_nested_plans_replay_as_the_reference_says(model: ModelCosts, data: st.DataObject) -> None:
    segments = data.draw(st.sampled_from(nested_plans(0, len(model.steps))))
    expected, flops = reference_replay(model, segments)
    assert timeline(model, segments) == expected
    assert simulate(model, segments).recomputed_flops == flops


@settings(max_examples=300, deadline=None)
@given(costs(9, skips=True), st.data())
def test_one_level_plans_replay_as_the_reference_says(model, data) -> None:
    segments = data.draw(st.sampled_from(one_level_plans(0, len(model.steps))))
    assert timeline(model, segments) == reference_replay(model, segments)[0]


@pytest.mark.parametrize(
    "model", [unet(3), densenet(2, 5), resnet(3)], ids=["unet", "dense", "res"]
)
def test_known_shapes_replay_as_the_reference_says(model: ModelCosts) -> None:
    third = len(model.steps) // 3
    segments = (Segment(0, third, (Segment(1, third - 1),)), Segment(third, 2 * third))
    assert timeline(model, segments) == reference_replay(model, segments)[0]


@pytest.mark.parametrize(("steps", "count"), enumerate([2, 8, 48, 352, 2880, 25216], start=1))
def test_the_number_of_nested_plans_is_the_known_one(steps: int, count: int) -> None:
    assert len(set(nested_plans(0, steps))) == count


def test_planners_do_not_know_tensorflow() -> None:
    for module in pathlib.Path(keras_ckpt.planners.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in {"tensorflow", "keras"}, (module.name, name)
                if name.startswith("keras_ckpt"):
                    pure = name.startswith(("keras_ckpt.planners", "keras_ckpt.costs"))
                    assert pure or name == "keras_ckpt.segment", (module.name, name)
