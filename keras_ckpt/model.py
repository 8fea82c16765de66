"""Models that keep checkpoints alone: `keras.Model` with a plan.

A checkpointed model differs from a plain one in its `call` during training, and there only: its
steps are run under its plan, each segment through the recompute primitive. So the plan holds
under `fit`, under a `train_step` of one's own, and in any loop that calls
`model(x, training=True)` under a `tf.GradientTape`. With `training=False` nothing differs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from keras_ckpt import keras_internals
from keras_ckpt.checkpointing import Checkpointing
from keras_ckpt.keras_internals import Functional
from keras_ckpt.plan import Plan

_PACKAGE = "keras_ckpt"


class CheckpointedModel(keras.Model):
    """A `keras.Model` that keeps checkpoints and recomputes what lies between in backpropagation.

    Made from inputs and outputs, or subclassed, as `keras.Model` is. It trains the same model:
    losses, weights, optimizer slots and all other state equal those of plain Keras.

    Args:
        *args: as for `keras.Model`.
        checkpoints: which tensors to keep:

            * None: `"collection"` if the model holds a `CheckpointMarker`, else `"memory"`
            * `"memory"`: the least predicted peak with every step recomputed at most once
            * `"speed"`: the outputs of expensive operations; only cheap ones are recomputed
            * `"collection"`: the tensors that pass through a `CheckpointMarker`
            * `"sqrt"`: as many equal segments as the square root of the number of steps
            * an int `k`: `k` segments of equal step count
            * a list of layers, their names or their outputs: the outputs of these layers
            * `"budget"`: the least extra work that fits `memory_limit`
            * a `Plan`: that plan
            * False: nothing is recomputed, as in plain Keras
        memory_limit: what a train step may take, weights and optimizer included, in bytes or as
            text ("2GB", "512MiB"). Given alone it means `checkpoints="budget"`.
        **kwargs: as for `keras.Model`.

    Raises:
        ValueError: if a setting is of no known form, or does not fit the model.
        TypeError: if a setting is of a wrong type.
        RuntimeError: if Keras runs on another backend than TensorFlow.

    Example:

    >>> inputs = keras.Input((16,))
    >>> x = keras.layers.Dense(64, activation="gelu")(inputs)
    >>> x = keras.layers.Dense(64, activation="gelu")(x)
    >>> model = CheckpointedModel(inputs, keras.layers.Dense(1)(x), checkpoints="sqrt")
    >>> model.compile(optimizer="adam", loss="mse")
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> CheckpointedModel:
        """Makes a Functional model where inputs and outputs are given, as `keras.Model` does."""
        if cls is CheckpointedModel and keras_internals.functional_init_arguments(args, kwargs):
            return super().__new__(CheckpointedFunctional, *args, **kwargs)
        return super().__new__(cls, *args, **kwargs)

    def __init__(
        self,
        *args: Any,
        checkpoints: Any = None,
        memory_limit: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        keras_internals.require_tensorflow()
        if keras_internals.functional_init_arguments(args, kwargs):
            _make_functional(type(self))
        with keras_internals.deep_recursion():
            super().__init__(*args, **kwargs)
        self._checkpointing = Checkpointing(self, checkpoints, memory_limit)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own_call = vars(cls).get("call")
        if own_call is not None and not hasattr(own_call, "plain"):
            cls.call = checkpointed_call(own_call)

    @property
    def checkpoints(self) -> Any:
        """The setting that plans are made from. Assign another one to have a new plan made."""
        return self._checkpointing.setting

    @checkpoints.setter
    def checkpoints(self, checkpoints: Any) -> None:
        self._checkpointing = Checkpointing(self, checkpoints, None)
        self.train_function = None

    @property
    def memory_limit(self) -> int | str | None:
        """The limit that the plan is made for. Assign another one to have a new plan made."""
        return self._checkpointing.memory_limit

    @memory_limit.setter
    def memory_limit(self, memory_limit: int | str | None) -> None:
        self._checkpointing = Checkpointing(self, None, memory_limit)
        self.train_function = None

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None until the first call in training."""
        return self._checkpointing.plan

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains the model: `keras.Model.fit`, with a plan for its batch size."""
        arguments = inspect.signature(super().fit).bind(*args, **kwargs).arguments
        self._checkpointing.note_batch_size(arguments.get("x"), arguments.get("batch_size"))
        return super().fit(*args, **kwargs)

    def train_step(self, data: Any) -> Any:
        """Plain Keras's step; its gradients are computed through the recomputed segments."""
        with self._checkpointing.train_step():
            return super().train_step(data)

    def get_config(self) -> dict[str, Any]:
        """The plain model's configuration, and the settings, as values that JSON can hold."""
        return {**super().get_config(), **self._checkpointing.get_config()}


def checkpointed_call(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a model's `call` under the model's plan during training."""

    @functools.wraps(plain)
    def call(self: CheckpointedModel, *args: Any, **kwargs: Any) -> Any:
        checkpointing = getattr(self, "_checkpointing", None)
        if checkpointing is None:
            return plain(self, *args, **kwargs)
        return checkpointing.call(functools.partial(plain, self), args, kwargs)

    call.plain = plain  # type: ignore[attr-defined]
    return call


@keras.saving.register_keras_serializable(package=_PACKAGE)
class CheckpointedFunctional(CheckpointedModel, Functional):
    """What `CheckpointedModel(inputs, outputs)` makes. Use that name."""

    def __init__(self, inputs: Any, outputs: Any, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(inputs, outputs, name=name, **kwargs)

    call = checkpointed_call(Functional.call)


@keras.saving.register_keras_serializable(package=_PACKAGE)
class CheckpointedSequential(CheckpointedModel, keras.Sequential):
    """A `keras.Sequential` that keeps checkpoints and recomputes what lies between.

    Args:
        layers: the layers, or None to `add` them later.
        trainable: as for `keras.Sequential`.
        name: as for `keras.Sequential`.
        checkpoints: see `CheckpointedModel`.
        memory_limit: see `CheckpointedModel`.

    Raises:
        ValueError: if a setting is of no known form, or does not fit the model.
        TypeError: if a setting is of a wrong type.
        RuntimeError: if Keras runs on another backend than TensorFlow.

    Example:

    >>> layers = [keras.layers.Dense(64, activation="gelu") for _ in range(9)]
    >>> model = CheckpointedSequential([keras.Input((16,)), *layers], checkpoints=3)
    """

    def __init__(
        self,
        layers: Any = None,
        trainable: bool = True,
        name: str | None = None,
        *,
        checkpoints: Any = None,
        memory_limit: int | str | None = None,
    ) -> None:
        super().__init__(
            layers=layers,
            trainable=trainable,
            name=name,
            checkpoints=checkpoints,
            memory_limit=memory_limit,
        )

    call = checkpointed_call(keras.Sequential.call)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The model that `get_config` described."""
        config = dict(config)
        settings = {name: config.pop(name, None) for name in Checkpointing.SETTINGS}
        with keras_internals.deep_recursion():
            model = super().from_config(config, custom_objects)
        model._checkpointing = Checkpointing(model, **settings)
        return model


def _make_functional(cls: type) -> None:
    """Puts the Functional class under a user's subclass, as `keras.Model` does with its own."""
    if issubclass(cls, CheckpointedFunctional):
        return
    for base in cls.__mro__:
        if CheckpointedModel in base.__bases__:
            base.__bases__ = tuple(
                CheckpointedFunctional if x is CheckpointedModel else x for x in base.__bases__
            )
