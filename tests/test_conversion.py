"""`checkpointed` shares everything with the model that it is given, of whatever class."""

from typing import Any

import keras
import numpy as np
import pytest

import keras_ckpt

X = np.linspace(-1, 1, 32).reshape(8, 4).astype("float32")


def network() -> tuple[Any, Any]:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((4,))
    for _ in range(4):
        x = keras.layers.Dense(4, activation="tanh")(x)
    return inputs, keras.layers.Dense(1)(x)


@keras.saving.register_keras_serializable(package="tests")
class Subclassed(keras.Model):
    """A subclassed model with a train step of its own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = [keras.layers.Dense(4, activation="tanh") for _ in range(4)]
        self.head = keras.layers.Dense(1)
        self.steps = 0

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def train_step(self, data: Any) -> Any:
        self.steps += 1
        return super().train_step(data)


class Classified(keras.Model):
    """A subclass made from inputs and outputs."""

    def __init__(self) -> None:
        super().__init__(*network())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("build", [lambda: keras.Model(*network()), Subclassed, Classified])
def test_it_shares_layers_weights_and_optimizer(build: Any, compiled: bool) -> None:
    plain = build()
    plain(X)
    if compiled:
        plain.compile("adam", "mse", run_eagerly=True)
    model = keras_ckpt.checkpointed(plain, checkpoints=2)
    assert isinstance(model, keras_ckpt.CheckpointedModel)
    assert isinstance(model, type(plain))
    assert all(a is b for a, b in zip(model.weights, plain.weights, strict=True))
    assert model.compiled == compiled
    if not compiled:
        model.compile("adam", "mse", run_eagerly=True)
    model.fit(X, X[:, :1], verbose=0)
    assert len(model.plan.segments) == 1
    assert model.optimizer.iterations == 1
    assert not compiled or model.optimizer is plain.optimizer
    np.testing.assert_array_equal(plain(X), model(X))


def test_a_model_of_ones_own_class_keeps_its_methods_and_is_saved_as_it_is(tmp_path: Any) -> None:
    plain = Subclassed()
    plain(X)
    model = keras_ckpt.checkpointed(plain, checkpoints=2)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(X, X[:, :1], batch_size=4, verbose=0)
    assert (model.steps, plain.steps) == (2, 0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded) is Subclassed
    np.testing.assert_array_equal(loaded(X), model(X))


def test_a_sequential_model_is_converted_with_its_input() -> None:
    plain = keras.Sequential([keras.Input((4,)), *[keras.layers.Dense(4) for _ in range(4)]])
    model = keras_ckpt.checkpointed(plain, checkpoints=2)
    assert model.layers == plain.layers
    assert model.input_shape == (None, 4)


def test_an_unbuilt_model_is_refused() -> None:
    with pytest.raises(ValueError, match="is not built"):
        keras_ckpt.checkpointed(Subclassed())


def test_a_bad_setting_is_refused_and_leaves_the_model_alone() -> None:
    plain = keras.Model(*network())
    with pytest.raises(ValueError, match="Unknown mode"):
        keras_ckpt.checkpointed(plain, checkpoints="most")
    assert plain(X).shape == (8, 1)
