"""Architectures of `keras.applications`, converted by `checkpointed`: two steps as in plain Keras.

Random weights, the smallest images that the architecture takes, one architecture per kind of
block: inverted residual, the same with squeeze-and-excitation, dense, stochastic depth with
LayerNorm, and cells of separable convolutions. One combination each: deep chains of BatchNorm
amplify the rounding of graph mode, so it is eager mode, whose bits are equal, that is compared.
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
    "DenseNet": lambda: A.densenet.DenseNet([1, 2, 2, 1], input_shape=(32, 32, 3), **SETTINGS),
    "ConvNeXt": lambda: A.convnext.ConvNeXt(
        [1, 1, 2, 1], [8, 8, 16, 16], 0.2, input_shape=(32, 32, 3), **SETTINGS
    ),
    "NASNetMobile": lambda: A.NASNetMobile(input_shape=(32, 32, 3), **SETTINGS),
}
COMPILE = {"loss": "sparse_categorical_crossentropy"}
CASES = {
    name: Case(
        build, uniform(4, 32, 32, 3), integers(4, 4), lambda: dict(COMPILE), {"batch_size": 2}
    )
    for name, build in ARCHITECTURES.items()
}


@pytest.mark.parametrize("name", CASES)
def test_applications_train_the_same(name: str) -> None:
    check(CASES[name], "eager", "sqrt")
