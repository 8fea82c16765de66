"""Layers whose state does not go through Keras run once, so that training stays exact."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ckpt import CheckpointedModel


class RawNoise(keras.layers.Layer):
    """Draws TensorFlow's own random numbers."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x * tf.cast(tf.random.uniform(tf.shape(x)) > 0.5, x.dtype)


class RawCounter(keras.layers.Layer):
    """Counts in a variable of TensorFlow's own."""

    def build(self, shape: Any) -> None:
        self.count = tf.Variable(0.0, trainable=False)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.count.assign_add(1.0)
        return x * self.count


def network(layer: keras.layers.Layer) -> CheckpointedModel:
    x = inputs = keras.Input((8,))
    for i, step in enumerate([layer, *[keras.layers.Activation("linear") for _ in range(4)]]):
        x = step(x)
        x = keras.layers.Activation("linear", name=f"after_{i}")(x)
    return CheckpointedModel(inputs, x, checkpoints=3)


@pytest.mark.filterwarnings("ignore:The plan for model")
def test_random_numbers_of_tensorflow_are_drawn_once() -> None:
    model = network(RawNoise(name="noise"))
    x = tf.ones((4, 8))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x, training=True)
    np.testing.assert_array_equal(tape.gradient(y, x), y)
    assert any("'noise' is never recomputed" in note for note in model.plan.notes)
    assert model.plan.segments


@pytest.mark.filterwarnings("ignore:The plan for model")
def test_variables_of_tensorflow_are_updated_once() -> None:
    counter = RawCounter(name="counter")
    model = network(counter)
    before = float(counter.count)
    x = tf.ones((4, 8))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x, training=True)
    tape.gradient(y, x)
    assert float(counter.count) == before + 1.0
    assert any("'counter' is never recomputed" in note for note in model.plan.notes)
