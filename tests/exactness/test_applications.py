"""Architectures of `keras.applications`, converted by `checkpointed`: two steps as in plain Keras.

Random weights, the smallest images that the architecture takes, one architecture per kind of
block: inverted residual, the same with squeeze-and-excitation, dense, and stochastic depth with
LayerNorm. One combination each, in eager mode, where bits are equal: deep chains of BatchNorm over
two images amplify the rounding of graph mode. They do so too where tensors are read many times
(NASNet), whose gradients are then added in another order; in float64 it agrees to 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import pytest
from keras import applications as A

from tests.exactness.compare import Case, check, integers, uniform

SETTINGS = {"weights": None, "classes": 4}
ARCHITECTURES: dict[str, Callable[[], keras.Model]] = {
    "MobileNetV3Small": lambda: A.MobileNetV3Small(
        (32, 32, 3), 0.25, minimalistic=True, include_preprocessing=False, **SETTINGS
    ),
    "EfficientNetV2B0": lambda: A.EfficientNetV2B0(input_shape=(32, 32, 3), **SETTINGS),
    "DenseNet121": lambda: A.DenseNet121(input_shape=(32, 32, 3), **SETTINGS),
    "ConvNeXtTiny": lambda: A.ConvNeXtTiny(input_shape=(32, 32, 3), **SETTINGS),
}
COMPILE = {"loss": "sparse_categorical_crossentropy"}
CASES = {
    name: Case(
        build,
        uniform(4, 32, 32, 3),
        integers(4, 4),
        lambda: dict(COMPILE),
        {"batch_size": 2, "epochs": 1},
    )
    for name, build in ARCHITECTURES.items()
}


@pytest.mark.parametrize("name", CASES)
def test_applications_train_the_same(name: str) -> None:
    check(CASES[name], "eager", "sqrt")
