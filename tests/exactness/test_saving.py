"""Saving, cloning and exporting: what comes back trains on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ckpt
from tests.exactness.compare import Run, assert_same, checkpoint, uniform, variables_of
from tests.exactness.model_cases import PQ, X, Y, dense, dict_and_list

pytestmark = pytest.mark.filterwarnings("ignore:The plan for model|Nothing is")


@keras.saving.register_keras_serializable("tests.exactness")
class TwoDense(keras.layers.Layer):
    """A layer of one's own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first, self.second = keras.layers.Dense(6, "tanh"), keras.layers.Dense(6)

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


def stack() -> keras.Model:
    x = inputs = keras.Input((6,))
    for _ in range(3):
        x = keras.layers.BatchNormalization()(dense(x))
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def sequential() -> keras.Model:
    layers = [keras.layers.Dense(6, "tanh"), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((6,)), *layers, TwoDense(), keras.layers.Dense(1)])


def nested() -> keras.Model:
    inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6, "tanh"), TwoDense()])
    inputs = keras.Input((6,))
    return keras.Model(inputs, keras.layers.Dense(1)(dense(inner(dense(inputs)))))


# Keras saves no seed that it chose itself, so that a loaded model draws other masks. Models whose
# training is to go on in the same way draw nothing; one that draws is compared with a plain model
# that went the same way.
SHAPES: dict[str, Callable[[], keras.Model]] = {
    "functional": stack,
    "sequential": sequential,
    "nested": nested,
}


def made(build: Callable[[], keras.Model], setting: Any = 3) -> keras.Model:
    """A checkpointed model, compiled, from the same seeds each time; plain for False."""
    keras.utils.set_random_seed(1)
    model = build()
    model = model if setting is False else checkpoint(model, setting)
    model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    return model


def train(model: keras.Model, x: Any = X, y: Any = Y, epochs: int = 1) -> Run:
    keras.utils.set_random_seed(2)
    history = model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0).history
    return Run(history, variables_of(model))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("setting", ["sqrt", "nested"])
def test_saved_models_continue_c53(name: str, setting: Any, tmp_path: Path) -> None:
    """C53: the `.keras` file holds plan, optimizer and all state; it loads in safe mode."""
    model = made(SHAPES[name], setting)
    train(model)
    model.save(tmp_path / "model.keras")
    uninterrupted = train(model)

    loaded = keras.saving.load_model(tmp_path / "model.keras", safe_mode=True)
    assert isinstance(loaded, keras_ckpt.CheckpointedModel)
    loaded.run_eagerly = True
    assert loaded.get_config()["checkpoints"] == model.get_config()["checkpoints"]
    assert_same(train(loaded), uninterrupted)
    assert loaded.plan.segments == model.plan.segments


@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_interchangeable_c53(name: str, tmp_path: Path) -> None:
    """C53: both ways, and the order of the weights is the same."""
    plain, ours = made(SHAPES[name], False), made(SHAPES[name])
    assert plain.count_params() == ours.count_params()
    for source, target in [(plain, ours), (ours, plain)]:
        train(source)
        source.save_weights(tmp_path / "of.weights.h5")
        target.load_weights(tmp_path / "of.weights.h5")
        for x, y in zip(source.get_weights(), target.get_weights(), strict=True):
            np.testing.assert_array_equal(x, y)
        target.set_weights(source.get_weights())
        np.testing.assert_array_equal(target.predict(X, verbose=0), source.predict(X, verbose=0))


def test_model_checkpoint_callback_c53(tmp_path: Path) -> None:
    """C53: the best model that the callback wrote is the model of that epoch."""
    model = made(stack)
    path = tmp_path / "best.keras"
    save = keras.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True)
    losses = model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[save]).history["loss"]
    assert losses[1] < losses[0]
    loaded = keras.saving.load_model(path)
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))


def test_markers_are_restored_c53(tmp_path: Path) -> None:
    """C53: a model that holds markers is planned at them again."""

    def build() -> keras.Model:
        x = inputs = keras.Input((6,))
        for _ in range(3):
            x = keras.layers.Dense(6, "tanh")(keras.layers.Dense(6)(x))
            x = keras_ckpt.CheckpointMarker()(x)
        return keras.Model(inputs, keras.layers.Dense(1)(x))

    model = made(build, None)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    train(model)
    loaded.run_eagerly = True
    train(loaded)
    assert len(model.plan.segments) == 3
    assert loaded.plan.segments == model.plan.segments


@pytest.mark.parametrize("name", SHAPES)
def test_configurations_make_the_same_model(name: str) -> None:
    model = made(SHAPES[name], "nested")
    copy = type(model).from_config(model.get_config())
    assert type(copy) is type(model)
    copy.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    copy.build(model.input_shape)
    copy.set_weights(model.get_weights())
    expected, actual = train(model), train(copy)
    assert_same(actual, expected)
    assert copy.plan.segments == model.plan.segments


@pytest.mark.parametrize("name", SHAPES)
def test_clones_train_the_same(name: str) -> None:
    """Keras gives no say in what it clones into, so that the setting has to be given again."""
    model = made(SHAPES[name], "sqrt")
    clone = keras_ckpt.checkpointed(keras.models.clone_model(model), "sqrt")
    assert not {id(w) for w in clone.weights} & {id(w) for w in model.weights}
    clone.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    clone.set_weights(model.get_weights())
    assert_same(train(clone), train(model))


@pytest.mark.parametrize("name", SHAPES)
def test_exported_models_serve_the_same(name: str, tmp_path: Path) -> None:
    plain, ours = made(SHAPES[name], False), made(SHAPES[name])
    train(plain)
    train(ours)
    ours.export(tmp_path / "saved_model", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "saved_model"))
    np.testing.assert_allclose(served.serve(X), plain.predict(X, verbose=0), rtol=1e-6, atol=1e-6)


def test_structures_survive(tmp_path: Path) -> None:
    """C15, C53: inputs in a dict and outputs in a list."""
    data = ({"a": X, "b": uniform(8, 4)}, list(PQ.values()))
    runs = []
    for setting in (False, 3):
        model = made(dict_and_list, setting)
        train(model, *data)
        model.save(tmp_path / "model.keras")
        keras.utils.set_random_seed(4)
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        loaded.run_eagerly = True
        runs.append(train(loaded, *data))
    assert loaded.plan.segments
    assert_same(runs[1], runs[0])


@keras.saving.register_keras_serializable("tests.exactness")
class OwnCall(keras_ckpt.CheckpointedModel):
    """A subclassed model that can be saved."""

    def __init__(self, units: int = 6, checkpoints: Any = 3, **kwargs: Any) -> None:
        super().__init__(checkpoints=checkpoints, **kwargs)
        self.units = units
        self.layers_ = [keras.layers.Dense(units, "tanh") for _ in range(3)]
        self.head = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        for layer in self.layers_:
            x = layer(x)
        return self.head(x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def test_saved_subclassed_models_continue(tmp_path: Path) -> None:
    keras.utils.set_random_seed(1)
    model = OwnCall()
    model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    train(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.run_eagerly = True
    assert_same(train(loaded), train(model))
    assert loaded.plan.segments == model.plan.segments != ()
