"""A checkpointed model over the layers of one that exists."""

from __future__ import annotations

from typing import Any

import keras

from keras_ckpt import keras_internals
from keras_ckpt.checkpointing import Checkpointing
from keras_ckpt.model import (
    CheckpointedFunctional,
    CheckpointedModel,
    CheckpointedSequential,
    checkpointed_call,
)


def checkpointed(
    model: keras.Model, checkpoints: Any = None, memory_limit: int | str | None = None
) -> CheckpointedModel:
    """A checkpointed model over the layers of one that exists.

    Args:
        model: any Keras model. It stays as it is; layers, weights and what it was compiled with
            (the optimizer and its slots, too) are shared with the new model.
        checkpoints: see `CheckpointedModel`.
        memory_limit: see `CheckpointedModel`.

    Returns:
        the checkpointed model, compiled if `model` is. Where `model` is of a class of your own, the
        new one has its methods, too, and is saved as that class, without the setting.

    Raises:
        TypeError: if `model` is not a Keras model.
        ValueError: if a setting is of no known form or does not fit the model, or if a model of
            a class of your own is not built.

    Example:

    >>> inputs = keras.Input((16,))
    >>> x = keras.layers.Dense(64, activation="gelu")(inputs)
    >>> plain = keras.Model(inputs, keras.layers.Dense(1)(x))
    >>> model = checkpointed(plain, checkpoints=2)
    >>> model.layers[1] is plain.layers[1]
    True
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`checkpointed` needs a Keras model; received {model!r}.")
    keras_internals.require_tensorflow()
    settings = {"checkpoints": checkpoints, "memory_limit": memory_limit}
    if type(model) in (keras.Sequential, CheckpointedSequential):
        layers = keras_internals.layers_with_input(model)
        converted = CheckpointedSequential(layers, name=model.name, **settings)
    elif type(model) in (keras_internals.Functional, CheckpointedFunctional):
        inputs, outputs = keras_internals.structures(model)
        converted = CheckpointedFunctional(inputs, outputs, name=model.name, **settings)
    else:
        return _view(model, settings)
    # `compile` scales the loss, and inputs are cast, by the model's own policy.
    converted.dtype_policy = model.dtype_policy
    keras_internals.share_compile_state(model, converted)
    return converted


def _view(model: keras.Model, settings: dict[str, Any]) -> CheckpointedModel:
    """A second object with everything that a model has, of a class that adds checkpointing."""
    if not model.built:
        raise ValueError(
            f"Model '{model.name}' ({type(model).__name__}) is not built, so that there are no "
            "layers to share yet. Call it on data first, or derive its class from "
            "`keras_ckpt.CheckpointedModel` in the place of `keras.Model`."
        )
    plain = type(model)
    view = object.__new__(_checkpointed_class(plain))
    # Past Keras's `__setattr__`, which would track everything a second time.
    view.__dict__.update(model.__dict__, train_function=None)
    view.__dict__["_checkpointing"] = Checkpointing(view, **settings)
    return view


def _checkpointed_class(plain: type[keras.Model]) -> type[CheckpointedModel]:
    call = getattr(plain.call, "plain", plain.call)
    members = {
        "call": checkpointed_call(call),
        "get_config": plain.get_config,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
    }
    bases = (plain,) if issubclass(plain, CheckpointedModel) else (CheckpointedModel, plain)
    checkpointed_class = type(plain.__name__, bases, members)
    _save_as(plain, checkpointed_class)
    return checkpointed_class


def _save_as(plain: type[keras.Model], other: type[keras.Model]) -> None:
    """Has models of a class saved as ones of another, so that their files load wherever it is."""
    package, separator, name = keras.saving.get_registered_name(plain).partition(">")
    if separator:
        keras.saving.register_keras_serializable(package, name)(other)
        keras.saving.register_keras_serializable(package, name)(plain)
