"""Fails clearly when Keras or TensorFlow changes something that it never promised to keep."""

import gc
import sys
import weakref
from typing import Any, ClassVar

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

from keras_ckpt import keras_internals


class Probe(keras.layers.Layer):
    """Notes the state that its call finds."""

    found: ClassVar[list[Any]] = []

    def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if not keras_internals.is_symbolic(()):
            context = (keras_internals.entry_layer(), keras_internals.training_of_call())
            self.found.append((training, *context, keras_internals.call_state()))
        return x


def test_call_state_is_captured_and_entered_again() -> None:
    outer, inner = keras.Sequential([Probe()]), Probe()
    outer(tf.ones((1, 1)), training=True)
    *seen, restore = Probe.found.pop()
    assert seen == [True, outer, True]
    with restore():
        inner(tf.ones((1, 1)))
    *seen, _ = Probe.found.pop()
    assert seen == [True, None, True], "`training` is inherited, and no layer is the outermost"
    assert keras_internals.entry_layer() is None


def test_symbolic_calls_are_recognised() -> None:
    assert keras_internals.is_symbolic({"x": [keras.Input((1,))]})
    assert not keras_internals.is_symbolic({"x": [tf.ones(1)], "flag": True})
    with keras.SymbolicScope():
        assert keras_internals.is_symbolic(())


def test_masks_are_read_and_set() -> None:
    x = tf.ones((1, 2))
    assert keras_internals.get_mask(x) is None
    keras_internals.set_mask(x, tf.constant([[True, False]]))
    assert keras.layers.Masking().compute_mask(x) is not None
    assert keras_internals.get_mask(x).numpy().tolist() == [[True, False]]


def test_variables_are_read_and_assigned_past_a_scope() -> None:
    variable = keras.Variable(1.0, trainable=False)
    with keras.StatelessScope([(variable, tf.constant(5.0))]):
        assert float(variable) == 5.0
        assert float(keras_internals.read_variable(variable)) == 1.0
        keras_internals.assign_variable(variable, tf.constant(2.0))
    assert float(variable) == 2.0
    assert keras_internals.stored_variable(variable) is variable.value


def test_the_owner_of_a_loss_is_found_and_forgets_it() -> None:
    layer, other = keras.layers.ActivityRegularization(0.1), keras.layers.ActivityRegularization(1)
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(tf.ones((1, 1)))
    (loss,) = scope.losses
    assert keras_internals.take_loss_owner(loss, [other, layer]) is layer
    assert keras_internals.take_loss_owner(loss, [other, layer]) is None


def test_recursion_goes_deep_and_back() -> None:
    limit = sys.getrecursionlimit()
    with keras_internals.deep_recursion():
        assert sys.getrecursionlimit() > 100_000
    assert sys.getrecursionlimit() == limit


def test_graphs_behind_models_are_found() -> None:
    inputs = keras.Input((1,))
    functional = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    sequential = keras.Sequential([inputs, keras.layers.Dense(1)])

    class WithCall(keras.Sequential):
        def call(self, *args: object, **kwargs: object) -> object:
            return super().call(*args, **kwargs)

    assert keras_internals.inner_functional(functional) is functional
    assert keras_internals.inner_functional(sequential).inputs == sequential.inputs
    assert keras_internals.inner_functional(WithCall([inputs, keras.layers.Dense(1)])) is None
    assert keras_internals.inner_functional(keras.layers.Dense(1)) is None
    assert len(keras_internals.nodes_in_order(functional)) == 1
    assert keras_internals.structures(functional)[0] is inputs


def test_gradient_functions_die_with_their_graph() -> None:
    """C40."""

    def trace() -> "weakref.ref[tf.Graph]":
        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> tf.Tensor:
            with keras_internals.releasing_gradients():
                y = tf.custom_gradient(lambda x: (x * 2, lambda dy: dy * 7))(x)
            return tf.gradients(y, x)[0]

        assert float(step(tf.constant(1.0))) == 7.0
        return weakref.ref(step.get_concrete_function(tf.TensorSpec(())).graph)

    gc.collect()
    before = len(ops.gradient_registry.list())
    graph = trace()
    gc.collect()
    assert graph() is None
    assert len(ops.gradient_registry.list()) == before


def test_variables_created_in_a_scope_are_seen_and_forgotten() -> None:
    with keras.StatelessScope(initialize_variables=False):
        variable = keras.Variable("zeros", shape=(1,))
        assert keras_internals.uninitialized_variables()[-1] is variable
        keras_internals.forget_uninitialized_variables([variable])
        assert variable not in keras_internals.uninitialized_variables()


def test_what_a_record_cannot_hold_is_refused() -> None:
    variable = keras.Variable(1.0)
    with keras_internals.recording_call():
        with pytest.raises(ValueError, match="reads the variable"):
            variable + 1.0
        with pytest.raises(ValueError, match="assigns the variable"):
            variable.assign(2.0)
