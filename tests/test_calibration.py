import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ckpt import calibration
from keras_ckpt.calibration import calibrate, can_calibrate
from keras_ckpt.costs import ModelCosts
from keras_ckpt.graph import linearise
from keras_ckpt.tracing import trace_costs

layers = keras.layers
MIB = 2**20
# The allocator rounds up, and may give out a somewhat larger piece than was asked for.
SLACK = MIB


class Square(layers.Layer):
    """Makes a tensor of 1 MiB in each pass, which neither returns or keeps."""

    def call(self, x):
        @tf.custom_gradient
        def square(x):
            return self.mix(x), self.mix

        return square(x)

    def mix(self, x):
        return tf.reduce_sum(tf.matmul(x, x, transpose_a=True), axis=0) * tf.ones_like(x)


def costs_of(model: keras.Model, batch_size: int) -> tuple[ModelCosts, ModelCosts]:
    linear = linearise(model)
    specs = [keras.KerasTensor((batch_size, *x.shape[1:]), x.dtype) for x in model.inputs]
    traced = trace_costs(linear, specs, model)
    return traced, calibrate(traced, linear, specs, model)


@pytest.fixture
def model() -> keras.Model:
    x = keras.Input((512,))
    h = layers.Dense(512, activation="tanh")(x)
    h = layers.Dropout(0.5, seed=1)(Square()(h))
    return keras.Model(x, layers.BatchNormalization()(h))


def test_workspace_is_measured_where_the_answer_is_known(model):
    _, calibrated = costs_of(model, batch_size=64)
    dense, square = calibrated.steps[:2]
    assert dense.forward_workspace < SLACK
    # The product of 1 MiB is gone before the result, of 128 KiB, is allocated.
    result = 64 * 512 * 4
    assert 1 * MIB <= square.forward_workspace + result < 1 * MIB + SLACK
    assert 1 * MIB <= square.backward_workspace + result < 1 * MIB + SLACK


def test_only_workspace_changes(model):
    traced, calibrated = costs_of(model, batch_size=64)
    for before, after in zip(traced.steps, calibrated.steps, strict=True):
        assert (before.name, before.saved, before.residual_bytes, before.forward_flops) == (
            (after.name, after.saved, after.residual_bytes, after.forward_flops)
        )
    assert traced.storage_bytes == calibrated.storage_bytes
    assert traced.resting_bytes == calibrated.resting_bytes


def test_steps_that_are_alike_are_measured_once_for_a_linearised_model(monkeypatch):
    measured = []
    original = calibration._measure
    monkeypatch.setattr(
        calibration, "_measure", lambda step, *x: measured.append(step.name) or original(step, *x)
    )
    x = h = keras.Input((8,), batch_size=4)
    for _ in range(5):
        h = layers.Dense(8)(h)
    chain = keras.Model(x, h)
    linear = linearise(chain)
    costs = trace_costs(linear, [x], chain)
    assert calibrate(costs, linear, [x], chain) == calibrate(costs, linear, [x], chain)
    assert len(measured) == 2  # the first one has no gradient to make of its input


def test_the_model_is_left_as_it_was(model):
    before = [v.numpy() for v in model.variables]
    costs_of(model, batch_size=8)
    for value, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy())


def test_masks_and_several_inputs_reach_the_step():
    tokens, x = keras.Input((5,), dtype="int32"), keras.Input((5, 8))
    masked = layers.Embedding(10, 8, mask_zero=True)(tokens)
    attended = layers.MultiHeadAttention(2, 4)(masked, x)
    _, calibrated = costs_of(keras.Model([tokens, x], layers.LSTM(4)(attended)), batch_size=4)
    assert len(calibrated.steps) >= 3


def test_calibration_works_within_a_function_trace(model):
    costs = []

    @tf.function(autograph=False)
    def step():
        costs.append(costs_of(model, batch_size=8)[1])

    step()
    assert costs[0].steps


def test_an_allocator_that_cannot_be_read_is_named_with_what_to_do(monkeypatch, model):
    def unreadable(device):
        raise ValueError("Allocator stats not available")

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", unreadable)
    assert not can_calibrate()
    with pytest.raises(RuntimeError, match="TF_CPU_ALLOCATOR_USE_BFC=1"):
        costs_of(model, batch_size=8)
