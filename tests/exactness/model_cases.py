"""Models of every shape, as cases for the whole matrix."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers as L
from keras import ops

from tests.exactness.compare import Case, integers, uniform


def dense(x: Any, units: int = 6) -> Any:
    return L.Dense(units, "tanh")(x)


def conv(x: Any, filters: int = 3, **kwargs: Any) -> Any:
    return L.ReLU()(L.BatchNormalization()(L.Conv2D(filters, 3, padding="same", **kwargs)(x)))


def dropout_and_batch_norm() -> keras.Model:
    x = inputs = keras.Input((6,))
    for _ in range(3):
        x = L.Dropout(0.3)(L.BatchNormalization()(dense(x)))
    return keras.Model(inputs, L.Dense(1)(x))


def sequential() -> keras.Model:
    layers = [L.Dense(6, "tanh"), L.Dropout(0.3), L.BatchNormalization(), L.Dense(4, "gelu")]
    return keras.Sequential([keras.Input((6,)), *layers, L.Dense(1)])


def dict_and_list() -> keras.Model:
    a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
    x, y = dense(a), L.Dropout(0.3)(dense(b))
    z = dense(L.Concatenate()([x, y]))
    return keras.Model({"a": a, "b": b}, [L.Dense(1, name="p")(z), L.Dense(2, name="q")(dense(x))])


def dict_outputs() -> keras.Model:
    a, b = keras.Input((6,)), keras.Input((4,))
    x = dense(L.Concatenate()([dense(a), dense(b)]))
    return keras.Model([a, b], {"p": L.Dense(1)(x), "q": L.Dense(2)(L.Dropout(0.2)(dense(x)))})


def shared_layers() -> keras.Model:
    x = inputs = keras.Input((6,))
    shared, norm, dropout = L.Dense(6, "tanh"), L.BatchNormalization(), L.Dropout(0.3)
    for _ in range(3):
        x = dropout(norm(shared(x)))
    return keras.Model(inputs, L.Dense(1)(x))


def nested() -> keras.Model:
    functional_input = keras.Input((6,))
    functional = keras.Model(functional_input, L.Dropout(0.3)(dense(dense(functional_input))))
    within = keras.Sequential([functional, L.BatchNormalization(), L.Dense(6, "tanh")])
    inputs = keras.Input((6,))
    x = within(dense(inputs))
    return keras.Model(inputs, L.Dense(1)(functional(TwoLayers()(x))))


class TwoLayers(keras.Model):
    """A subclassed model, to lie in others."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first = L.Dense(6, "tanh", activity_regularizer="l2")
        self.dropout = L.Dropout(0.3)
        self.second = L.Dense(6)

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.second(self.dropout(self.first(x), training=training))


def residual() -> keras.Model:
    inputs = keras.Input((6, 6, 2))
    x = conv(inputs)
    for _ in range(2):
        x = L.Add()([x, conv(conv(x))])
    return keras.Model(inputs, L.Dense(1)(L.GlobalAveragePooling2D()(x)))


def long_skips() -> keras.Model:
    """A U-Net."""
    x = inputs = keras.Input((8, 8, 2))
    skips = []
    for _ in range(2):
        x = conv(x)
        skips.append(x)
        x = L.MaxPooling2D(2)(x)
    x = conv(x)
    for skip in reversed(skips):
        x = conv(L.Concatenate()([L.UpSampling2D()(x), skip]))
    return keras.Model(inputs, L.Conv2D(1, 1)(x))


def inception() -> keras.Model:
    x = inputs = keras.Input((6, 6, 2))
    for _ in range(2):
        pooled = L.MaxPooling2D(3, strides=1, padding="same")(x)
        x = L.Concatenate()([conv(x, 2), conv(conv(x, 2), 2), conv(pooled, 2)])
    return keras.Model(inputs, L.Dense(1)(L.Flatten()(x)))


def dense_net() -> keras.Model:
    """C25: every layer's output is read by all that follow."""
    x = inputs = keras.Input((6, 6, 2))
    for _ in range(4):
        grown = L.Conv2D(2, 3, padding="same")(L.ReLU()(L.BatchNormalization()(x)))
        x = L.Concatenate()([x, grown])
    return keras.Model(inputs, L.Dense(1)(L.GlobalAveragePooling2D()(x)))


