from itertools import pairwise

import pytest
import tensorflow as tf

from keras_ckpt.memory import profile
from keras_ckpt.memory.timeline import Row, held_at_peak, spans_of
from tests.memory.models import checkpointed, plain

KIB = 2**10
ACTIVATION = 1024 * 64 * 4


@pytest.fixture(scope="module", params=["graph", "eager"])
def report(request):
    return profile(checkpointed(request.param), batch_size=1024)


@pytest.fixture(scope="module")
def plain_report():
    return profile(plain(), batch_size=1024)


def test_the_curve_is_the_allocators(report):
    assert max(row.bytes for row in report.timeline) == report.peak_bytes


def test_what_is_taken_is_given_back(report):
    # Logs of the step, and nothing else, may outlive it.
    assert abs(report.timeline[-1].bytes) <= 64 * KIB
    assert abs(sum(row.change for row in report.timeline)) <= 64 * KIB
    in_use = 0
    for row in report.timeline:
        in_use += row.change
        assert row.bytes == in_use


def test_time_goes_on(report):
    times = [row.seconds for row in report.timeline]
    assert times == sorted(times)
    assert times[0] >= 0


def test_large_blocks_are_told_by_step_and_phase(report):
    forward = {r.step for r in report.timeline if r.phase == "forward" and r.change >= ACTIVATION}
    recomputed = {
        r.step for r in report.timeline if r.phase == "recompute" and r.change >= ACTIVATION
    }
    steps = {f"tanh_{i}" for i in range(12)}
    assert steps <= forward
    # The last step of a segment is not needed for its own gradient: its product is pruned.
    planned = {
        report.plan.steps[i] for s in report.plan.segments for i in range(s.start, s.stop - 1)
    }
    # The tie that makes a segment wait for its gradients copies its input, and is no step.
    assert planned <= recomputed <= steps | {""}
    for row in report.timeline:
        if row.step:
            inside = [
                i
                for i, s in enumerate(report.plan.segments)
                if row.step in report.plan.steps[s.start : s.stop]
            ]
            assert [row.segment] == (inside or [None])


def test_phases_follow_each_other(report):
    rows = [row for row in report.timeline if row.step and row.change >= ACTIVATION]
    phases = [row.phase for row in rows]
    assert phases[0] == "forward"
    assert phases.index("recompute") > 12
    assert {row.phase for row in report.timeline} == {"forward", "recompute", "backward", "update"}
    spans = spans_of(report.timeline)
    assert spans[0].phase == "forward"
    recomputed = [s.segment for s in spans if s.phase == "recompute" and s.segment is not None]
    assert list(dict.fromkeys(recomputed)) == [2, 1, 0]
    for before, after in pairwise(spans):
        assert before.start < before.stop == after.start


def test_a_plain_model_recomputes_nothing(plain_report):
    assert {row.phase for row in plain_report.timeline} == {"forward", "backward", "update"}
    assert {row.segment for row in plain_report.timeline} == {None}


def test_the_forward_pass_holds_the_memory_of_a_plain_model(plain_report):
    holders = plain_report.largest(100)
    kept = {h.step for h in holders if h.phase == "forward" and h.bytes >= ACTIVATION}
    # The backward pass may be under way at the peak.
    assert len(kept & {f"tanh_{i}" for i in range(12)}) >= 6
    held = sum(h.bytes for h in holders)
    # The batch of the step before, which was there at the start, may be given back meanwhile.
    assert abs(held - plain_report.peak_bytes) <= ACTIVATION + 64 * KIB
    assert [h.bytes for h in holders] == sorted((h.bytes for h in holders), reverse=True)
    assert len(plain_report.largest(3)) == 3
    assert "tanh_" in str(plain_report.largest())


def test_under_xla_the_curve_is_there_and_nothing_is_attributed():
    report = profile(checkpointed("xla"), batch_size=1024)
    assert max(row.bytes for row in report.timeline) == report.peak_bytes
    assert {(row.step, row.phase) for row in report.timeline} == {("", "")}
    assert not report.largest()
    assert "XLA compiles the train step as a whole" in str(report)


def test_a_profiler_that_is_at_work_is_left_alone(tmp_path):
    tf.profiler.experimental.start(str(tmp_path))
    try:
        with pytest.raises(RuntimeError, match="timeline=False"):
            profile(plain(), batch_size=64, steps=1)
        assert profile(plain(), batch_size=64, steps=1, timeline=False).peak_bytes > 0
    finally:
        tf.profiler.experimental.stop()


def row(seconds, change, bytes, address, phase="forward", step="a"):
    return Row(seconds, bytes, change, "op", step, None, phase, address)


def test_holders_by_hand():
    rows = [row(0, 4, 4, 1), row(1, 8, 12, 2), row(2, -4, 8, 1), row(3, 5, 13, 1), row(4, -8, 5, 2)]
    assert held_at_peak(rows) == [rows[1], rows[3]]
    assert held_at_peak([]) == []


def test_a_gradient_that_is_early_is_part_of_the_forward_pass():
    rows = [
        row(0, 4, 4, 1),
        row(1, 4, 8, 2, "backward"),
        row(2, 4, 12, 3),
        row(3, 4, 16, 4, "backward"),
    ]
    assert [span.phase for span in spans_of(rows)] == ["forward", "backward"]
    assert spans_of([]) == []
