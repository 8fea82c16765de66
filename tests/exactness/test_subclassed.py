"""Subclassed models: with their own `call`, their own `train_step`, and several in one step."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L
from keras import ops

import keras_ckpt
from tests.exactness.compare import (
    EXECUTIONS,
    TOLERANCE,
    Case,
    Run,
    assert_same,
    assert_same_variables,
    checkpoint,
    nest,
    train,
    uniform,
    variables_of,
)
from tests.exactness.model_cases import X, Y, dense

DATA = Case(keras.Model, X, Y)


def own_call(base: type, **settings: Any) -> keras.Model:
    class OwnCall(base):
        """Layers, `keras.ops`, a Python loop, a sublayer with losses, `training` passed on."""

        def __init__(self) -> None:
            super().__init__(**settings)
            self.blocks = [L.Dense(6, "tanh", activity_regularizer="l2") for _ in range(3)]
            self.norms = [L.BatchNormalization() for _ in range(3)]
            self.dropout = L.Dropout(0.3)
            self.head = L.Dense(1)

        def call(self, x: Any, training: bool | None = None) -> Any:
            for block, norm in zip(self.blocks, self.norms, strict=True):
                x = x + norm(self.dropout(block(x), training=training), training=training)
            return self.head(ops.where(ops.greater(x, 0), x, 0.1 * x))

    return OwnCall()


def without_training(base: type, **settings: Any) -> keras.Model:
    class WithoutTraining(base):
        """Its `call` takes no `training`; structures in and out."""

        def __init__(self) -> None:
            super().__init__(**settings)
            self.first, self.second = L.Dense(6, "tanh"), L.Dense(1)
            self.inner = keras.Sequential([L.Dense(6), L.Dropout(0.3), L.Dense(6, "gelu")])

        def call(self, x: Any) -> Any:
            return self.second(self.inner(self.first(x)))

    return WithoutTraining()


def data_dependent(base: type, **settings: Any) -> keras.Model:
    class DataDependent(base):
        """Decides by the data, so that it can't be recorded; recomputes a part by itself."""

        def __init__(self) -> None:
            super().__init__(**settings)
            self.blocks = [L.Dense(6, "tanh") for _ in range(2)]
            self.dropout, self.head = L.Dropout(0.3), L.Dense(1)

        def call(self, x: Any) -> Any:
            if isinstance(x, keras.KerasTensor) and base is not keras.Model:
                raise TypeError("this model wants numbers")
            for block in self.blocks:
                part = lambda x, block=block: self.dropout(block(x))  # noqa: E731
                x = part(x) if base is keras.Model else keras_ckpt.recompute(part)(x)
            return self.head(x)

    return DataDependent()


def run(make: Any, base: type, execution: str, **settings: Any) -> tuple[keras.Model, Run]:
    keras.utils.set_random_seed(1)
    model = make(base, **settings)
    return model, train(model, DATA, execution)


@pytest.mark.parametrize("make", [own_call, without_training])
@pytest.mark.parametrize(("execution", "setting"), [("graph", "sqrt"), ("eager", 3), ("jit", 3)])
def test_own_call(make: Any, execution: str, setting: Any) -> None:
    tolerance = 0 if execution == "eager" else TOLERANCE
    _, plain = run(make, keras.Model, execution)
    model, ours = run(make, keras_ckpt.CheckpointedModel, execution, checkpoints=setting)
    assert model.plan.segments
    assert_same(ours, plain, tolerance)

    plan = nest(list(model.plan.steps))
    model, ours = run(make, keras_ckpt.CheckpointedModel, execution, checkpoints=plan)
    assert model.plan == plan
    assert_same(ours, plain, tolerance)


@pytest.mark.parametrize("execution", ["graph", "eager"])
def test_call_that_cannot_be_recorded_says_so_once(execution: str) -> None:
    """Still exact, also in the parts that it recomputes by itself."""
    _, plain = run(data_dependent, keras.Model, execution)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, ours = run(data_dependent, keras_ckpt.CheckpointedModel, execution, checkpoints=3)
    messages = [str(w.message) for w in caught if "cannot be recorded" in str(w.message)]
    assert len(messages) == 1
    assert "keras_ckpt.recompute" in messages[0]
    assert_same(ours, plain, 0 if execution == "eager" else TOLERANCE)


