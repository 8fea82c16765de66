"""The process-wide switch: on, it recomputes in models it does not own; off, it leaves no trace."""

import gc
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ckpt

CALLS: list[str] = []


class Counted(keras.layers.Layer):
    """Notes each of its calls on data."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        if tf.is_tensor(x) and tf.executing_eagerly():
            CALLS.append(self.name)
        return keras.ops.tanh(x)


class Subclassed(keras.Model):
    """A plain Keras model that nobody wants to change."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Counted(name=f"block_{i}") for i in range(4)]

    def call(self, x: Any, training: bool | None = None) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def functional() -> keras.Model:
    x = inputs = keras.Input((3,))
    for i in range(4):
        x = Counted(name=f"block_{i}")(x)
    return keras.Model(inputs, x)


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), *[Counted(name=f"block_{i}") for i in range(4)]])


def calls_in_training(model: keras.Model) -> list[int]:
    x = tf.random.normal((2, 3), seed=0)
    model(x, training=True)
    CALLS.clear()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x, training=True)
    tape.gradient(y, x)
    return [CALLS.count(f"block_{i}") for i in range(4)]


@pytest.mark.parametrize("build", [functional, sequential, Subclassed])
def test_models_recompute_while_it_is_on(build: Any) -> None:
    model = build()
    assert calls_in_training(model) == [1, 1, 1, 1]
    with keras_ckpt.enabled(checkpoints=2):
        assert calls_in_training(model) == [2, 2, 1, 1]
        CALLS.clear()
        model(tf.ones((2, 3)))
        assert [f"block_{i}" for i in range(4)] == CALLS
    assert calls_in_training(model) == [1, 1, 1, 1]


def test_off_it_leaves_no_trace() -> None:
    before = dict(vars(keras.Model))
    model = functional()
    keras_ckpt.enable(checkpoints=2)
    calls_in_training(model)
    keras_ckpt.disable()
    keras_ckpt.disable()
    assert dict(vars(keras.Model)) == before
    assert "call" not in vars(model)


def test_models_that_are_gone_are_released() -> None:
    with keras_ckpt.enabled(checkpoints=2):
        model = Subclassed()
        calls_in_training(model)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


def test_train_steps_traced_under_it_are_traced_again() -> None:
    model = functional()
    model.compile("sgd", "mse")
    with keras_ckpt.enabled(checkpoints=2):
        model.fit(np.ones((4, 3)), np.ones((4, 3)), verbose=0)
        assert model.train_function is not None
    assert model.train_function is None


def test_a_block_brings_back_what_was_in_force_before() -> None:
    model = functional()
    keras_ckpt.enable(checkpoints=2)
    try:
        with keras_ckpt.enabled(checkpoints=4):
            assert calls_in_training(model) == [2, 2, 2, 1]
        assert calls_in_training(model) == [2, 2, 1, 1]
    finally:
        keras_ckpt.disable()


def test_a_checkpointed_model_keeps_its_own_setting() -> None:
    blocks = [Counted(name=f"block_{i}") for i in range(4)]
    model = keras_ckpt.CheckpointedSequential([keras.Input((3,)), *blocks], checkpoints=False)
    with keras_ckpt.enabled(checkpoints=2):
        assert calls_in_training(model) == [1, 1, 1, 1]


def test_training_equals_training_without_it() -> None:
    def run() -> list[float]:
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.5)] * 1
        layers += [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile("adam", "mse", run_eagerly=True)
        x = np.linspace(0, 1, 24).reshape(8, 3)
        return model.fit(x, x[:, :1], epochs=3, batch_size=4, verbose=0).history["loss"]

    plain = run()
    with keras_ckpt.enabled(checkpoints=3):
        assert run() == plain


def test_a_bad_setting_is_refused_and_changes_nothing() -> None:
    with pytest.raises(ValueError, match="Unknown mode"):
        keras_ckpt.enable("most")
    assert "__call__" not in vars(keras.Model)
