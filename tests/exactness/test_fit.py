"""What `fit` and its relatives offer works as in plain Keras.

Each test drives the plain model and the checkpointed one by the same script, in graph mode with a
nested plan and eagerly with 3 segments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

from tests.exactness.compare import (
    EXECUTIONS,
    TOLERANCE,
    Case,
    Run,
    assert_same,
    check,
    checkpoint,
    uniform,
    variables_of,
)
from tests.exactness.model_cases import X, Y, dropout_and_batch_norm

X7, Y7 = uniform(7, 6), uniform(7, 1)
FIT = {"batch_size": 4, "shuffle": False, "verbose": 0}
Script = Callable[[keras.Model, Callable[[], None]], dict[str, Any]]


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X7, Y7)).batch(4)


def fit(model: keras.Model, *data: Any, **arguments: Any) -> dict[str, Any]:
    return model.fit(*data, **{**FIT, "epochs": 2, **arguments}).history


def partial_batch(model: keras.Model, recompile: Callable[[], None]) -> dict[str, Any]:
    return fit(model, X7, Y7)


def validation(model: keras.Model, recompile: Callable[[], None]) -> dict[str, Any]:
    """C52."""
    return fit(model, X7, Y7, validation_data=(X, Y), validation_freq=1)


def validation_split(model: keras.Model, recompile: Callable[[], None]) -> dict[str, Any]:
    """C52."""
    return fit(model, X, Y, validation_split=0.5)


def shuffled(model: keras.Model, recompile: Callable[[], None]) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    return fit(model, X, Y, shuffle=True)


def tf_data(model: keras.Model, recompile: Callable[[], None]) -> dict[str, Any]:
    return model.fit(dataset().repeat(), steps_per_epoch=3, epochs=2, verbose=0).history


def generator(model: keras.Model, recompile: Callable[[], None]) -> dict[str, Any]:
    batches = ((X[i : i + 4], Y[i : i + 4]) for i in (0, 4, 0, 4))
    return model.fit(batches, verbose=0).history


def callbacks(model: keras.Model, recompile: Callable[[], None]) -> dict[str, Any]:
    """C52: callbacks that change the learning rate, stop, and restore weights."""
    rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))
    stop = keras.callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True)
    return fit(model, X, Y, epochs=4, callbacks=[rate, stop])


def train_on_batch(model: keras.Model, recompile: Callable[[], None]) -> dict[str, Any]:
    losses = [model.train_on_batch(X[i : i + 4], Y[i : i + 4]) for i in (0, 4)]
    losses.append(model.test_on_batch(X, Y))
    return {"losses": np.ravel(losses).tolist()}


def trainable_toggled(model: keras.Model, recompile: Callable[[], None]) -> dict[str, Any]:
    """C27: layers frozen, then thawed, each time recompiled."""
    histories = {}
    for frozen in (False, True, False):
        for layer in model.layers[1:5]:
            layer.trainable = not frozen
        recompile()
        histories[f"loss {len(histories)}"] = fit(model, X, Y, epochs=1)["loss"]
    return histories


def evaluate_between(model: keras.Model, recompile: Callable[[], None]) -> dict[str, Any]:
    """C03: `evaluate` and `predict` with the statistics of training, and none of their own."""
    losses = []
    for _ in range(2):
        losses += fit(model, X, Y, epochs=1)["loss"]
        losses += [model.evaluate(X, Y, verbose=0), *np.ravel(model.predict(X, verbose=0))]
    return {"losses": losses}


def initial_epoch(model: keras.Model, recompile: Callable[[], None]) -> dict[str, Any]:
    return fit(model, X, Y, epochs=2) | fit(model, X, Y, initial_epoch=2, epochs=3)


SCRIPTS: list[Script] = [
    partial_batch,
    validation,
    validation_split,
    shuffled,
    tf_data,
    generator,
    callbacks,
    train_on_batch,
    trainable_toggled,
    evaluate_between,
    initial_epoch,
]


def run(script: Script, execution: str, setting: Any = False, build: Any = None) -> Run:
    keras.utils.set_random_seed(1)
    model = (build or dropout_and_batch_norm)()
    if setting is not False:
        model = checkpoint(model, setting)

    def recompile() -> None:
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", **EXECUTIONS[execution])

    recompile()
    history = script(model, recompile)
    if setting is not False:
        assert model.plan.segments
    return Run(history, variables_of(model))


@pytest.mark.filterwarnings("ignore:The plan for model|Nothing is")
@pytest.mark.parametrize(("execution", "setting"), [("graph", "nested"), ("eager", 3)])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_fit_features(script: Script, execution: str, setting: Any) -> None:
    tolerance = 0 if execution == "eager" else TOLERANCE
    assert_same(run(script, execution, setting), run(script, execution), tolerance)


@pytest.mark.parametrize("execution", ["graph", "jit"])
def test_steps_per_execution(execution: str) -> None:
    compile = {"steps_per_execution": 2}
    check(Case(dropout_and_batch_norm, X, Y, lambda: compile), execution, "nested")


def test_unknown_sequence_length_c19() -> None:
    """C19: recurrent layers over batches of different lengths, with state returned."""

    def build() -> keras.Model:
        inputs = keras.Input((None, 3))
        x = L.Bidirectional(L.LSTM(3, return_sequences=True))(inputs)
        x, state = L.GRU(4, return_sequences=True, return_state=True)(L.Dropout(0.2)(x))
        x = L.Concatenate()([L.GlobalAveragePooling1D()(x), state])
        return keras.Model(inputs, L.Dense(1)(x))

    def lengths(model: keras.Model, recompile: Callable[[], None]) -> dict[str, Any]:
        losses = [model.train_on_batch(uniform(4, n, 3), Y[:4]) for n in (2, 5, 3)]
        return {"losses": losses}

    for execution, tolerance in (("graph", TOLERANCE), ("eager", 0)):
        plain = run(lengths, execution, build=build)
        assert_same(run(lengths, execution, 3, build), plain, tolerance)


def test_description_is_that_of_the_plain_model_c52() -> None:
    """C52: `summary`, `get_layer`, counts and the order of weights."""
    plain = dropout_and_batch_norm()
    ours = checkpoint(plain, 3)
    texts: list[list[str]] = [[], []]
    for model, lines in zip((plain, ours), texts, strict=True):
        model.summary(print_fn=lambda line, lines=lines: lines.append(line), show_trainable=True)
    assert "".join(texts[0]).splitlines()[1:] == "".join(texts[1]).splitlines()[1:]
    assert [w.path for w in ours.weights] == [w.path for w in plain.weights]
    assert ours.count_params() == plain.count_params()
    for layer in plain.layers:
        assert ours.get_layer(layer.name) is layer