class GAN(keras.Model):
    """Two models in one train step, each with its own optimizer."""

    def __init__(self, generator: keras.Model, discriminator: keras.Model) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.seeds = keras.random.SeedGenerator(7)
        self.generator_optimizer = keras.optimizers.SGD(0.05)

    def train_step(self, data: Any) -> dict[str, Any]:
        real, _ = data
        noise = keras.random.normal((4, 6), seed=self.seeds)
        with tf.GradientTape() as g_tape, tf.GradientTape() as d_tape:
            made = self.generator(noise, training=True)
            d_real = self.discriminator(real, training=True)
            d_made = self.discriminator(made, training=True)
            g_loss = ops.mean(ops.softplus(-d_made))
            d_loss = ops.mean(ops.softplus(-d_real)) + ops.mean(ops.softplus(d_made))
            d_loss += sum(self.discriminator.losses)
        for tape, loss, model, optimizer in [
            (g_tape, g_loss, self.generator, self.generator_optimizer),
            (d_tape, d_loss, self.discriminator, self.optimizer),
        ]:
            weights = model.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": g_loss, "d_loss": d_loss}


class PenalizedCritic(keras.Model):
    """C26: a loss on the gradient of the model, as WGAN-GP has it."""

    def __init__(self, critic: keras.Model) -> None:
        super().__init__()
        self.critic = critic

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = self.critic(x, training=True)
            slope = inner.gradient(score, x)
            loss = ops.mean(ops.square(score - y)) + ops.mean(ops.square(slope))
        weights = self.critic.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class MicroBatches(keras.Model):
    """C17: the train step loops over parts of the batch, around the model."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self.model = model

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        weights = self.model.trainable_weights

        def body(i: Any, total: Any, *gradients: Any) -> tuple[Any, ...]:
            with tf.GradientTape() as tape:
                part = self.model(x[2 * i : 2 * i + 2], training=True)
                loss = ops.mean(ops.square(part - y[2 * i : 2 * i + 2]))
            new = tape.gradient(loss, weights)
            return (i + 1, total + loss, *[a + b for a, b in zip(gradients, new, strict=True)])

        zeros = [ops.zeros(w.shape) for w in weights]
        _, total, *gradients = tf.while_loop(lambda i, *_: i < 2, body, [0, 0.0, *zeros])
        self.optimizer.apply(gradients, weights)
        return {"loss": total}


def network(units: int = 6, smooth: bool = False) -> keras.Model:
    x = inputs = keras.Input((6,))
    for _ in range(2):
        x = dense(x)
        x = x if smooth else L.Dropout(0.3)(L.BatchNormalization()(x))
    return keras.Model(inputs, L.Dense(units)(dense(x)))


TRAINERS = {
    "gan": lambda convert: GAN(convert(network()), convert(network(1))),
    "gradient_penalty_C26": lambda convert: PenalizedCritic(convert(network(1, smooth=True))),
    "gradient_penalty_with_state_C26": lambda convert: PenalizedCritic(convert(network(1))),
    "micro_batches_C17": lambda convert: MicroBatches(convert(network(1))),
}


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize(("execution", "setting"), [("graph", 3), ("eager", "nested")])
def test_train_steps_around_models(name: str, execution: str, setting: Any) -> None:
    runs = []
    for convert in (lambda x: x, lambda x: checkpoint(x, setting)):
        keras.utils.set_random_seed(1)
        trainer = TRAINERS[name](convert)
        runs.append(train(trainer, DATA, execution))
    models = [x for x in trainer.layers if isinstance(x, keras_ckpt.CheckpointedModel)]
    assert models
    assert all(model.plan.segments for model in models)
    # Second derivatives read each tensor several times, and add the gradients in another order.
    eager_tolerance = 1e-6 if "C26" in name else 0
    assert_same(runs[1], runs[0], eager_tolerance if execution == "eager" else TOLERANCE)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_off_is_off_c48(execution: str) -> None:
    """C48: with `checkpoints=False` the very train step of plain Keras: equal bits everywhere."""
    keras.utils.set_random_seed(1)
    plain = train(network(1), DATA, execution)
    keras.utils.set_random_seed(1)
    model = keras_ckpt.checkpointed(network(1), False)
    assert_same(train(model, DATA, execution), plain, 0)
    assert model.plan is None


def test_custom_training_loop() -> None:
    """A `tf.function` of the user's own around the model and a tape."""
    states = []
    for convert in (lambda x: x, lambda x: checkpoint(x, "nested")):
        keras.utils.set_random_seed(1)
        model = convert(network(1))
        optimizer = keras.optimizers.Adam(0.01)

        @tf.function
        def step(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(model(x, training=True) - y))
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
            return loss

        optimizer.build(model.trainable_weights)
        losses = [float(step(X, uniform(8, 1, seed=i))) for i in range(3)]
        slots = [(v.name, np.array(v.value)) for v in optimizer.variables]
        states.append([("losses", np.array(losses)), *variables_of(model), *slots])
    assert_same_variables(states[1], states[0], TOLERANCE)
