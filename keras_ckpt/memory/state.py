"""Leaving a model, and the process's random generators, as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import keras
import numpy as np

from keras_ckpt import keras_internals


@contextmanager
def preserving_random_state() -> Iterator[None]:
    """Leaves the random generators of Python, NumPy and Keras as they were before the block."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with keras_internals.preserving_global_seed():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def preserving_variables(model: keras.Model) -> Iterator[None]:
    """Leaves all variables of a built model as they were before the block.

    Weights, statistics, seed generators, metrics and optimizer slots are copied to the host, so
    that the copy takes no memory of the device.
    """
    optimizer = [] if model.optimizer is None else model.optimizer.variables
    variables = {id(v): v for v in (*model.variables, *model.metrics_variables, *optimizer)}
    values = [keras_internals.stored_variable(v).numpy() for v in variables.values()]
    try:
        yield
    finally:
        for variable, value in zip(variables.values(), values, strict=True):
            variable.assign(value)
