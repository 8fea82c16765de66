"""The `call` of a subclassed model is recorded where that is exact, and only there."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ckpt import CheckpointedModel

X = np.linspace(-1, 1, 32).reshape(8, 4).astype("float32")


class Stack(CheckpointedModel):
    """Dense layers; a subclass changes how they are called."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = [keras.layers.Dense(4, activation="tanh") for _ in range(6)]

    def call(self, x: Any, training: bool | None = None) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Structured(Stack):
    """Takes a dict and returns one that holds more than tensors."""

    def call(self, data: dict[str, Any], training: bool | None = None) -> dict[str, Any]:
        y = super().call(data["x"])
        return {"y": y + data["bias"], "none": None, "flag": bool(training)}


class Counting(Stack):
    """Counts its own steps."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps = self.add_weight(name="steps", initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool | None = None) -> Any:
        self.steps.assign_add(1.0)
        return super().call(x)


class Deciding(Stack):
    """Decides by the data."""

    def call(self, x: Any, training: bool | None = None) -> Any:
        return super().call(x if float(keras.ops.sum(x)) > 0 else -x)


def test_arguments_and_results_may_be_nested() -> None:
    model = Structured(checkpoints=3)
    data = {"x": tf.constant(X), "bias": tf.ones(())}
    plain = model(data, training=False)
    result = model(data, training=True)
    assert len(model.plan.segments) == 2
    np.testing.assert_array_equal(result["y"], plain["y"])
    assert result["none"] is None
    assert result["flag"] is True


class Scaled(Stack):
    """Depends on an attribute that a user may change at any time."""

    scale = 1.0

    def call(self, x: Any, training: bool | None = None) -> Any:
        return super().call(x) * self.scale


def test_a_changed_attribute_is_seen() -> None:
    model = Scaled(checkpoints=3)
    assert np.any(model(X, training=True))
    model.scale = 0.0
    assert not np.any(model(X, training=True))
    assert not any(block._inbound_nodes for block in model.blocks)


@pytest.mark.parametrize(
    ("kind", "reason"), [(Counting, "assigns the variable|reads the variable"), (Deciding, "")]
)
def test_what_cannot_be_recorded_is_said_once_and_stays_exact(kind: Any, reason: str) -> None:
    def train(checkpoints: Any) -> tuple[list[float], list[np.ndarray]]:
        keras.utils.set_random_seed(0)
        model = kind(checkpoints=checkpoints)
        model.compile("sgd", "mse", run_eagerly=True)
        history = model.fit(X, X, epochs=2, batch_size=4, verbose=0).history["loss"]
        return history, [w.numpy() for w in model.weights]

    plain_history, plain_weights = train(False)
    with pytest.warns(UserWarning, match=f"cannot be recorded.*({reason})") as warned:
        history, weights = train(3)
    assert len([w for w in warned if "cannot be recorded" in str(w.message)]) == 1
    assert history == plain_history
    for a, b in zip(weights, plain_weights, strict=True):
        np.testing.assert_array_equal(a, b)
