"""Checkpointed models train as plain ones do, and refuse bad settings clearly."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ckpt
from keras_ckpt import CheckpointedModel, CheckpointedSequential, CheckpointMarker, Plan
from keras_ckpt.segment import Segment
from tests.runs import MODES, compile_options

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(48, 12)).astype("float32"), RNG.normal(size=(48, 1)).astype("float32")


def noisy_network(**options: Any) -> keras.Model:
    """A residual network with Dropout and BatchNorm; two of its layers are marked."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((12,), name="features")
    x = keras.layers.Dense(16, activation="gelu", name="first")(inputs)
    for i in range(4):
        skip = x
        # A bias before a normalisation has no gradient but rounding, which Adam would blow up.
        x = keras.layers.Dense(16, use_bias=False, name=f"dense_{i}")(x)
        x = keras.layers.BatchNormalization(name=f"norm_{i}")(x)
        x = keras.ops.relu(x)
        x = keras.layers.Dropout(0.3, name=f"dropout_{i}")(x)
        x = keras.layers.Add(name=f"add_{i}")([x, skip])
        x = CheckpointMarker(name=f"mark_{i}")(x) if i in (1, 2) else x
    outputs = keras.layers.Dense(1, name="head")(x)
    if options:
        return CheckpointedModel(inputs, outputs, **options)
    return keras.Model(inputs, outputs)


def train(model: keras.Model, mode: str, epochs: int = 3) -> tuple[list[float], list[np.ndarray]]:
    model.compile("adam", "mse", metrics=["mae"], **compile_options(mode))
    history = model.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0).history
    values = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    return history["loss"] + history["mae"], values


@pytest.fixture(scope="module")
def plain_runs() -> dict[str, Any]:
    return {mode: train(noisy_network(), mode) for mode in MODES}


