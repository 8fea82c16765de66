"""Layers that people write: state of their own, loops, structures, None, flags, wrappers.

Three of the twelve combinations, two for layers that XLA sees nothing special in.
"""

# ruff: noqa: PLW0108 - a layer has to be made when it is called, with a seed of its own.

from __future__ import annotations

from collections import namedtuple
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers as L
from keras import ops

import keras_ckpt
from tests.exactness.compare import (
    TOLERANCE,
    Case,
    assert_same,
    check,
    checkpoint,
    plain_run,
    train,
    uniform,
)
from tests.exactness.model_cases import X, Y, dense

Pair = namedtuple("Pair", ["left", "right"])


class Counter(L.Layer):
    """C08: counts its calls, draws noise, and lets both show in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(5)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1.0)
            x = x + keras.random.normal(ops.shape(x), stddev=0.1, seed=self.seeds)
        return x * (1 + 0.1 * self.calls)


class Structures(L.Layer):
    """C15: takes and makes dicts, lists and named tuples; one of its outputs is never read."""

    def call(self, inputs: dict[str, Any]) -> Any:
        a, (b, c) = inputs["a"], inputs["bc"]
        return {"sum": Pair(a + b, b * c), "unused": [a - c]}


class Parts(L.Layer):
    """C13, C14: what a graph of layers cannot hold goes through `recompute`."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.dense, self.recomputed = L.Dense(6, "tanh"), recomputed

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def part(self, x: Any, scale: Any, negate: bool, power: int, *, name: str) -> Any:
        if not (isinstance(negate, bool) and isinstance(power, int) and isinstance(name, str)):
            raise TypeError("the flags have become tensors")
        x = self.dense(x if scale is None else x * scale)
        return {name: -(x**power) if negate else x**power, "nothing": None, "flag": negate}

    def call(self, x: Any) -> Any:
        part = keras_ckpt.recompute(self.part) if self.recomputed else self.part
        first = part(x, None, True, 3, name="cube")
        if first["nothing"] is not None or first["flag"] is not True:
            raise TypeError("None and flags did not come out as they were")
        return part(first["cube"], x, False, 2, name="square")["square"]


class MaskedParts(L.Layer):
    """C07: the mask travels with the tensor from one recomputed part to the next."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.embedding = L.Embedding(5, 4, mask_zero=True)
        self.lstm, self.recomputed = L.LSTM(6), recomputed

    def build(self, shape: Any) -> None:
        self.embedding.build(shape)
        self.lstm.build((*shape, 4))

    def call(self, x: Any) -> Any:
        wrap = keras_ckpt.recompute if self.recomputed else (lambda function: function)
        return wrap(self.lstm)(wrap(self.embedding)(ops.cast(5 * ops.abs(x), "int32")))


class BoolFirst(L.Layer):
    """C12: a bool tensor as first output and as input."""

    def call(self, x: Any, before: Any = None) -> tuple[Any, Any]:
        positive = x > 0 if before is None else ops.logical_and(x > 0.1, before)
        return positive, ops.where(positive, x, 0.5 * x)


class Loops(L.Layer):
    """C17: `tf.while_loop` and `tf.map_fn` around the layer's own weight."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x: Any) -> Any:
        def body(i: Any, x: Any) -> tuple[Any, Any]:
            return i + 1, tf.tanh(tf.matmul(x, self.kernel))

        _, x = tf.while_loop(lambda i, _: i < 3, body, (0, x), maximum_iterations=3)
        return tf.map_fn(lambda row: row * tf.reduce_sum(row), x)


class Scaled(L.Wrapper):
    """A wrapper with a weight of its own around any layer."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        return self.scale * self.layer(x)


class Adapter(L.Layer):
    """C27: a frozen layer with two small trainable matrices beside it, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = L.Dense(6, trainable=False)
        self.down, self.up = L.Dense(2, use_bias=False), L.Dense(6, use_bias=False)

    def build(self, shape: Any) -> None:
        self.frozen.build(shape)
        self.down.build(shape)
        self.up.build((None, 2))

    def call(self, x: Any) -> Any:
        return ops.tanh(self.frozen(x) + self.up(self.down(x)))


class DropoutCell(L.Layer):
    """A recurrent cell with a Dropout layer: its state moves inside the loop over time."""

    state_size = output_size = 6

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.dropout = L.Dense(6, "tanh"), L.Dropout(0.3, seed=3)

    def build(self, shape: Any) -> None:
        self.dense.build((None, shape[-1] + 6))

    def call(self, x: Any, states: Any, training: bool = False) -> Any:
        y = self.dense(ops.concatenate([x, states[0]], axis=-1))
        y = self.dropout(y, training=training)
        return y, [y]


