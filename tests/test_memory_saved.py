"""The saving is real: activation peaks of whole train steps, read from the allocator."""

import gc
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

from keras_ckpt import CheckpointedModel
from keras_ckpt.memory.allocator import measuring
from tests.runs import MODES, compile_options


def activation_peak(
    model: keras.Model, batch_size: int, mode: str, steps_per_execution: int = 1
) -> int:
    """The most bytes above resting memory in a train step of a model, after a warm-up step."""
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution, **compile_options(mode))
    x = tf.random.normal((batch_size, *model.input_shape[1:]))
    y = tf.random.normal((batch_size, *model.output_shape[1:]))
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    model.fit(data, steps_per_epoch=2, verbose=0)
    gc.collect()
    with measuring("CPU:0") as memory:
        model.fit(data, steps_per_epoch=2, verbose=0)
    return memory.peak_bytes


def chain(depth: int, units: int, activation: str, checkpoints: Any) -> CheckpointedModel:
    x = inputs = keras.Input((units,))
    for _ in range(depth):
        x = keras.layers.Dense(units)(x)
        x = keras.layers.Activation(activation)(x)
    return CheckpointedModel(inputs, keras.layers.Dense(1)(x), checkpoints=checkpoints)


@pytest.mark.parametrize("mode", ["graph", "jit"])
def test_a_deep_gelu_network_needs_a_seventh(mode: str) -> None:
    """C38: XLA keeps the recompute. 64 x (Dense 256, GELU), batch 4096."""
    plain = activation_peak(chain(64, 256, "gelu", False), 4096, mode)
    ours = activation_peak(chain(64, 256, "gelu", "sqrt"), 4096, mode)
    assert plain > 1000 * 2**20
    assert ours <= plain / 7


@pytest.mark.parametrize("mode", MODES)
def test_saving_in_every_mode(mode: str) -> None:
    """C31: 36 tanh layers in 6 segments of 6 take less than 45 % of plain."""
    plain = activation_peak(chain(36, 128, "tanh", False), 2048, mode)
    ours = activation_peak(chain(36, 128, "tanh", 6), 2048, mode)
    assert ours < 0.45 * plain


def test_xla_keeps_the_recompute_over_several_steps_per_execution() -> None:
    """C38."""
    plain = activation_peak(chain(36, 128, "tanh", False), 2048, "jit", steps_per_execution=2)
    ours = activation_peak(chain(36, 128, "tanh", 6), 2048, "jit", steps_per_execution=2)
    assert ours < 0.45 * plain


@pytest.mark.parametrize(
    ("useless", "message"), [(1, "Nothing is recomputed"), (25, "saves no memory")]
)
def test_useless_groupings_save_nothing_and_are_warned_of(useless: int, message: str) -> None:
    """C32: one segment for everything, or one for each step."""
    plain = activation_peak(chain(12, 128, "tanh", False), 2048, "graph")
    with pytest.warns(UserWarning, match=message):
        ours = activation_peak(chain(12, 128, "tanh", useless), 2048, "graph")
    assert ours > 0.9 * plain


def test_traces_are_released() -> None:
    """C40: models that are gone leave no more gradient functions behind than plain ones do."""

    def entries_left(checkpoints: Any) -> int:
        gc.collect()
        before = len(ops.gradient_registry.list())
        for _ in range(4):
            model = chain(12, 8, "tanh", checkpoints)
            model.compile("sgd", "mse")
            model.fit(tf.ones((4, 8)), tf.ones((4, 1)), verbose=0)
            del model
            keras.backend.clear_session()
        gc.collect()
        return len(ops.gradient_registry.list()) - before

    assert entries_left("sqrt") <= entries_left(False)
