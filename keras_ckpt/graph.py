"""A Keras model as a list of steps: the linearised model.

Planners cut a list, so a model has to become one. Every call of a layer or of a `keras.ops`
operation is a step, in the order in which Keras runs them. Nested Functional and Sequential
models are flattened into their own steps. For each boundary between steps the list knows which
tensors are alive there, so that any cut is legal: a tensor that jumps over a segment (a residual,
a U-Net's skip) is one that is alive at both ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_ckpt import keras_internals


@dataclass(frozen=True)
class Ref:
    """The place of a tensor in a step's arguments: the tensor's number in the linearised model."""

    tensor: int


@dataclass(frozen=True, eq=False)
class Step:
    """One call of one operation.

    Attributes:
        name: unique in the model: the operation's name, with the names of the nested models that
            it lies in before it (`encoder/dense`) and the number of the call behind it if there
            are several (`dense#2`).
        operation: what is called: a layer, a `keras.ops` operation, or the way in or out of a
            nested model.
        args: positional arguments, with a `Ref` for each tensor.
        kwargs: keyword arguments, likewise.
        inputs: numbers of the tensors that the step reads.
        outputs: numbers of the tensors that it makes.
    """

    name: str
    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def layer(self) -> keras.layers.Layer | None:
        """The layer that is called, or None for any other operation."""
        return self.operation if isinstance(self.operation, keras.layers.Layer) else None

    def run(self, values: dict[int, Any], context: dict[str, Any]) -> None:
        """Runs the step.

        Args:
            values: tensors by number: read from, and written to.
            context: call-context arguments, such as `training`, for layers that take them.
        """
        args, kwargs = keras.tree.map_structure(
            lambda x: values[x.tensor] if isinstance(x, Ref) else x, (self.args, self.kwargs)
        )
        call = keras_internals.operation_fn(self.operation, **context)
        results = keras.tree.flatten(call(*args, **kwargs))
        values.update(zip(self.outputs, results, strict=False))


@dataclass(frozen=True, eq=False)
class LinearModel:
    """A model's steps and the tensors between them.

    Attributes:
        name: the model's name.
        steps: in execution order.
        inputs: numbers of the model's input tensors, flat.
        outputs: numbers of its output tensors, flat.
        tensors: the symbolic tensor behind each number: shape (None where it depends on the data)
            and dtype.
    """

    name: str
    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tensors: tuple[keras.KerasTensor, ...]
    _produced: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    _last_use: dict[int, int] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._produced.update(dict.fromkeys(self.inputs, -1))
        self._last_use.update(dict.fromkeys(self.inputs, -1))
        for i, step in enumerate(self.steps):
            self._produced.update(dict.fromkeys(step.outputs, i))
            self._last_use.update(dict.fromkeys((*step.inputs, *step.outputs), i))
        self._last_use.update(dict.fromkeys(self.outputs, len(self.steps)))

    def produced_by(self, tensor: int) -> int:
        """The index of the step that makes a tensor; -1 for an input of the model."""
        return self._produced[tensor]

    def last_use(self, tensor: int) -> int:
        """The index of the last step that reads a tensor; the number of steps for an output."""
        return self._last_use[tensor]

    def reads(self, start: int, stop: int) -> tuple[int, ...]:
        """The tensors that the steps `[start, stop)` read and that were there before them."""
        read = dict.fromkeys(t for step in self.steps[start:stop] for t in step.inputs)
        return tuple(t for t in read if self._produced[t] < start)

    def escapes(self, start: int, stop: int) -> tuple[int, ...]:
        """The tensors that the steps `[start, stop)` make and that are read after them."""
        made = dict.fromkeys(t for step in self.steps[start:stop] for t in step.outputs)
        return tuple(t for t in made if self._last_use[t] >= stop)

    def live(self, boundary: int) -> tuple[int, ...]:
        """The tensors alive just before the step at `boundary`."""
        return tuple(t for t, i in self._produced.items() if i < boundary <= self._last_use[t])

    def layers(self, start: int, stop: int) -> list[keras.layers.Layer]:
        """The layers called in the steps `[start, stop)`, sublayers included."""
        called = dict.fromkeys(step.layer for step in self.steps[start:stop] if step.layer)
        return [inner for layer in called for inner in keras_internals.flatten_layers(layer)]


def linearise(model: keras.Model) -> LinearModel:
    """The linearised model of a Functional or a built Sequential model.

    Args:
        model: the model. Its layers are used, not copied.

    Raises:
        ValueError: if the model is subclassed, so that its graph is not known, or not built.

    Example:

    >>> inputs = keras.Input((4,))
    >>> model = keras.Model(inputs, keras.layers.Dense(2, name="head")(inputs))
    >>> [step.name for step in linearise(model).steps]
    ['head']
    """
    functional = keras_internals.inner_functional(model)
    if functional is None:
        raise ValueError(
            f"Model '{model.name}' has no graph of layers: it is subclassed, or a Sequential model "
            "that is not built. Build it, by an Input layer or by calling it on data, or make "
            "it from inputs and outputs."
        )
    return _Lineariser(model.name).run(functional)


def linearise_graph(
    name: str, inputs: Sequence[keras.KerasTensor], outputs: Sequence[keras.KerasTensor]
) -> LinearModel:
    """The linearised model between symbolic tensors.

    Args:
        name: the model's name.
        inputs: what the steps start from.
        outputs: what they lead to.

    Raises:
        ValueError: if an output does not depend on the inputs alone.
    """
    with keras_internals.deep_recursion():
        graph = keras.Function(list(inputs), list(outputs), name=name)
    return _Lineariser(name).run(graph)


class _Lineariser:
    def __init__(self, name: str) -> None:
        self._name = name
        self._steps: list[Step] = []
        self._tensors: list[keras.KerasTensor] = []
        self._calls: Counter[str] = Counter()

    def run(self, functional: keras_internals.Functional) -> LinearModel:
        numbers = {id(x): self._number(x) for x in functional.inputs}
        inputs = tuple(numbers.values())
        self._add_nodes(functional, numbers, prefix="")
        outputs = tuple(numbers[id(x)] for x in functional.outputs)
        return LinearModel(self._name, tuple(self._steps), inputs, outputs, tuple(self._tensors))

    def _number(self, tensor: keras.KerasTensor) -> int:
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def _add_nodes(
        self, functional: keras_internals.Functional, numbers: dict[int, int], prefix: str
    ) -> None:
        for node in keras_internals.nodes_in_order(functional):
            if any(id(x) not in numbers for x in node.input_tensors):
                continue  # Not computable from the model's inputs: Keras skips it as well.
            args, kwargs = node.arguments.convert(
                lambda x: Ref(numbers[id(x)]) if isinstance(x, keras.KerasTensor) else x
            )
            name = self._unique(prefix + node.operation.name)
            inner = _flattens_to(node)
            if inner is None:
                outputs = self._add(name, node.operation, args, kwargs, node.outputs)
            else:
                outputs = self._add_nested(name, inner, args, kwargs)
            numbers.update(zip((id(x) for x in node.outputs), outputs, strict=True))

    def _add_nested(
        self,
        name: str,
        inner: keras_internals.Functional,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[int, ...]:
        """Adds the steps of a nested model, after one that prepares its inputs if they need it."""
        flat = keras.tree.flatten(args[0])
        arguments = [self._tensors[x.tensor] if isinstance(x, Ref) else x for x in flat]
        if kwargs.get("mask") is None and _pass_unchanged(arguments, inner.inputs):
            inputs = tuple(x.tensor for x in flat)
        else:
            inputs = self._add(f"{name}/in", _WayIn(inner), args, kwargs, inner.inputs)
        numbers = dict(zip((id(x) for x in inner.inputs), inputs, strict=True))
        self._add_nodes(inner, numbers, prefix=f"{name}/")
        return tuple(numbers[id(x)] for x in inner.outputs)

    def _add(
        self,
        name: str,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[keras.KerasTensor],
    ) -> tuple[int, ...]:
        numbers = tuple(self._number(x) for x in outputs)
        leaves = keras.tree.flatten((args, kwargs))
        inputs = dict.fromkeys(x.tensor for x in leaves if isinstance(x, Ref))
        self._steps.append(Step(name, operation, args, kwargs, tuple(inputs), numbers))
        return numbers

    def _unique(self, name: str) -> str:
        self._calls[name] += 1
        return name if self._calls[name] == 1 else f"{name}#{self._calls[name]}"


def _flattens_to(node: Any) -> keras_internals.Functional | None:
    """The graph to put in the place of a nested model's call, if that changes nothing."""
    args, kwargs = node.arguments.args, node.arguments.kwargs
    inner = keras_internals.inner_functional(node.operation)
    # A `training` recorded with a nested call is overruled by the caller's, in Keras too.
    plain_call = len(args) == 1 and set(kwargs) <= {"training", "mask"}
    if inner is None or not plain_call:
        return None
    # Keras does more with the outputs of such a model than its graph shows.
    if node.operation.activity_regularizer is not None or node.operation.supports_masking:
        return None
    return inner


def _pass_unchanged(arguments: list[Any], inputs: list[keras.KerasTensor]) -> bool:
    """Whether a Functional model takes these arguments as they are."""
    return len(arguments) == len(inputs) and all(
        isinstance(x, keras.KerasTensor)
        and x.dtype == y.dtype
        and len(x.shape) == len(y.shape)
        and x.sparse == y.sparse
        for x, y in zip(arguments, inputs, strict=True)
    )


class _WayIn:
    """Prepares a nested model's inputs (dtype, rank, masks) as its `call` does."""

    def __init__(self, functional: keras_internals.Functional) -> None:
        self._functional = functional
        self.name = functional.name

    def __call__(self, inputs: Any, mask: Any = None, training: bool | None = None) -> list[Any]:
        flat, _ = keras_internals.functional_inputs(self._functional, inputs, training, mask)
        return flat
