"""The primitive gives the results, gradients, state and losses of the bare function."""

from collections import namedtuple
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ckpt import recompute
from tests.runs import MODES, run_in

Pair = namedtuple("Pair", ["left", "right"])


def dense_stack(units: int, depth: int) -> list[keras.layers.Layer]:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(units, activation="tanh") for _ in range(depth)]
    for layer in layers:
        layer.build((None, units))
    return layers


def gradients(function: Any, layers: list[keras.layers.Layer], mode: str, *args: Any) -> Any:
    weights = [w.value for layer in layers for w in layer.trainable_weights]

    def step(*args: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(args)
            loss = tf.reduce_mean(function(*args) ** 2)
        return loss, tape.gradient(loss, [*args, *weights])

    return run_in(mode, step)(*args)


@pytest.mark.parametrize("mode", MODES)
def test_results_and_gradients_are_those_of_the_function(mode: str) -> None:
    layers = dense_stack(4, 3)

    def function(x: tf.Tensor) -> tf.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    x = tf.random.normal((5, 4))
    plain = gradients(function, layers, mode, x)
    ours = gradients(recompute(function), layers, mode, x)
    tolerance = 0 if mode == "eager" else 1e-6
    for a, b in zip(tf.nest.flatten(ours), tf.nest.flatten(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_the_function_runs_again_for_its_gradient_and_only_then() -> None:
    calls = []

    def function(x: tf.Tensor) -> tf.Tensor:
        calls.append(x)
        return x * x

    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = recompute(function)(x)
    assert len(calls) == 1
    assert tape.gradient(y, x) == 6.0
    assert len(calls) == 2


class Noisy(keras.layers.Layer):
    """Dropout and BatchNorm in a recomputed function of a layer, as a user writes it."""

    def __init__(self, recomputed: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.recomputed = recomputed
        self.dense = keras.layers.Dense(8, activity_regularizer="l2")
        self.norm = keras.layers.BatchNormalization(momentum=0.9)
        self.dropout = keras.layers.Dropout(0.5)

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.dense.build(shape)
        self.norm.build((shape[0], 8))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        def block(x: tf.Tensor) -> tf.Tensor:
            return self.dropout(self.norm(self.dense(x)))

        return recompute(block)(x) if self.recomputed else block(x)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_state_and_losses_in_a_layers_call(mode: str, policy: str) -> None:
    """C02, C03, C04 and C21: masks repeat, statistics move once, added losses have gradients."""

    def train(recomputed: bool) -> tuple[list[float], list[np.ndarray]]:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        x = Noisy(recomputed, dtype=policy)(inputs)
        x = Noisy(recomputed, dtype=policy)(x)
        model = keras.Model(inputs, keras.layers.Dense(1)(x))
        model.compile("adam", "mse", run_eagerly=mode == "eager", jit_compile=mode == "jit")
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(32, 6)), rng.normal(size=(32, 1))
        history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        return history.history["loss"], [v.numpy() for v in model.variables]

    (plain_losses, plain_values), (losses, values) = train(False), train(True)
    tolerance = {"eager": 0, "float32": 1e-5, "mixed_bfloat16": 1e-2}
    rtol = tolerance["eager" if mode == "eager" else policy]
    np.testing.assert_allclose(losses, plain_losses, rtol=rtol)
    for a, b in zip(values, plain_values, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("mode", MODES)
def test_keyword_arguments_and_structures_pass(mode: str) -> None:
    """C11, C13, C14 and C15: keywords, None, Python flags and nested structures go in and out."""

    def function(pair: Pair, options: dict[str, Any], *, scale: float, mask: Any = None) -> Any:
        assert isinstance(options["flag"], bool)
        assert mask is None
        return {"sum": (pair.left + pair.right) * scale, "none": None, "flag": options["flag"]}

    def step(left: tf.Tensor, right: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([left, right])
            result = recompute(function)(Pair(left, right), {"flag": True}, scale=3.0)
            assert result["none"] is None
            assert result["flag"] is True
            loss = tf.reduce_sum(result["sum"])
        return tape.gradient(loss, [left, right])

    for gradient in run_in(mode, step)(tf.ones(2), tf.ones(2)):
        np.testing.assert_array_equal(gradient, [3.0, 3.0])


@pytest.mark.parametrize("mode", MODES)
def test_bool_and_integer_tensors_pass(mode: str) -> None:
    """C12: a bool tensor as an argument and as the first result."""

    def function(keep: tf.Tensor, x: tf.Tensor, ids: tf.Tensor) -> Any:
        return tf.logical_not(keep), tf.where(keep, x, 0.0) * 2.0, ids + 1

    def step(keep: tf.Tensor, x: tf.Tensor, ids: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            dropped, y, next_ids = recompute(function)(keep, x, ids)
            loss = tf.reduce_sum(tf.where(dropped, 0.0, y) * tf.cast(next_ids, tf.float32))
        return dropped, next_ids, tape.gradient(loss, x)

    keep, ids = tf.constant([True, False]), tf.constant([1, 2])
    dropped, next_ids, gradient = run_in(mode, step)(keep, tf.constant([1.0, 2.0]), ids)
    np.testing.assert_array_equal(dropped, [False, True])
    np.testing.assert_array_equal(next_ids, [2, 3])
    np.testing.assert_array_equal(gradient, [4.0, 0.0])


@pytest.mark.parametrize("mode", MODES)
def test_a_function_may_have_nothing_to_differentiate(mode: str) -> None:
    """C12: what makes a mask, say: integers in, bools out."""
    nonzero = run_in(mode, recompute(lambda ids: tf.not_equal(ids, 0)))
    np.testing.assert_array_equal(nonzero(tf.constant([1, 0])), [True, False])


def test_masks_cross_the_boundary() -> None:
    """C07: the mask of an argument is seen inside, in both passes; that of a result outside."""
    seen = []
    embed = keras.layers.Embedding(5, 4, mask_zero=True)
    embed.build()

    def attend(x: tf.Tensor) -> tf.Tensor:
        seen.append(x._keras_mask.numpy().tolist())
        return keras.layers.Activation("tanh")(x)

    with tf.GradientTape() as tape:
        x = recompute(embed)(tf.constant([[1, 0, 2]]))
        assert x._keras_mask.numpy().tolist() == [[True, False, True]]
        y = recompute(attend)(x)
        assert y._keras_mask.numpy().tolist() == [[True, False, True]]
    tape.gradient(y, embed.trainable_weights[0].value)
    assert seen == [[[True, False, True]]] * 2


@pytest.mark.parametrize("mode", MODES)
def test_an_unused_weight_gets_no_gradient(mode: str) -> None:
    """C05: None, not zeros, so that a decaying optimizer leaves the weight alone."""
    used, unused = dense_stack(4, 2)
    found = []

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            y, _ = recompute(lambda x: (used(x), unused(x)))(x)
            loss = tf.reduce_sum(y)
        gradient, none = tape.gradient(loss, [used.kernel.value, unused.kernel.value])
        found.append(none)
        return gradient

    assert run_in(mode, step)(tf.ones((2, 4))).shape == (4, 4)
    assert found == [None]


@pytest.mark.parametrize("mode", MODES)
def test_a_sparse_gradient_stays_sparse(mode: str) -> None:
    """C06: no gradient of the size of the table."""
    table = keras.layers.Embedding(1000, 4)
    table.build()
    kinds = []

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(recompute(table)(ids))
        gradient = tape.gradient(loss, table.embeddings.value)
        kinds.append(type(gradient))
        return gradient.values

    assert run_in(mode, step)(tf.constant([3, 5])).shape == (2, 4)
    assert kinds[-1] is tf.IndexedSlices


@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives_are_exact(mode: str) -> None:
    """C26: a gradient penalty."""
    layers = dense_stack(4, 2)

    def function(x: tf.Tensor) -> tf.Tensor:
        return layers[1](layers[0](x))

    def penalty(function: Any) -> Any:
        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(function(x))
                loss = tf.reduce_sum(inner.gradient(y, x) ** 2)
            return outer.gradient(loss, [layer.kernel.value for layer in layers])

        return step

    x = tf.random.normal((3, 4))
    plain = run_in(mode, penalty(function))(x)
    ours = run_in(mode, penalty(recompute(function)))(x)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_on_symbolic_tensors_it_is_the_bare_function() -> None:
    """C23: inside a Functional model it needs no special care."""
    inputs = keras.Input((4,))
    outputs = recompute(keras.layers.Dense(2))(inputs)
    assert outputs.shape == (None, 2)


def test_a_closed_over_tensor_is_refused() -> None:
    scale = tf.constant(2.0)
    with pytest.raises(ValueError, match="uses the tensor 'scale' from outside"):
        recompute(lambda x: x * scale)(tf.ones(2))


SCALE = tf.constant(2.0)


def test_an_attribute_may_be_named_like_a_global_tensor() -> None:
    class Settings:
        SCALE = 3.0

    assert recompute(lambda x: x * Settings.SCALE)(tf.ones(())) == 3.0
    with pytest.raises(ValueError, match="uses the tensor 'SCALE' from outside"):
        recompute(lambda x: x * SCALE)(tf.ones(()))


def test_a_layer_created_inside_is_refused_and_named() -> None:
    """C24."""
    with pytest.raises(ValueError, match="creates the variables 'made_inside/kernel'"):
        recompute(lambda x: 2 * keras.layers.Dense(2, name="made_inside")(x))(tf.ones((1, 2)))
    layer = keras.layers.Dense(2)
    assert layer(tf.ones((1, 2))).shape == (1, 2), "later layers are made as ever"


def test_an_unbuilt_layer_is_built_once() -> None:
    layer = keras.layers.Dense(2)
    with tf.GradientTape() as tape:
        y = recompute(lambda x: 2 * layer(x))(tf.ones((1, 3)))
    assert len(layer.weights) == 2
    assert tape.gradient(y, layer.kernel.value).shape == (3, 2)


def test_a_loss_without_an_owner_is_refused() -> None:
    hidden = {"layer": [keras.layers.ActivityRegularization(0.1)]}

    class Holder:
        layer = hidden["layer"][0]

    with pytest.raises(ValueError, match="does not refer to that layer"):
        recompute(lambda x: 2 * Holder.layer(x))(tf.ones((1, 2)))


def test_what_is_not_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match="needs a function"):
        recompute(3)  # type: ignore[arg-type]