STEPS = tuple(
    step.name for step in keras_ckpt.graph.linearise(noisy_network(checkpoints=False)).steps
)
NESTED = Plan("m", "by hand", STEPS, (Segment(0, 9, (Segment(1, 5),)), Segment(9, 15)))
SETTINGS = {
    "default": {"checkpoints": None},
    "memory": {"checkpoints": "memory"},
    "sqrt": {"checkpoints": "sqrt"},
    "four": {"checkpoints": 4},
    "collection": {"checkpoints": "collection"},
    "list": {"checkpoints": ["add_0", "norm_2"]},
    "plan": {"checkpoints": NESTED},
    "off": {"checkpoints": False},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", MODES)
def test_training_equals_plain_keras(mode: str, setting: str, plain_runs: dict[str, Any]) -> None:
    """C02, C03, C48, C49: losses, metrics, weights, statistics, seeds and slots; bits if eager."""
    model = noisy_network(**SETTINGS[setting])
    losses, values = train(model, mode)
    plain_losses, plain_values = plain_runs[mode]
    tolerance = 0 if mode == "eager" else 2e-5
    np.testing.assert_allclose(losses, plain_losses, rtol=tolerance)
    for a, b in zip(values, plain_values, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    assert (model.plan is None) == (setting == "off")
    assert setting == "off" or model.plan.segments


def test_a_custom_loop_recomputes_and_evaluation_does_not() -> None:
    """C09: each layer is called twice in a training step at most, once in any other call."""
    calls = []

    @keras.saving.register_keras_serializable(package="tests")
    class Counted(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            calls.append(self.name)
            return x * 2.0

    layers = [Counted(name=f"layer_{i}") for i in range(6)]
    model = CheckpointedSequential([keras.Input((2,)), *layers], checkpoints=3)
    calls.clear()
    x = tf.ones((1, 2))
    model(x)
    model(x, training=False)
    assert calls == [layer.name for layer in layers] * 2
    model(x, training=True)
    calls.clear()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x, training=True)
    np.testing.assert_array_equal(tape.gradient(y, x), [[64.0, 64.0]])
    assert [calls.count(layer.name) for layer in layers] == [2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize("width", [8, 12, 16])
def test_the_update_never_overtakes_the_backward_pass(width: int) -> None:
    """C01: 60 freshly traced models, in three parts; each weight after each step is plain's."""
    plan = Plan("m", "c01", ("a", "b", "c", "d"), (Segment(0, 2), Segment(2, 4)))

    def weights_over_time(seed: int, checkpoints: Any) -> np.ndarray:
        keras.utils.set_random_seed(seed)
        x = inputs = keras.Input((width,))
        for name in "abc":
            x = keras.layers.Dense(width, activation="tanh", name=name)(x)
        outputs = keras.layers.Dense(1, name="d")(x)
        model = CheckpointedModel(inputs, outputs, checkpoints=checkpoints)
        model.compile(keras.optimizers.SGD(0.02), "mse")
        rng = np.random.default_rng(seed)
        rows = []
        for _ in range(16):
            model.train_on_batch(rng.normal(size=(4, width)), rng.normal(size=(4, 1)))
            rows.append(np.concatenate([w.numpy().ravel() for w in model.weights]))
        return np.stack(rows)

    for seed in range(20):
        plain, ours = weights_over_time(seed, False), weights_over_time(seed, plan)
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


def test_a_thousand_layers_build_plan_and_train() -> None:
    """C41: no recursion error, and a plan that saves."""
    x = inputs = keras.Input((4,))
    for _ in range(1000):
        x = keras.layers.Dense(4, activation="tanh")(x)
    model = CheckpointedModel(inputs, x)
    plan = keras_ckpt.make_plan(model, batch_size=64)
    plain = keras_ckpt.make_plan(model, checkpoints=False, batch_size=64)
    assert plan.predicted_peak_bytes < plain.predicted_peak_bytes / 10
    model.compile("sgd", "mse", run_eagerly=True)
    loss = model.train_on_batch(np.ones((8, 4)), np.zeros((8, 4)))
    assert np.isfinite(loss)
    assert model.plan.segments


class Subclassed(CheckpointedModel):
    """A model with a `call` of its own, made of layers and operations."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = [keras.layers.Dense(12, activation="tanh") for _ in range(6)]
        self.dropout = keras.layers.Dropout(0.5)
        self.head = keras.layers.Dense(1)

    def call(self, x: Any, training: bool | None = None) -> Any:
        for block in self.blocks:
            x = keras.ops.add(x, block(x))
            x = self.dropout(x, training=training)
        return self.head(x)


@pytest.mark.parametrize("mode", MODES)
def test_a_subclassed_model_trains_as_plain_keras(mode: str) -> None:
    def run(**options: Any) -> Any:
        keras.utils.set_random_seed(2)
        model = Subclassed(**options)
        return train(model, mode), model

    (losses, values), model = run(checkpoints=4)
    (plain_losses, plain_values), _ = run(checkpoints=False)
    assert len(model.plan.segments) == 3
    tolerance = 0 if mode == "eager" else 2e-5
    np.testing.assert_allclose(losses, plain_losses, rtol=tolerance)
    for a, b in zip(values, plain_values, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_a_subclass_made_from_inputs_and_outputs() -> None:
    class Classifier(CheckpointedModel):
        def __init__(self, units: int) -> None:
            inputs = keras.Input((12,))
            x = keras.layers.Dense(units, activation="tanh")(inputs)
            x = keras.layers.Dense(units, activation="tanh")(x)
            outputs = keras.layers.Dense(1)(x)
            super().__init__(inputs=inputs, outputs=outputs, checkpoints=3)

    model, other = Classifier(8), Subclassed()
    train(model, "graph", epochs=1)
    assert len(model.plan.segments) == 2
    train(other, "graph", epochs=1)


def test_checkpointed_shares_layers_weights_and_compile_state() -> None:
    plain = noisy_network()
    plain.compile("adam", "mse", metrics=["mae"])
    model = keras_ckpt.checkpointed(plain, checkpoints=3)
    assert all(a is b for a, b in zip(model.layers, plain.layers, strict=True))
    assert model.optimizer is plain.optimizer
    before = plain.evaluate(X, Y, verbose=0)
    model.fit(X, Y, verbose=0)
    after = plain.evaluate(X, Y, verbose=0)
    assert after != before
    assert model.evaluate(X, Y, verbose=0) == after

    sequential = keras.Sequential([keras.Input((12,)), *[keras.layers.Dense(4) for _ in range(4)]])
    model = keras_ckpt.checkpointed(sequential, checkpoints=2)
    assert model.layers == sequential.layers
    assert isinstance(model, CheckpointedModel)


@pytest.mark.parametrize("setting", ["memory", "four", "list", "plan", "off"])
def test_a_saved_model_loads_with_its_setting(setting: str, tmp_path: Any) -> None:
    """C53: `.keras` both ways, in safe mode; weights are interchangeable with the plain model's."""
    model = noisy_network(**SETTINGS[setting])
    train(model, "graph", epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, CheckpointedModel)
    assert loaded.checkpoints == model.checkpoints
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    model.save_weights(tmp_path / "w.weights.h5")
    plain = noisy_network()
    plain.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_array_equal(plain.predict(X, verbose=0), model.predict(X, verbose=0))
    plain.save_weights(tmp_path / "p.weights.h5")
    noisy_network(checkpoints=2).load_weights(tmp_path / "p.weights.h5")


def test_another_setting_makes_another_plan() -> None:
    model = noisy_network(checkpoints=2)
    train(model, "graph", epochs=1)
    assert len(model.plan.segments) == 1
    model.checkpoints = 5
    assert model.plan is None
    model.fit(X, Y, verbose=0)
    assert len(model.plan.segments) == 4
    with pytest.raises(ValueError, match="Did you mean 'sqrt'"):
        model.checkpoints = "sqr"
    assert model.checkpoints == 5, "an error leaves the model as it was"
    model.fit(X, Y, verbose=0)


def test_other_weights_or_a_larger_batch_make_another_plan() -> None:
    """C27: unfreezing, and a batch that the plan was not made for."""
    x = inputs = keras.Input((8,))
    for _ in range(6):
        x = keras.layers.Dense(64, "gelu")(x)
    backbone = keras.Model(inputs, x)
    backbone.trainable = False
    model = CheckpointedModel(backbone.input, keras.layers.Dense(1)(backbone.output))
    data = np.ones((64, 8)), np.ones((64, 1))
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="Nothing is recomputed"):
        model.fit(*data, batch_size=32, verbose=0)
    assert not model.plan.segments
    backbone.trainable = True
    model.compile("sgd", "mse")
    model.fit(*data, batch_size=32, verbose=0)
    assert model.plan.segments
    model.fit(*data, batch_size=64, verbose=0)
    assert model.plan.batch_size == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoints": "memroy"}, "Did you mean 'memory'"),
        ({"checkpoints": ["dense_9"]}, "no layer of this name.*Did you mean 'dense_"),
        ({"checkpoints": 0}, "at least 1"),
        ({"checkpoints": 99}, "has 24 steps"),
        ({"checkpoints": []}, "names no layer"),
        ({"checkpoints": True}, "does not say what to keep"),
        ({"memory_limit": "2 parrots"}, "is not a size"),
        ({"checkpoints": "sqrt", "memory_limit": "1GB"}, "cannot be combined"),
    ],
)
def test_a_bad_setting_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        noisy_network(**options)


def test_a_setting_of_a_wrong_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cannot be 0\.5"):
        noisy_network(checkpoints=0.5)
    with pytest.raises(TypeError, match="needs a Keras model"):
        keras_ckpt.checkpointed("model")


def test_collection_without_a_marker_is_refused() -> None:
    inputs = keras.Input((2,))
    with pytest.raises(ValueError, match="has none on the way to its outputs"):
        CheckpointedModel(inputs, keras.layers.Dense(1)(inputs), checkpoints="collection")


def test_a_plan_for_another_model_is_refused() -> None:
    plan = keras_ckpt.make_plan(noisy_network(), checkpoints=3)
    inputs = keras.Input((12,))
    with pytest.raises(ValueError, match="step 0 is 'first', the model's is 'other'"):
        CheckpointedModel(inputs, keras.layers.Dense(1, name="other")(inputs), checkpoints=plan)


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match="'jax' backend"):
        noisy_network(checkpoints=2)
