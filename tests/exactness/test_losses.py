"""Losses of every origin have the value and the gradient that they have in plain Keras.

C04: added by layers, by regularizers of weights and of activities; and the ways in which Keras
weighs a compiled loss. Three of the twelve combinations.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers as L
from keras import ops

from tests.exactness.compare import Case, check, integers, uniform
from tests.exactness.model_cases import PQ, X, Y, dense, dict_outputs, masks

EXTRA = uniform(8, 4)


class Sampling(L.Layer):
    """A VAE's layer: the loss comes from inside, with a random draw beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs: list[Any]) -> Any:
        mean, log_variance = inputs
        divergence = ops.exp(log_variance) + ops.square(mean) - 1 - log_variance
        self.add_loss(0.5 * ops.mean(ops.sum(divergence, axis=-1)))
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return mean + ops.exp(0.5 * log_variance) * noise


class MixtureOfExperts(L.Layer):
    """Two losses from one layer: that of its gate's balance, and its sublayer's own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = L.Dense(3, "softmax", activity_regularizer="l2")
        self.experts = [L.Dense(6, "tanh") for _ in range(3)]

    def build(self, shape: Any) -> None:
        for layer in [self.gate, *self.experts]:
            layer.build(shape)

    def call(self, x: Any) -> Any:
        gate = self.gate(x)
        self.add_loss(0.1 * ops.sum(ops.square(ops.mean(gate, axis=0))))
        mixed = [gate[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)]
        return sum(mixed)


class Reconstruction(L.Layer):
    """A loss between two tensors of the graph, and no output that anything reads."""

    def call(self, x: Any, target: Any) -> Any:
        self.add_loss(ops.mean(ops.square(x - target)))
        return x


def vae() -> keras.Model:
    inputs = keras.Input((6,))
    x = dense(inputs)
    code = Sampling()([L.Dense(3)(x), L.Dense(3)(x)])
    return keras.Model(inputs, L.Dense(6)(dense(code)))


def experts() -> keras.Model:
    inputs = keras.Input((6,))
    shared = MixtureOfExperts()
    # Called twice: each call adds its losses.
    return keras.Model(inputs, L.Dense(1)(shared(L.Dropout(0.2)(shared(dense(inputs))))))


def regularized() -> keras.Model:
    inputs = keras.Input((6,))
    x = L.Dense(6, "tanh", kernel_regularizer="l2", activity_regularizer="l1")(inputs)
    x = L.ActivityRegularization(0.02, 0.03)(x)
    x = L.Dense(
        6, "tanh", bias_regularizer=keras.regularizers.L1L2(0.1, 0.1), kernel_constraint="max_norm"
    )(x)
    x = L.BatchNormalization(gamma_regularizer="l2")(x)
    return keras.Model(inputs, L.Dense(1)(dense(x)))


def added_between_tensors() -> keras.Model:
    inputs = keras.Input((6,))
    x = dense(dense(inputs))
    x = Reconstruction()(L.Dense(6)(x), target=inputs)
    return keras.Model(inputs, L.Dense(1)(dense(x)))


def classifier() -> keras.Model:
    inputs = keras.Input((6,))
    x = L.Dropout(0.3)(dense(dense(inputs)))
    return keras.Model(inputs, L.Dense(3, "softmax")(x))


def weighted() -> dict[str, Any]:
    losses = {"p": "mae", "q": keras.losses.Huber()}
    return {"loss": losses, "loss_weights": {"p": 0.3, "q": 2.0}, "metrics": {"q": ["mae"]}}


def classes() -> dict[str, Any]:
    name = "sparse_categorical_crossentropy"
    return {"loss": name, "metrics": ["accuracy"], "weighted_metrics": [name]}


LABELS = integers(3, 8)
WEIGHTS = {"p": np.linspace(0, 1, 8), "q": np.linspace(2, 1, 8)}
STEPS = np.linspace(0, 1, 40).reshape(8, 5)
CASES = {
    # Mean and variance are read by the loss and by the code.
    "add_loss_of_a_vae_C04": Case(vae, X, X, eager_tolerance=1e-6),
    # Each gate is read by three experts and two losses.
    "add_loss_of_experts_C04": Case(experts, X, Y, eager_tolerance=1e-6),
    "add_loss_between_tensors_C04": Case(added_between_tensors, X, Y),
    # Activities are read by two regularizers and by the next layer.
    "regularizers_C04": Case(regularized, X, Y, eager_tolerance=1e-6),
    "only_added_losses": Case(vae, X, None, lambda: {"loss": None}, eager_tolerance=1e-6),
    "loss_weights": Case(dict_outputs, [X, EXTRA], PQ, weighted),
    "sample_weight": Case(dict_outputs, [X, EXTRA], PQ, weighted, {"sample_weight": WEIGHTS}),
    "class_weight": Case(classifier, X, LABELS, classes, {"class_weight": {0: 1, 1: 2, 2: 0.5}}),
    "mask_and_sample_weight_C07": Case(
        masks, integers(7, 8, 5), uniform(8, 5, 1), fit={"sample_weight": STEPS}
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("execution", "setting"), [("graph", "nested"), ("jit", 3), ("eager", "sqrt")]
)
def test_losses_train_the_same(name: str, execution: str, setting: Any) -> None:
    check(CASES[name], execution, setting)
