"""Plans say what they do, survive a file, and refuse another model."""

from pathlib import Path

import pytest

from keras_ckpt.plan import Checkpoint, Plan
from keras_ckpt.segment import Segment

PLAN = Plan(
    model="mlp",
    checkpoints="by hand",
    steps=("embed", "dense", "norm", "head"),
    segments=(Segment(0, 3, (Segment(0, 1),)),),
    kept=(Checkpoint("input", 4096, 0),),
    batch_size=32,
    predicted_peak_bytes=3 * 2**20,
    resting_bytes=2**20,
    predicted_overhead=0.25,
    notes=("A note.",),
)


def test_the_summary_names_steps_bytes_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    PLAN.summary()
    text = capsys.readouterr().out
    assert "3 of 4 steps recomputed in 1 segment" in text
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]
    assert rows[0][1:7] == ["0", "embed", "norm", "3", "input", "4.0 KiB"]
    assert rows[1][1:5] == ["0.0", "embed", "embed", "1"]
    assert rows[2][1:5] == ["plain", "head", "head", "1"]
    assert "batch size 32: 3.0 MiB above resting memory (1.0 MiB)" in text
    assert "25.0% more FLOPs" in text
    assert "A note." in text


def test_a_plan_that_does_nothing_says_so() -> None:
    assert "nothing is recomputed" in str(Plan("mlp", "False", ("a",), ()))


def test_a_file_holds_the_plan(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "keras_ckpt plan, version 1"}'])
def test_a_file_that_holds_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="does not hold a plan"):
        Plan.load(tmp_path / "plan.json")


def test_the_first_difference_to_another_model_is_named() -> None:
    PLAN.check(["embed", "dense", "norm", "head"], "same")
    with pytest.raises(ValueError, match="step 2 is 'norm', the model's is 'relu'"):
        PLAN.check(["embed", "dense", "relu", "head"], "other")
    with pytest.raises(ValueError, match="has 4 steps, model 'longer' has 5"):
        PLAN.check([*PLAN.steps, "more"], "longer")


def test_overlapping_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="overlaps"):
        Plan("mlp", "by hand", ("a", "b", "c"), (Segment(0, 2), Segment(1, 3)))
