"""Every optimizer of `keras.optimizers` has the slots and the steps that it has in plain Keras.

The model has what optimizers tell apart: a table with a sparse gradient, a weight without any
gradient, and matrices and vectors. The optimizer does not see how a model is executed or cut, so
the generated list runs two of the twelve combinations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers as L
from keras import optimizers as O

from tests.exactness.compare import Case, check, integers, uniform
from tests.exactness.model_cases import dense

# Those that take more than a learning rate.
RECIPES: dict[str, Callable[[], O.Optimizer]] = {
    "LossScaleOptimizer": lambda: O.LossScaleOptimizer(O.Adam(0.01), initial_scale=16.0),
    "MultiOptimizer": lambda: O.MultiOptimizer(
        O.OptimizerMap(O.SGD(0.1), {"embedding.*": O.Adam(0.01)})
    ),
    "SGD": lambda: O.SGD(0.01, momentum=0.9, nesterov=True),
    "RMSprop": lambda: O.RMSprop(0.01, momentum=0.5, centered=True),
    "Adam": lambda: O.Adam(0.01, amsgrad=True),
}
# Names that are no optimizers to train with, each with the reason.
EXCLUDED = {"Optimizer": "abstract", "OptimizerMap": "a table for MultiOptimizer"}
FEATURES: dict[str, Callable[[], O.Optimizer]] = {
    "clipnorm": lambda: O.Adam(0.01, clipnorm=0.01),
    "clipvalue": lambda: O.Adam(0.01, clipvalue=0.001),
    "global_clipnorm": lambda: O.Adam(0.01, global_clipnorm=0.01),
    "moving_average": lambda: O.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "accumulation_of_2_C55": lambda: O.Adam(0.01, gradient_accumulation_steps=2),
    "accumulation_of_4_C55": lambda: O.SGD(0.1, gradient_accumulation_steps=4),
    "weight_decay_C05": lambda: O.AdamW(0.01, weight_decay=0.1),
    "schedule": lambda: O.Adam(O.schedules.ExponentialDecay(0.01, 2, 0.5)),
}


class HalfUsed(L.Layer):
    """C05: touches a weight that the loss does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.used = self.add_weight(shape=(4,), initializer="ones", name="used")
        self.unused = self.add_weight(shape=(4,), initializer="ones", name="unused")

    def call(self, x: Any) -> tuple[Any, Any]:
        return x * self.used, x * self.unused


def model() -> keras.Model:
    tokens = keras.Input((3,), dtype="int32")
    x, _ = HalfUsed()(L.Embedding(50, 4)(tokens))
    return keras.Model(tokens, L.Dense(1)(dense(L.Dropout(0.2)(L.Flatten()(dense(x, 3))))))


def case(optimizer: Callable[[], O.Optimizer]) -> Case:
    return Case(model, integers(50, 8, 3), uniform(8, 1), lambda: {"optimizer": optimizer()})


def optimizers() -> list[str]:
    exported = {name: getattr(O, name) for name in dir(O)}
    return [
        name
        for name, x in exported.items()
        if isinstance(x, type) and issubclass(x, O.Optimizer) and name not in EXCLUDED
    ]


CASES = {
    name: case(RECIPES.get(name, lambda name=name: getattr(O, name)(0.01))) for name in optimizers()
}
CASES |= {name: case(optimizer) for name, optimizer in FEATURES.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("execution", "setting"), [("graph", 3), ("eager", "nested")])
def test_optimizers_train_the_same(name: str, execution: str, setting: Any) -> None:
    check(CASES[name], execution, setting)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "global_clipnorm", "accumulation_of_2_C55"])
def test_optimizers_train_the_same_under_xla(name: str) -> None:
    check(CASES[name], "jit", "sqrt")
