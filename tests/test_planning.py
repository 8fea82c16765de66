"""From a model and a setting to a plan: every mode, and every way in which there is none."""

import warnings
from typing import Any

import keras
import pytest

from keras_ckpt import CheckpointMarker, make_plan
from keras_ckpt.graph import linearise
from keras_ckpt.planning import input_specs


def network(depth: int = 12, width: int = 32) -> keras.Model:
    x = inputs = keras.Input((width,))
    for i in range(depth):
        x = keras.layers.Dense(width, name=f"dense_{i}")(x)
        x = keras.layers.LayerNormalization(name=f"norm_{i}")(x)
        x = keras.layers.Activation("gelu", name=f"gelu_{i}")(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="head")(x))


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return network()


def peaks(model: keras.Model, settings: list[Any], **options: Any) -> list[int]:
    return [make_plan(model, x, batch_size=512, **options).predicted_peak_bytes for x in settings]


def test_each_mode_is_predicted_to_save(model: keras.Model) -> None:
    plain, memory, speed, sqrt, four, named = peaks(
        model, [False, "memory", "speed", "sqrt", 4, ["gelu_3", "gelu_7"]]
    )
    assert memory <= min(speed, sqrt, four, named)
    assert max(memory, speed, sqrt, four, named) < plain


def test_memory_is_never_worse_than_equal_cuts(model: keras.Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memory, *equal = peaks(model, ["memory", *range(1, 38)])
    assert memory <= min(equal)


def test_speed_recomputes_no_product() -> None:
    plan = make_plan(network(depth=6, width=256), "speed", batch_size=512)
    assert plan.segments
    assert plan.predicted_overhead < 0.05


def test_a_plan_keeps_what_its_segments_read(model: keras.Model) -> None:
    plan = make_plan(model, ["gelu_3", "gelu_7"], batch_size=512)
    assert [(x.name, x.bytes, x.segment) for x in plan.kept] == [
        ("input", 512 * 32 * 4, 0),
        ("gelu_3", 512 * 32 * 4, 1),
    ]


def test_a_memory_limit_is_kept_with_the_least_work(model: keras.Model) -> None:
    plain = make_plan(model, False, batch_size=512)
    whole = plain.resting_bytes + plain.predicted_peak_bytes
    last_overhead = 0.0
    for share in (1.0, 0.7, 0.5, 0.35):
        limit = int(whole * share)
        plan = make_plan(model, memory_limit=limit, batch_size=512)
        assert plan.resting_bytes + plan.predicted_peak_bytes <= limit
        assert plan.predicted_overhead >= last_overhead
        last_overhead = plan.predicted_overhead
    assert not make_plan(model, memory_limit=whole, batch_size=512).segments


def test_a_limit_that_cannot_be_kept_is_refused_with_advice(model: keras.Model) -> None:
    with pytest.raises(ValueError, match=r"No plan trains .*peak at step '.*Lower the batch size"):
        make_plan(model, memory_limit="300KiB", batch_size=512)
    with pytest.raises(ValueError, match="Make the model smaller"):
        make_plan(model, memory_limit="1KiB", batch_size=512)


def test_a_model_of_weights_alone_says_that_there_is_nothing_to_gain() -> None:
    """C31."""
    inputs = keras.Input((512,))
    heavy = keras.Model(inputs, keras.layers.Dense(512)(inputs))
    with pytest.warns(UserWarning, match="Nothing is recomputed"):
        plan = make_plan(heavy, batch_size=1)
    assert not plan.segments
    assert "recomputation cannot lower" in str(plan)


def test_an_open_length_is_assumed_and_said() -> None:
    inputs = keras.Input((None, 16))
    x = inputs
    for _ in range(6):
        x = keras.layers.Dense(16, activation="gelu")(x)
    plan = make_plan(keras.Model(inputs, x), checkpoints=2)
    assert any("was taken to be 128" in note for note in plan.notes)
    linear = linearise(keras.Model(inputs, x))
    (spec,) = input_specs(linear, batch_size=4, shapes=[(None, 7, 16)])
    assert spec.shape == (4, 7, 16)


def test_markers_are_the_default_where_there_are_any() -> None:
    x = inputs = keras.Input((8,))
    for i in range(6):
        x = keras.layers.Dense(8, activation="gelu", name=f"dense_{i}")(x)
        x = CheckpointMarker(name=f"mark_{i}")(x) if i in (1, 3) else x
    plan = make_plan(keras.Model(inputs, x), checkpoints=None, batch_size=512)
    assert plan.checkpoints == "collection"
    assert [x.name for x in plan.kept] == ["input", "mark_1"]
