"""The batch that a profile trains on: the user's own data, or random data of the right shapes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_ckpt import keras_internals
from keras_ckpt.planning import DEFAULT_BATCH_SIZE, known_shape


def make_batch(model: keras.Model, x: Any, y: Any, batch_size: int | None) -> Any:
    """One batch, converted as `fit` does, in tensors of its own.

    Args:
        model: the model.
        x: what `fit` takes as `x`; None for random data.
        y: what `fit` takes as `y`.
        batch_size: examples in the batch; 32 if None. Data that comes in batches keeps its own.

    Raises:
        ValueError: if the data cannot be read, or random data cannot be made up.
    """
    if x is None:
        x, y = _random_data(model, batch_size or DEFAULT_BATCH_SIZE)
    try:
        batch = keras_internals.first_batch(model, x, y, batch_size)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The data for profiling model '{model.name}' cannot be read: {error} "
            "Give `x` and `y` as to `fit`."
        ) from error
    # A slice would keep the whole data in memory.
    return tf.nest.map_structure(
        lambda t: tf.raw_ops.DeepCopy(x=t) if isinstance(t, tf.Tensor) else t, batch
    )


def size_of(batch: Any) -> int | None:
    """The number of examples in a batch."""
    shapes = [t.shape for t in tf.nest.flatten(batch) if getattr(t, "shape", None)]
    return shapes[0][0] if shapes else None


def _random_data(model: keras.Model, batch_size: int) -> tuple[Any, Any]:
    functional = keras_internals.inner_functional(model)
    if functional is None:
        raise ValueError(
            f"Model '{model.name}' is subclassed, so the shapes of its data are not known. "
            "Give a batch: `profile(model, x, y)`."
        )
    inputs, outputs = keras_internals.structures(functional)
    random = np.random.default_rng(0)
    inputs = keras.tree.map_structure(
        lambda t: keras.KerasTensor(known_shape(t.shape, batch_size), t.dtype), inputs
    )
    outputs = keras.tree.flatten(model.compute_output_spec(inputs))
    losses = _losses(model, len(outputs))
    x = keras.tree.map_structure(lambda t: _random_array(random, t.shape, t.dtype), inputs)
    y = [_random_target(random, t, loss) for t, loss in zip(outputs, losses, strict=True)]
    return x, y[0] if len(y) == 1 else _like_loss(model, y)


def _losses(model: keras.Model, outputs: int) -> list[Any]:
    losses = keras.tree.flatten(model.loss)
    return losses if len(losses) == outputs else [None] * outputs


def _like_loss(model: keras.Model, targets: list[Any]) -> Any:
    """Several targets in the structure in which the losses were given."""
    is_like = isinstance(model.loss, dict) and len(model.loss) == len(targets)
    return dict(zip(model.output_names, targets, strict=True)) if is_like else targets


def _random_target(random: np.random.Generator, output: keras.KerasTensor, loss: Any) -> Any:
    name = loss if isinstance(loss, str) else getattr(loss, "name", None) or type(loss).__name__
    if "sparse" in str(name).lower():
        return random.integers(0, output.shape[-1], output.shape[:-1]).astype("int32")
    return _random_array(random, output.shape, output.dtype)


def _random_array(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    if dtype == "string":
        return np.full(shape, "")
    if "float" in dtype:
        return random.random(shape, dtype="float32").astype(tf.as_dtype(dtype).as_numpy_dtype)
    # Small enough for every vocabulary.
    return random.integers(0, 2, shape).astype(dtype)
