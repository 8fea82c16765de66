"""Which gradients there are, in what form, and how often layers are called for them.

Fewer than twelve combinations: what is counted and looked at here is the same in all of them, but
for the calls, which only eager mode shows.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_ckpt
from keras_ckpt.segment import Segment
from tests.exactness.compare import checkpoint, integers, uniform
from tests.exactness.model_cases import X, Y, dense_net
from tests.exactness.test_optimizers import model as with_unused_weight

pytestmark = pytest.mark.filterwarnings("ignore:The plan for model|Nothing is")


def gradients(model: keras.Model, x: Any, in_graph: bool) -> dict[str, Any]:
    """The gradients of a training call, by the name of the weight."""
    weights = model.trainable_weights

    def step(x: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        return tape.gradient(loss, weights)

    found = (tf.function(step) if in_graph else step)(tf.constant(x))
    return {w.path: g for w, g in zip(weights, found, strict=True)}


@pytest.mark.parametrize("in_graph", [True, False])
def test_unused_weights_get_no_gradient_c05(in_graph: bool) -> None:
    found = gradients(checkpoint(with_unused_weight(), "nested"), integers(50, 4, 3), in_graph)
    missing = [name.split("/")[-1] for name, gradient in found.items() if gradient is None]
    assert missing == ["unused"]


@pytest.mark.parametrize("in_graph", [True, False])
def test_gradients_of_embeddings_stay_sparse_c06(in_graph: bool) -> None:
    """C06: no gradient of the size of the table. The optimizers' history is in test_optimizers."""
    found = gradients(checkpoint(with_unused_weight(), "nested"), integers(50, 4, 3), in_graph)
    (table,) = [gradient for name, gradient in found.items() if name.startswith("embedding")]
    assert isinstance(table, tf.IndexedSlices)
    assert table.values.shape == (12, 4)


def test_dense_net_gets_every_gradient_c25() -> None:
    """C25: every gamma, beta and kernel of a DenseNet block, in graph mode."""
    keras.utils.set_random_seed(1)
    plain = dense_net()
    expected = gradients(plain, uniform(4, 6, 6, 2), in_graph=True)
    actual = gradients(checkpoint(plain, 3), uniform(4, 6, 6, 2), in_graph=True)
    assert len(expected) == 18
    for name, gradient in expected.items():
        np.testing.assert_allclose(actual[name], gradient, 1e-5, 1e-5, err_msg=name)


class Counted(L.Layer):
    """A layer that counts its calls, Python's own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = L.Dense(6, "tanh")
        self.calls = 0

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        self.calls += 1
        return self.dense(x)


def counted_model(segments: tuple[Segment, ...]) -> tuple[keras.Model, list]:
    inputs = keras.Input((6,))
    layers = [Counted(name=f"c{i}") for i in range(5)]
    x = inputs
    for layer in layers:
        x = layer(x)
    plan = keras_ckpt.Plan("any", "by hand", tuple(layer.name for layer in layers), segments)
    model = keras_ckpt.CheckpointedModel(inputs, x, checkpoints=plan)
    model.compile("sgd", "mse", run_eagerly=True)
    # The first call in training plans, which calls the layers to look at them.
    model.train_on_batch(X, uniform(8, 6))
    return model, layers


def calls(layers: list[Counted], action: Any) -> list[int]:
    before = [layer.calls for layer in layers]
    action()
    return [layer.calls - n for layer, n in zip(layers, before, strict=True)]


FLAT = (Segment(0, 2), Segment(2, 4))
DEEP = (Segment(0, 4, (Segment(0, 3, (Segment(1, 3),)),)),)


@pytest.mark.parametrize(
    ("segments", "expected"),
    [(FLAT, [2, 2, 2, 2, 1]), (DEEP, [3, 4, 4, 2, 1]), ((), [1, 1, 1, 1, 1])],
    ids=["flat", "deep", "none"],
)
def test_layers_are_called_as_often_as_planned_c09(segments: Any, expected: list[int]) -> None:
    """C09: once, and once more per level of segments that a step lies in."""
    model, layers = counted_model(segments)
    assert calls(layers, lambda: model.train_on_batch(X, uniform(8, 6))) == expected


def test_nothing_is_recomputed_outside_training_c09() -> None:
    model, layers = counted_model(FLAT)
    assert calls(layers, lambda: model.evaluate(X, uniform(8, 6), verbose=0)) == [1] * 5
    assert calls(layers, lambda: model.predict(X, verbose=0)) == [1] * 5


class MakesLayers(L.Layer):
    """A layer that makes another one in each call."""

    def call(self, x: Any) -> Any:
        def inner(x: Any) -> Any:
            return L.Dense(6, name="made_too_late")(x)

        return keras_ckpt.recompute(inner)(x)


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_layers_made_inside_are_named_in_an_error_c24(run_eagerly: bool) -> None:
    """C24: and the number of weights stays what it was."""
    model = keras.Sequential([L.Dense(6), MakesLayers(), L.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=run_eagerly)
    with pytest.raises(ValueError, match=r"made_too_late.*Create the layer outside"):
        model.fit(X, Y, verbose=0)
    assert len(model.layers[1].weights) == 0
