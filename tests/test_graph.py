"""The linearised model has the steps, the live sets and the results of the model."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ckpt.execute import Execution
from keras_ckpt.graph import LinearModel, linearise


def names(model: keras.Model) -> list[str]:
    return [step.name for step in linearise(model).steps]


def live_names(linear: LinearModel, boundary: int) -> set[str]:
    makers = [linear.produced_by(t) for t in linear.live(boundary)]
    return {"input" if i < 0 else linear.steps[i].name for i in makers}


def unet() -> keras.Model:
    inputs = keras.Input((8,))
    down_1 = keras.layers.Dense(8, name="down_1")(inputs)
    down_2 = keras.layers.Dense(4, name="down_2")(down_1)
    up = keras.layers.Dense(8, name="up")(down_2)
    skip = keras.layers.Add(name="skip")([up, down_1])
    return keras.Model(inputs, keras.ops.tanh(skip))


def test_layers_and_operations_are_steps_in_order() -> None:
    *layers, operation = names(unet())
    assert layers == ["down_1", "down_2", "up", "skip"]
    assert operation.startswith("tanh")


def test_a_long_skip_is_alive_until_it_is_read() -> None:
    linear = linearise(unet())
    assert live_names(linear, 1) == {"down_1"}
    assert live_names(linear, 2) == {"down_1", "down_2"}
    assert live_names(linear, 3) == {"down_1", "up"}
    assert live_names(linear, 4) == {"skip"}
    assert [linear.steps[linear.produced_by(t)].name for t in linear.reads(2, 4)] == [
        "down_2",
        "down_1",
    ]
    assert [linear.steps[linear.produced_by(t)].name for t in linear.escapes(0, 2)] == [
        "down_1",
        "down_2",
    ]


def test_nested_models_are_flattened_and_repeated_calls_numbered() -> None:
    inner = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(4, name="a"), keras.layers.Dense(4, name="b")],
        name="inner",
    )
    inputs = keras.Input((4,))
    outer = keras.Model(inputs, inner(inner(inputs)), name="outer")
    assert names(outer) == ["inner/a", "inner/b", "inner#2/a", "inner#2/b"]
    deepest = keras.Sequential([keras.Input((4,)), outer], name="deepest")
    assert names(deepest)[0] == "outer/inner/a"


def masked_inner() -> keras.Model:
    inputs = keras.Input((5, 3))
    flat = keras.ops.sum(keras.layers.Dense(3)(inputs), axis=2)
    return keras.Model(inputs, flat, name="inner")


def masked() -> keras.Model:
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(7, 3, mask_zero=True)(inputs)
    return keras.Model(inputs, masked_inner()(x))


def cast() -> keras.Model:
    inner = keras.Sequential([keras.Input((4,), dtype="float32"), keras.layers.Dense(2)])
    inputs = keras.Input((4,), dtype="float16")
    return keras.Model(inputs, inner(inputs))


@pytest.mark.parametrize("build", [unet, masked, cast])
def test_running_the_steps_is_running_the_model(build: Any) -> None:
    """Values, dtypes and masks, with a nested model's casts and masks."""
    keras.utils.set_random_seed(0)
    model = build()
    linear = linearise(model)
    shape = (2, *model.inputs[0].shape[1:])
    x = tf.cast(tf.random.uniform(shape, 0, 3, dtype=tf.int32), model.inputs[0].dtype)
    (ours,) = Execution(linear, (), {"training": True}).run([x])
    plain = model(x, training=True)
    np.testing.assert_array_equal(ours, plain)
    assert ours.dtype == plain.dtype
    mask, plain_mask = getattr(ours, "_keras_mask", None), getattr(plain, "_keras_mask", None)
    assert (mask is None) == (plain_mask is None)
    if mask is not None:
        np.testing.assert_array_equal(mask, plain_mask)


def test_a_model_without_a_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="has no graph of layers"):
        linearise(keras.Sequential([keras.layers.Dense(2)]))
