"""A switch for models that one cannot change: every `keras.Model` in the process.

While it is on, the outermost model of each training call runs under a plan of its own. The only
thing that is changed in Keras is `keras.Model.__call__`, which is not there otherwise, and which
is gone again when the switch is off.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from keras_ckpt import keras_internals
from keras_ckpt.checkpointing import Checkpointing
from keras_ckpt.checkpoints import check_setting
from keras_ckpt.model import CheckpointedModel
from keras_ckpt.sizes import parse_bytes

_CHECKPOINTING = "_keras_ckpt_switched_on"

_Settings = tuple[Any, int | str | None]


class _Switch:
    """What is on, and the models that it has met."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings
        self._models: weakref.WeakSet[keras.Model] = weakref.WeakSet()

    def call(self, model: keras.Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a model, under a plan if it is the outermost one."""
        plain_call = functools.partial(keras.layers.Layer.__call__, model)
        if isinstance(model, CheckpointedModel) or keras_internals.is_inside_call():
            return plain_call(*args, **kwargs)
        with self._running(model):
            return plain_call(*args, **kwargs)

    @contextlib.contextmanager
    def _running(self, model: keras.Model) -> Iterator[None]:
        plain = model.call

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if model not in self._models:
                self._models.add(model)
                # On the model, since it refers to the model: kept here, both would stay for ever.
                vars(model)[_CHECKPOINTING] = Checkpointing(model, *self.settings)
            return vars(model)[_CHECKPOINTING].call(plain, args, kwargs)

        # Keras looks `call` up on the instance. Past its `__setattr__`, which would track it.
        vars(model)["call"] = call
        try:
            yield
        finally:
            del vars(model)["call"]

    def forget(self) -> None:
        """Has the train steps that were traced under the switch traced again."""
        for model in self._models:
            model.train_function = None
            vars(model).pop(_CHECKPOINTING, None)


_switch: _Switch | None = None


def enable(checkpoints: Any = "memory", memory_limit: int | str | None = None) -> None:
    """Turns checkpointing on for every `keras.Model` in the process.

    Models that have been trained already go on with the train step that Keras has traced for
    them, until they are compiled again. A `CheckpointedModel` keeps its own setting.

    Args:
        checkpoints: see `CheckpointedModel`. It has to fit every model that is trained.
        memory_limit: see `CheckpointedModel`.

    Raises:
        ValueError: if a setting is of no known form.
        TypeError: if a setting is of a wrong type.
        RuntimeError: if Keras runs on another backend than TensorFlow.

    Example:

    >>> enable(checkpoints="sqrt")
    >>> disable()
    """
    keras_internals.require_tensorflow()
    if memory_limit is not None:
        parse_bytes(memory_limit)
        checkpoints = None if checkpoints == "memory" else checkpoints
    _turn_to((check_setting(checkpoints, memory_limit), memory_limit))


def disable() -> None:
    """Turns off what `enable` turned on, and leaves no trace of it. Harmless if nothing is on."""
    _turn_to(None)


@contextlib.contextmanager
def enabled(checkpoints: Any = "memory", memory_limit: int | str | None = None) -> Iterator[None]:
    """`enable` for the length of a `with` block; what was in force before comes back after it.

    Args:
        checkpoints: see `enable`.
        memory_limit: see `enable`.

    Example:

    >>> with enabled(checkpoints=4):
    ...     pass  # code that builds and trains models
    """
    before = None if _switch is None else _switch.settings
    enable(checkpoints, memory_limit)
    try:
        yield
    finally:
        _turn_to(before)


def _turn_to(settings: _Settings | None) -> None:
    global _switch  # noqa: PLW0603 -- the switch is process-wide by its purpose
    if _switch is not None:
        _switch.forget()
        del keras.Model.__call__
        _switch = None
    if settings is not None:
        _switch = switch = _Switch(settings)

        def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            return switch.call(model, args, kwargs)

        keras.Model.__call__ = call
