"""Two passes from one state, with one update."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ckpt.replay import FirstPass, SecondPass


def test_the_first_pass_updates_and_the_second_starts_over() -> None:
    counter = keras.Variable(1.0, trainable=False)
    unread = keras.Variable(5.0, trainable=False)

    def count() -> float:
        counter.assign_add(2.0)
        return float(counter)

    with FirstPass() as first:
        assert count() == 3.0
    assert float(counter) == 3.0
    assert [(v.path, float(value)) for v, value in first.state_before] == [(counter.path, 1.0)]
    with SecondPass(first.state_before):
        assert count() == 3.0
        assert float(unread) == 5.0
    assert float(counter) == 3.0


def test_a_value_that_is_only_read_is_the_one_of_then() -> None:
    statistic = keras.Variable(1.0, trainable=False)
    with FirstPass() as first:
        assert float(statistic) == 1.0
    statistic.assign(9.0)
    with SecondPass(first.state_before):
        assert float(statistic) == 1.0


def test_a_weight_that_is_assigned_keeps_its_gradient() -> None:
    """What SpectralNormalization does: the gradient of the assigned weight is the weight's."""
    weight = keras.Variable(3.0)

    def normalised(x: tf.Tensor) -> tf.Tensor:
        weight.assign(tf.stop_gradient(weight.value / 3.0))
        return weight.value * x

    with FirstPass() as first:
        assert float(normalised(tf.constant(5.0))) == 5.0
    weight.assign(7.0)
    with tf.GradientTape() as tape, SecondPass(first.state_before):
        y = normalised(tf.constant(5.0))
    assert float(y) == 5.0
    assert float(tape.gradient(y, weight.value)) == 5.0
    assert float(weight) == 7.0


def test_passes_nest() -> None:
    counter = keras.Variable(0.0, trainable=False)
    with FirstPass() as outer, FirstPass() as inner:
        counter.assign_add(1.0)
    assert float(counter) == 1.0
    with SecondPass(outer.state_before) as second, FirstPass() as again:
        counter.assign_add(1.0)
    assert float(counter) == 1.0
    assert float(second.get_current_value(counter)) == 1.0
    ((_, value),) = again.state_before
    np.testing.assert_array_equal(value, inner.state_before[0][1])


def test_an_update_inside_a_loop_is_refused_and_named() -> None:
    counter = keras.Variable(0.0, trainable=False, name="counter")

    def step(x: tf.Tensor) -> tf.Tensor:
        counter.assign_add(1.0)
        return x + 1

    @tf.function(autograph=False)
    def loop() -> tf.Tensor:
        with FirstPass():
            return tf.while_loop(lambda x: x < 3, lambda x: [step(x)], [tf.constant(0)])[0]

    with pytest.raises(ValueError, match="'counter' is updated inside a TensorFlow loop"):
        loop()