def frozen_in_part() -> keras.Model:
    model = dropout_and_batch_norm()
    # The first block's BatchNormalization uses its statistics then, and moves nothing.
    for layer in [*model.layers[1:4], model.layers[7]]:
        layer.trainable = False
    return model


def nothing_to_train_at_first() -> keras.Model:
    x = inputs = keras.Input((6,))
    x = ops.tanh(L.GaussianNoise(0.2)(L.Rescaling(2.0)(L.UnitNormalization()(x))))
    return keras.Model(inputs, L.Dense(1)(L.Dropout(0.2)(dense(ops.square(x)))))


def bools_and_integers() -> keras.Model:
    """C12, C49: tensors without gradient and `keras.ops` between the layers."""
    inputs = keras.Input((6,))
    x = dense(inputs)
    positive = ops.greater(x, 0.0)
    largest = ops.argmax(x, axis=-1)
    y = ops.where(positive, dense(x), 0.1 * x)
    code = L.Embedding(6, 4)(largest)
    y = L.Concatenate()([y, code, ops.cast(positive, "float32")])
    return keras.Model(inputs, L.Dense(1)(dense(ops.where(ops.isnan(y), 0.0, y))))


def same_tensor_twice() -> keras.Model:
    """C16, C11."""
    inputs = keras.Input((4, 6))
    x = dense(inputs)
    attention = L.MultiHeadAttention(2, 3, dropout=0.2)
    x = L.Add()([x, x]) + attention(x, x, x, use_causal_mask=True)
    return keras.Model(inputs, L.Dense(1)(L.Flatten()(L.LayerNormalization()(x))))


def masks() -> keras.Model:
    """C07: a mask made in one segment reaches LSTM and attention in others, and the loss."""
    tokens = keras.Input((5,), dtype="int32")
    x = L.Embedding(7, 4, mask_zero=True)(tokens)
    x = L.Dropout(0.2)(L.LSTM(4, return_sequences=True)(x))
    x = L.MultiHeadAttention(2, 3)(x, x)
    return keras.Model(tokens, L.Dense(1)(L.Bidirectional(L.GRU(3, return_sequences=True))(x)))


def two_towers() -> keras.Model:
    """An unused output too: the LSTM's first state."""
    left, right = keras.Input((4, 3)), keras.Input((6,))
    x, _, cell = L.LSTM(4, return_state=True)(left)
    y = L.Dropout(0.3)(dense(dense(right), 4))
    return keras.Model((left, right), L.Dense(1)(L.Dot(1)([ops.add(x, cell), y])))


X, Y, IMAGES = uniform(8, 6), uniform(8, 1, seed=1), uniform(8, 6, 6, 2)
PQ = {"p": Y, "q": uniform(8, 2, seed=2)}

CASES = {
    "dropout_and_batch_norm_C02_C03": Case(dropout_and_batch_norm, X, Y),
    "sequential": Case(sequential, X, Y),
    "dict_and_list_C15": Case(dict_and_list, {"a": X, "b": uniform(8, 4)}, list(PQ.values())),
    "dict_outputs_C15": Case(dict_outputs, [X, uniform(8, 4)], PQ),
    "shared_layers_C03": Case(shared_layers, X, Y),
    "nested": Case(nested, X, Y),
    "residual": Case(residual, IMAGES, Y),
    "long_skips": Case(long_skips, uniform(8, 8, 8, 2), uniform(8, 8, 8, 1, seed=1)),
    "inception": Case(inception, IMAGES, Y),
    "dense_net_C25": Case(dense_net, IMAGES, Y),
    "frozen_in_part_C03_C27": Case(frozen_in_part, X, Y),
    "nothing_to_train_at_first": Case(nothing_to_train_at_first, X, Y),
    "bools_and_integers_C12_C49": Case(bools_and_integers, X, Y),
    "same_tensor_twice_C11_C16": Case(same_tensor_twice, uniform(8, 4, 6), Y, eager_tolerance=1e-6),
    "masks_C07": Case(masks, integers(7, 8, 5), uniform(8, 5, 1, seed=1)),
    "two_towers_C15_C19": Case(two_towers, (uniform(8, 4, 3), X), Y),
}