class InFunction(L.Layer):
    """Calls layers with state inside a `tf.function`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = L.BatchNormalization(), L.Dropout(0.3, seed=3)

    def build(self, shape: Any) -> None:
        self.norm.build(shape)

    def call(self, x: Any) -> Any:
        return tf.function(lambda x: self.dropout(self.norm(x, training=True), training=True))(x)


def around(call: Any) -> Any:
    """A model with the given piece in the middle of it."""

    def build() -> keras.Model:
        inputs = keras.Input((6,), batch_size=4)
        x = call(dense(L.Dropout(0.2)(dense(inputs))))
        return keras.Model(inputs, L.Dense(1)(dense(dense(x))))

    return build


def structures(x: Any) -> Any:
    pair = Structures()({"a": x, "bc": [dense(x), dense(x)]})["sum"]
    return L.Multiply()([dense(pair.left), pair.right])


def bool_first(x: Any) -> Any:
    layer = BoolFirst()
    positive, x = layer(x)
    return layer(dense(x), before=positive)[1]


def over_time(layer: Any) -> Any:
    return lambda x: L.Flatten()(layer(L.Reshape((2, 3))(x)))


PIECES = {
    "counter_C08": lambda x: Counter()(x),
    "structures_C15": structures,
    "bool_first_C12": bool_first,
    "loops_C17": lambda x: Loops()(x),
    "wrapper": lambda x: Scaled(L.SpectralNormalization(L.Dense(6)))(x),
    "adapters_C27": lambda x: Adapter()(Adapter()(x)),
    "stateful_lstm_C19": over_time(lambda x: L.LSTM(4, stateful=True)(x)),
    "state_in_a_loop": over_time(lambda x: L.RNN(DropoutCell(), return_sequences=True)(x)),
    "dropout_over_time": over_time(lambda x: L.TimeDistributed(L.Dropout(0.3))(x)),
    "batch_norm_over_time": over_time(lambda x: L.TimeDistributed(L.BatchNormalization())(x)),
    "state_in_a_function": lambda x: InFunction()(x),
}
XLA = ("counter_C08", "bool_first_C12", "loops_C17", "stateful_lstm_C19", "state_in_a_loop")
CASES = {name: Case(around(piece), X, Y) for name, piece in PIECES.items()}
# Three readers of one tensor.
CASES["structures_C15"] = Case(around(structures), X, Y, eager_tolerance=1e-6)


def any_length() -> keras.Model:
    """TimeDistributed maps its layer over the time axis if it does not know the axis' length."""
    inputs = keras.Input((None, 3))
    x = L.TimeDistributed(L.Dense(4, "tanh"))(L.Dropout(0.2)(inputs))
    x = L.TimeDistributed(L.LayerNormalization())(dense(x, 4))
    return keras.Model(inputs, L.Dense(1)(dense(L.GlobalAveragePooling1D()(x))))


CASES["any_length"] = Case(any_length, uniform(8, 5, 3), Y)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("execution", "setting"), [("graph", "nested"), ("eager", "nested")])
def test_custom_layers_train_the_same(name: str, execution: str, setting: Any) -> None:
    check(CASES[name], execution, setting)


@pytest.mark.parametrize("name", XLA)
def test_custom_layers_train_the_same_under_xla(name: str) -> None:
    check(CASES[name], "jit", 3)


@pytest.mark.parametrize("parts", [Parts, MaskedParts], ids=["none_and_flags_C13_C14", "masks_C07"])
@pytest.mark.parametrize("execution", ["graph", "eager"])
def test_parts_of_a_layer(parts: type, execution: str) -> None:
    plain, ours = (Case(around(lambda x, r=r: parts(r)(x)), X, Y) for r in (False, True))
    tolerance = 0 if execution == "eager" else TOLERANCE
    assert_same(plain_run(ours, execution), plain_run(plain, execution), tolerance)


def test_steps_that_cannot_be_replayed_are_run_once() -> None:
    """They stay outside of all segments, and the plan says so."""
    model = checkpoint(CASES["state_in_a_loop"].build(), "nested")
    train(model, CASES["state_in_a_loop"], "eager")
    (index,) = [i for i, name in enumerate(model.plan.steps) if name.startswith("rnn")]
    assert model.plan.segments
    assert not any(s.start <= index < s.stop for s in model.plan.segments)
    assert any("never recomputed" in note for note in model.plan.notes)
