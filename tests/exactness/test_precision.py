"""Precisions: the casts, the loss scaling and the dtype of every tensor are those of plain Keras.

Low precision rounds at 1e-3 (float16) and 8e-3 (bfloat16), and XLA may keep more digits between
operations than the kernels do, so that only eager mode, whose bits are equal, is compared tightly.
The tolerance elsewhere is twice the rounding of one operation. Three of the twelve combinations.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers as L

import keras_ckpt
from tests.exactness.compare import Case, assert_same, check, checkpoint, plain_run, train
from tests.exactness.model_cases import X, Y

ROUNDING = {"float32": 1e-5, "mixed_float16": 2e-3, "mixed_bfloat16": 1.6e-2, "float64": 1e-12}


class Block(L.Layer):
    """C21: recomputes inside its own call, with its own weights."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = L.Dense(6, "tanh")
        self.dropout = L.Dropout(0.2)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.scale = self.add_weight(shape=(6,), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        return keras_ckpt.recompute(lambda x: self.dropout(self.dense(x)) * self.scale)(x)


class PlainBlock(Block):
    def call(self, x: Any) -> Any:
        return self.dropout(self.dense(x)) * self.scale


def build(policy: str, block: type[Block] = PlainBlock) -> keras.Model:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        x = inputs = keras.Input((6,))
        for _ in range(2):
            x = L.LayerNormalization()(L.Dropout(0.2)(L.Dense(6, "tanh")(x)))
            x = L.BatchNormalization()(block()(x))
        return keras.Model(inputs, L.Dense(1, dtype="float32")(x))
    finally:
        keras.config.set_dtype_policy(before)


def policies_by_layer() -> keras.Model:
    x = inputs = keras.Input((6,))
    for policy in ("float32", "mixed_float16", "mixed_bfloat16", "float64"):
        x = L.Dropout(0.2)(L.Dense(6, "tanh", dtype=policy)(x))
    return keras.Model(inputs, L.Dense(1)(x))


CASES = {
    policy: Case(lambda policy=policy: build(policy), X, Y, tolerance=rounding)
    for policy, rounding in ROUNDING.items()
}
CASES["policies_by_layer"] = Case(policies_by_layer, X, Y, tolerance=1.6e-2)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("execution", "setting"), [("graph", "nested"), ("jit", 3), ("eager", "nested")]
)
def test_precisions_train_the_same(name: str, execution: str, setting: Any) -> None:
    check(CASES[name], execution, setting)


def too_large_a_scale() -> dict[str, Any]:
    return {
        "optimizer": keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(), initial_scale=2.0**120
        )
    }


@pytest.mark.parametrize("execution", ["graph", "eager"])
def test_steps_whose_gradients_overflow_are_skipped_c54(execution: str) -> None:
    """C54: the scale is halved, no weight moves, and the loss in the history is not scaled."""
    case = Case(lambda: build("mixed_float16"), X, Y, too_large_a_scale, tolerance=2e-3)
    check(case, execution, 3)

    keras.utils.set_random_seed(1)
    model = checkpoint(case.build(), 3)
    before = [w.numpy() for w in model.trainable_weights]
    run = train(model, case, execution)
    assert max(run.history["loss"]) < 10
    assert model.optimizer.dynamic_scale.numpy() == 2.0**116
    for weight, value in zip(model.trainable_weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("execution", ["graph", "eager"])
def test_recompute_inside_a_layer_c21(policy: str, execution: str) -> None:
    """C21: a layer that uses its own weights and a sublayer inside `recompute`."""
    plain = Case(lambda: build(policy), X, Y, tolerance=ROUNDING[policy])
    recomputed = Case(lambda: build(policy, Block), X, Y)
    tolerance = 0 if execution == "eager" else plain.tolerance
    assert_same(plain_run(recomputed, execution), plain_run(plain, execution), tolerance)
