"""Which step of a model an operation on the device belongs to.

The profiler's events name operations of TensorFlow. While a train step is traced into a graph,
each step of the model notes the name scope that it is in, and a graph's operations carry these
scopes for ever after, into the gradient and into the recompute. Eager operations carry none: there
each step leaves a mark on the profiler's own time axis.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import keras
import tensorflow as tf

from keras_ckpt import keras_internals
from keras_ckpt.graph import linearise

Phase = Literal["forward", "recompute", "backward", "update", ""]

# Marks on the profiler's time axis begin with this.
MARK = "keras_ckpt:"
_CALL = re.compile(r"(Stateful)?PartitionedCall(_\d+)?")
_RECOMPUTE = re.compile(r"recompute(_\d+)?")


@dataclass(frozen=True)
class Place:
    """Where in a train step something happened.

    Attributes:
        operation: TensorFlow's name of the operation, within its step; "" if not known.
        step: the name of the model's step; "" outside of all steps (loss, metrics, optimizer).
        phase: "forward", "recompute", "backward" or "update"; "" if not known.
    """

    operation: str = ""
    step: str = ""
    phase: Phase = ""


class Naming:
    """Notes which step runs, while a train step is traced or run eagerly.

    Args:
        model: the model. A layer that is called several times counts as one step, its first.
    """

    def __init__(self, model: keras.Model) -> None:
        self._optimizer = type(model.optimizer)
        self._names = _step_names(model)
        self._scopes: dict[str, str] = {}
        # On the instance: a cache on the class would keep every instance for ever.
        self._cached_place = functools.cache(self._place_in_graph)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, steps, gradients and the optimizer's update leave their names."""
        with (
            _around(keras.Operation, "__call__", self._step),
            _around(tf.GradientTape, "gradient", lambda _: _mark("backward")),
            _around(self._optimizer, "apply", lambda _: _mark("update")),
        ):
            yield

    def place(self, path: str, marks: list[str]) -> Place:
        """The place of an operation.

        Args:
            path: TensorFlow's full name of it: with scopes in a graph, without in eager mode.
            marks: the marks that it lies in, outermost first.
        """
        return self._cached_place(path) if "/" in path else _place_of_marks(path, marks)

    def _place_in_graph(self, path: str) -> Place:
        parts = path.split("/")
        while _CALL.fullmatch(parts[0]) and len(parts) > 1:
            parts = parts[1:]
        step, operation = self._step_of(parts)
        return Place(operation, step, _phase_of(parts))

    def _step_of(self, parts: list[str]) -> tuple[str, str]:
        parts = parts[1:] if parts[0] == "gradient_tape" else parts
        for length in range(len(parts) - 1, 0, -1):
            step = self._scopes.get("/".join(parts[:length]))
            if step is not None:
                return step, "/".join(parts[length:])
        return "", "/".join(parts)

    @contextmanager
    def _step(self, operation: keras.Operation) -> Iterator[None]:
        name = self._names.get(id(operation))
        if name is None:
            yield
        elif tf.executing_eagerly():
            with _mark(name, is_step=True):
                yield
        else:
            # Layers open a scope by themselves, operations do not.
            is_layer = isinstance(operation, keras.layers.Layer)
            with nullcontext() if is_layer else tf.name_scope(operation.name):
                self._scopes[tf.get_current_name_scope()] = name
                yield


def no_place(path: str, marks: list[str]) -> Place:
    """The place of an operation where operations have no names, as in what XLA compiled."""
    return Place()


def _place_of_marks(operation: str, marks: list[str]) -> Place:
    innermost = marks[-1] if marks else "forward"
    if not innermost.startswith("step "):
        return Place(operation, "", innermost)  # type: ignore[arg-type]
    phase: Phase = "recompute" if "backward" in marks else "forward"
    return Place(operation, innermost.removeprefix("step "), phase)


def _step_names(model: keras.Model) -> dict[int, str]:
    if keras_internals.inner_functional(model) is None:
        return {id(layer): layer.name for layer in model.layers}
    names: dict[int, str] = {}
    for step in linearise(model).steps:
        names.setdefault(id(step.operation), step.name)
    return names


def _phase_of(parts: list[str]) -> Phase:
    if parts[0] in ("gradient_tape", "update"):
        return "backward" if parts[0] == "gradient_tape" else "update"
    return "recompute" if any(_RECOMPUTE.fullmatch(part) for part in parts[:-1]) else "forward"


def _mark(name: str, is_step: bool = False) -> AbstractContextManager[Any]:
    """Names what happens inside: on the profiler's time axis, or in a graph's name scopes."""
    if tf.executing_eagerly():
        return tf.profiler.experimental.Trace(f"{MARK}step {name}" if is_step else MARK + name)
    return tf.name_scope("update") if name == "update" else nullcontext()


@contextmanager
def _around(
    cls: type, method: str, enter: Callable[[Any], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Lets a context be entered around each call of a method, as long as the block lasts."""
    original = getattr(cls, method)
    is_own = method in vars(cls)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with enter(self):
            return original(self, *args, **kwargs)

    setattr(cls, method, wrapped)
    try:
        yield
    finally:
        if is_own:
            setattr(cls, method, original)
        else:
            delattr(cls, method)
