"""Grouped models show their planners the same bytes and FLOPs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import chain, costs, unet

from keras_ckpt.costs import ModelCosts
from keras_ckpt.planners.equal import plan_equal
from keras_ckpt.planners.group import cheap_cuts, group_steps, ungroup
from keras_ckpt.planners.lifetimes import Lifetimes
from keras_ckpt.planners.simulate import simulate
from keras_ckpt.planners.spans import Spans


def spans_of(model: ModelCosts) -> Spans:
    return Spans.of(Lifetimes.of(model))


@settings(max_examples=100, deadline=None)
@given(costs(9, skips=True, min_steps=2), st.data())
def test_groups_work_as_much_and_never_seem_to_need_less(model, data) -> None:
    steps = len(model.steps)
    inner = data.draw(st.sets(st.integers(1, steps - 1)))
    cuts = [0, *sorted(inner), steps]
    grouped = group_steps(spans_of(model), cuts)
    for segments in [(), plan_equal(grouped, "sqrt")]:
        seen, true = simulate(grouped, segments), simulate(model, ungroup(segments, cuts))
        assert seen.peak_bytes >= true.peak_bytes
        assert seen.recomputed_flops >= true.recomputed_flops


@pytest.mark.parametrize("model", [chain(50), unet(4, convolutions=2)], ids=["chain", "unet"])
def test_cuts_are_even_and_where_little_is_alive(model: ModelCosts) -> None:
    steps, spans = len(model.steps), spans_of(model)
    cuts = cheap_cuts(spans, 10)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, steps, 11)
    assert max(b - a for a, b in pairwise(cuts)) <= 2 * steps / 10
    assert spans.live[cuts].mean() <= spans.live[1:-1].mean()


def test_short_models_are_not_grouped() -> None:
    assert cheap_cuts(spans_of(chain(5)), 100) == [0, 1, 2, 3, 4, 5]
