"""Each table against what the simulator sees of a single segment."""

from __future__ import annotations

from hypothesis import given, settings
from planner_models import costs

from keras_ckpt.costs import ModelCosts
from keras_ckpt.planners.lifetimes import Lifetimes
from keras_ckpt.planners.simulate import simulate
from keras_ckpt.planners.spans import Spans
from keras_ckpt.segment import Segment


@settings(max_examples=60, deadline=None)
@given(costs(7, skips=True))
def test_tables_agree_with_the_replay_of_single_segments(model: ModelCosts) -> None:
    lifetimes = Lifetimes.of(model)
    spans = Spans.of(lifetimes)
    steps = len(model.steps)
    standing = model.standing_bytes
    for start in range(steps):
        residuals = standing + sum(step.residual_bytes for step in model.steps[:start])
        saved = {s for step in range(start) for s in lifetimes.saved(step)}
        live = {s for s, r in lifetimes.readers.items() if lifetimes.producer[s] < start and r}
        live = {s for s in live if lifetimes.readers[s][-1] >= start}
        for stop in range(start + 1, steps + 1):
            events = simulate(model, (Segment(start, stop),)).events
            most = {
                phase: max(e.bytes for e in events if e.phase == phase and start <= e.step < stop)
                for phase in ("forward", "recompute")
            }
            first = next(i for i, e in enumerate(events) if e.phase == "recompute")
            inside = [e.bytes for e in events[first:] if e.phase == "backward" and e.step >= start]
            inside[0] -= model.steps[stop].weight_gradient_bytes if stop < steps else 0
            arguments = set(lifetimes.arguments(start, stop))
            held = residuals + sum(model.storage_bytes[s] for s in saved | arguments)
            before = residuals + sum(model.storage_bytes[s] for s in saved | live)
            weights = spans.weight_gradients[stop]
            assert spans.forward[start, stop] == most["forward"] - before
            assert spans.recompute[start, stop] == most["recompute"] - held
            assert spans.backward[start, stop] == max(inside) - held - weights
            assert spans.entry[start, stop] == inside[0] - held
            assert (
                spans.work[start, stop] == simulate(model, (Segment(start, stop),)).recomputed_flops
            )
