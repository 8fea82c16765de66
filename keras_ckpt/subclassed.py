"""The steps of a subclassed model: its `call`, recorded on symbolic tensors.

A `call` that is made of layers and `keras.ops` can be run on KerasTensors, which record the
operations, and then it is a graph like a Functional model's. One that reads or assigns variables
itself, adds losses, or decides by the data cannot: recording would freeze what has to happen in
every step. Such a `call` is recognised, said once, and run as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from keras_ckpt import keras_internals, randomness
from keras_ckpt.graph import LinearModel, linearise_graph


@dataclass(frozen=True, eq=False)
class TracedCall:
    """A recorded `call`.

    Attributes:
        linear: its steps.
        outputs: the structure of its result.
        flat_outputs: its flat result, symbolic where it is a tensor.
    """

    linear: LinearModel
    outputs: Any
    flat_outputs: tuple[Any, ...]

    def inputs(self, args: Any, kwargs: Any) -> list[Any]:
        """The tensors among the arguments, flat."""
        return [x for x in keras.tree.flatten((args, kwargs)) if keras_internals.is_tensor(x)]

    def pack(self, results: list[Any]) -> Any:
        """The result of the call from its flat tensors."""
        tensors = iter(results)
        flat = [next(tensors) if isinstance(x, keras.KerasTensor) else x for x in self.flat_outputs]
        return keras.tree.pack_sequence_as(self.outputs, flat)


class TracedCalls:
    """Records the calls of one model, and remembers what cannot be recorded."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._refused: set[str] = set()

    def find(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> TracedCall | None:
        """The recorded call for such arguments; None if it cannot be recorded.

        A call is recorded anew each time, since it may depend on attributes of the model: in a
        graph that is once for each trace, as Keras itself runs it.
        """
        key = _signature(args, kwargs)
        if key in self._refused:
            return None
        call = self._record(plain, args, kwargs)
        if call is None:
            self._refused.add(key)
        return call

    def _record(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> TracedCall | None:
        symbolic = keras.tree.map_structure(keras_internals.symbolic, (args, kwargs))
        inputs = [x for x in keras.tree.flatten(symbolic) if isinstance(x, keras.KerasTensor)]
        try:
            with keras_internals.forgetting_nodes(self._model):
                with keras_internals.recording_call(), randomness.refusing():
                    result = plain(*symbolic[0], **symbolic[1])
                flat = tuple(keras.tree.flatten(result))
                outputs = [x for x in flat if isinstance(x, keras.KerasTensor)]
                linear = linearise_graph(self._model.name, inputs, outputs)
        except Exception as e:  # Any failure of a user's code on symbolic tensors means the same.
            warnings.warn(
                f"The `call` of model '{self._model.name}' ({type(self._model).__name__}) cannot "
                f"be recorded on symbolic tensors, so that its steps are not known ({e}). It is "
                "trained as in plain Keras, and nothing is recomputed. Wrap parts of it in "
                "`keras_ckpt.recompute`, or move what reads variables or data into layers.",
                stacklevel=2,
            )
            return None
        return TracedCall(linear, keras.tree.map_structure(lambda _: None, result), flat)


def _signature(args: Any, kwargs: Any) -> Any:
    described = keras.tree.map_structure(
        lambda x: f"{x.dtype}{x.shape[1:]}" if keras_internals.is_tensor(x) else x, (args, kwargs)
    )
    return repr(described)
