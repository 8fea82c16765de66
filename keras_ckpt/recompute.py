"""Recompute a function in the backward pass instead of keeping its intermediate tensors.

The idea is that of `tf.recompute_grad` (Chen et al. 2016, "Training Deep Nets with Sublinear
Memory Cost"): run the function off the tape, keep its arguments alone, and run it again, on a
tape, when the gradient is wanted. For a Keras layer that is not enough to train the same model,
so this primitive adds, over `tf.custom_gradient`:

* **State.** The first pass runs as in plain Keras and notes the value that each non-trainable
  variable (seed generator, moving statistics) had before. The second pass starts from these
  values and updates nothing: dropout masks repeat, and statistics move once. See `replay.py`.
* **Losses, masks, structure.** Losses added inside become results with a gradient. Masks, bool
  and integer tensors, None and Python values pass in and out beside the gradient.
* **Gate.** No gradient leaves before all of them are computed, else the optimizer may assign a
  weight that the second pass has not read yet.
* **Tie.** The second pass depends on the incoming gradients, through data, since XLA ignores
  control edges. Without it a compiler merges the two passes and keeps every tensor after all.
* **Gradients as they are.** None stays None for a weight that the loss does not need, and a
  sparse gradient stays sparse; `tf.recompute_grad` makes both dense. Second derivatives work.

Known gap: a variable that is updated inside a TensorFlow loop or function within the recomputed
one cannot be replayed, and is refused.
"""

from __future__ import annotations

import copy
import dis
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_ckpt import keras_internals, randomness
from keras_ckpt.replay import FirstPass, SecondPass

Tie = Callable[[Any], Any]
FindLayers = Callable[[], Sequence[keras.layers.Layer]]


def recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function drop its intermediate tensors and recompute them for its gradient.

    Use it inside a layer's `call`, or around layers in a training loop of your own. Arguments and
    results may be nested structures of tensors, None and Python values. Results, gradients, state
    updates and added losses are those of the bare function.

    Args:
        function: what to recompute. Tensors that need a gradient have to be passed as arguments;
            weights of layers need not.

    Returns:
        a function with the same signature.

    Raises:
        TypeError: if `function` is not callable.
        ValueError: when called, if the function closes over a tensor, creates a layer, updates
            a variable inside a TensorFlow loop, or adds a loss for a layer that cannot be found.

    Example:

    >>> class Block(keras.layers.Layer):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.dense = keras.layers.Dense(8, activation="gelu")
    ...         self.dropout = keras.layers.Dropout(0.1)
    ...
    ...     def call(self, x):
    ...         return recompute(lambda x: self.dropout(self.dense(x)))(x)
    """
    if not callable(function):
        raise TypeError(
            f"`recompute` needs a function; received {function!r}. "
            "Write `keras_ckpt.recompute(function)(x)`."
        )

    @functools.wraps(function, updated=())
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if keras_internals.is_symbolic((args, kwargs)):
            return function(*args, **kwargs)
        _refuse_closed_over_tensors(function)
        own_layers = _layers_referenced_by(function)
        if any(not layer.built for layer in own_layers):
            keras_internals.run_symbolically(function, args, kwargs)
        entry = keras_internals.entry_layer()
        return run_recomputed(
            function, args, kwargs, lambda: [*own_layers, *_with_sublayers([entry])]
        )

    return recomputed


def run_recomputed(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    find_layers: FindLayers,
) -> Any:
    """Calls a function whose layers are built, and recomputes it for its gradient.

    Args:
        function: what to call.
        args: its positional arguments, nested structures.
        kwargs: its keyword arguments, nested structures.
        find_layers: gives the layers, sublayers included, that may add losses in the function.

    Returns:
        the function's result.
    """
    call = _Call(function, args, kwargs, find_layers)

    @tf.custom_gradient
    def segment(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        with keras_internals.stop_recording():
            outputs = call.first_pass(inputs)

        def gradient(
            *output_gradients: Any, variables: Iterable[tf.Variable] = ()
        ) -> tuple[list[Any], list[Any]]:
            wanted = call.take_wanted(len(output_gradients))
            wanted_gradients = [output_gradients[i] for i in wanted]
            # The scope is how a memory timeline tells the second pass from the first.
            with tf.name_scope("recompute"), tf.GradientTape() as tape:
                tie = _tie(wanted_gradients)
                tied_inputs = [tie(x) for x in inputs]
                tape.watch(tied_inputs)
                again = call.second_pass(tied_inputs, tie)
            sources = [*tied_inputs, *variables]
            outputs_again = [again[i] for i in wanted]
            gradients = tape.gradient(outputs_again, sources, wanted_gradients)
            with tf.name_scope("recompute"):
                gradients = _gate(gradients)
            return gradients[: len(inputs)], gradients[len(inputs) :]

        return outputs, gradient

    with keras_internals.releasing_gradients():
        outputs = call.note_wanted(segment(*call.differentiable_inputs()))
    return call.finish(outputs)


class _Call:
    """One call of a function: what goes in, what comes out, and the state it started from."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        find_layers: FindLayers,
    ) -> None:
        self._function = function
        self._arguments = _Flat((args, kwargs))
        self._find_layers = find_layers
        self._call_state = keras_internals.call_state()
        self._randomness = randomness.capture()
        self._wanted: set[int] = set()

    def differentiable_inputs(self) -> list[tf.Tensor]:
        # TensorFlow wants at least one tensor, and a function of integers may also return none.
        return self._arguments.differentiable or [tf.zeros(())]

    def first_pass(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs the function as plain Keras does; returns its differentiable results."""
        scope = FirstPass()
        with scope:
            args, kwargs = self._arguments.pack(inputs)
            outputs = _Flat(self._function(*args, **kwargs))
        self._state = scope.state_before
        self._loss_owners = self._take_owners(scope.losses)
        self._outputs = outputs.without_differentiable()
        return [*outputs.differentiable, *scope.losses]

    def second_pass(self, inputs: Sequence[tf.Tensor], tie: Tie) -> list[tf.Tensor]:
        """Runs the function again from the same state; returns its differentiable results."""
        scope = SecondPass([(variable, tie(value)) for variable, value in self._state])
        with self._call_state(), self._randomness(), scope:
            args, kwargs = self._arguments.pack(inputs, tie)
            outputs = _Flat(self._function(*args, **kwargs))
        owners = self._take_owners(scope.losses)
        if owners != self._loss_owners or not outputs.is_like(self._outputs):
            raise ValueError(
                f"The recomputed function {self._function!r} returned other tensors or added other "
                "losses in the backward pass than in the forward pass. Make it depend on its "
                "arguments and on Keras variables alone."
            )
        return [*outputs.differentiable, *scope.losses]

    def note_wanted(self, outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Notes which results a gradient comes back for.

        TensorFlow fills in zeros for the others. A weight that only these need would get zeros for
        a gradient, too, and an optimizer that decays would change it.
        """
        if len(outputs) == 1:
            return list(outputs)
        return [_noting(x, functools.partial(self._wanted.add, i)) for i, x in enumerate(outputs)]

    def take_wanted(self, results: int) -> list[int]:
        """The numbers of the results that a gradient came back for since this was last asked."""
        wanted = sorted(self._wanted) or list(range(results))
        self._wanted.clear()
        return wanted

    def finish(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Gives the results their structure and their masks, and the losses to their layers."""
        results = len(tensors) - len(self._loss_owners)
        for owner, loss in zip(self._loss_owners, tensors[results:], strict=True):
            owner.add_loss(loss)
        return self._outputs.pack(tensors[:results])

    def _take_owners(self, losses: Sequence[tf.Tensor]) -> list[keras.layers.Layer]:
        if not losses:
            return []
        layers = self._find_layers()
        owners = [keras_internals.take_loss_owner(loss, layers) for loss in losses]
        if None in owners:
            raise ValueError(
                f"A layer called in the recomputed function {self._function!r} added a loss, but "
                "the function does not refer to that layer. Call the function inside the `call` "
                "of the layer or model that owns it, or make it a closure over the layer."
            )
        return owners


class _Flat:
    """A nested structure as a flat list, with differentiable tensors taken apart from the rest."""

    def __init__(self, structure: Any) -> None:
        self._structure = keras.tree.map_structure(lambda _: None, structure)
        leaves = keras.tree.flatten(structure)
        self._is_differentiable = [_is_differentiable(x) for x in leaves]
        self._masks = [keras_internals.get_mask(x) if tf.is_tensor(x) else None for x in leaves]
        self._leaves: list[Any] = leaves

    @property
    def differentiable(self) -> list[tf.Tensor]:
        pairs = zip(self._leaves, self._is_differentiable, strict=True)
        return [x for x, differentiable in pairs if differentiable]

    def without_differentiable(self) -> _Flat:
        """The same, holding on to no tensor that a gradient flows into."""
        rest = copy.copy(self)
        pairs = zip(self._leaves, self._is_differentiable, strict=True)
        rest._leaves = [None if differentiable else x for x, differentiable in pairs]
        return rest

    def is_like(self, other: _Flat) -> bool:
        return self._is_differentiable == other._is_differentiable

    def pack(self, differentiable: Sequence[tf.Tensor], tie: Tie = lambda x: x) -> Any:
        """The structure, with these tensors in the place of the differentiable ones."""
        replaced = iter(differentiable)
        leaves = []
        for x, is_replaced, mask in zip(
            self._leaves, self._is_differentiable, self._masks, strict=True
        ):
            leaf = next(replaced) if is_replaced else tie(x)
            if mask is not None:
                keras_internals.set_mask(leaf, tie(mask))
            leaves.append(leaf)
        return keras.tree.pack_sequence_as(self._structure, leaves)


def _noting(x: tf.Tensor, note: Callable[[], None]) -> tf.Tensor:
    @tf.custom_gradient
    def identity(x: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        def gradient(output_gradient: Any) -> Any:
            note()
            return output_gradient

        return tf.identity(x), gradient

    return identity(x)


def _is_differentiable(x: Any) -> bool:
    return isinstance(x, tf.Tensor) and (x.dtype.is_floating or x.dtype.is_complex)


def _tie(output_gradients: Sequence[Any]) -> Tie:
    """Makes a function that lets a tensor wait until all of these gradients are there.

    It adds a zero that no compiler knows to be one. Eager mode runs in order by itself.
    """
    if tf.executing_eagerly():
        return lambda x: x
    parts = tf.nest.flatten(output_gradients, expand_composites=True)
    seen = tf.add_n([_first_element(part) for part in parts if _is_differentiable(part)])
    # The comparison goes by bool, so that a gradient that is not finite does not spread.
    any_value = tf.cast(seen, tf.bool)
    zero = tf.where(tf.equal(any_value, any_value), 0.0, float("nan"))

    def tie(x: Any) -> Any:
        if not isinstance(x, tf.Tensor):
            return x
        if x.dtype == tf.bool:
            return tf.logical_or(x, tf.cast(zero, tf.bool))
        if x.dtype.is_floating or x.dtype.is_complex or x.dtype.is_integer:
            return x + tf.cast(zero, x.dtype)
        return x

    return tie


def _first_element(x: tf.Tensor) -> tf.Tensor:
    # A maximum, since the tensor may be empty, and a slice, so that it is not read whole.
    return tf.cast(tf.reduce_max(tf.math.real(tf.reshape(x, [-1])[:1])), tf.float32)


def _gate(gradients: Sequence[Any]) -> list[Any]:
    """Releases no gradient before all of them are computed. Copies nothing."""
    parts = tf.nest.flatten(gradients, expand_composites=True)
    tensors = [part for part in parts if part is not None]
    if tf.executing_eagerly() or not tensors:
        return list(gradients)
    with tf.control_dependencies(tensors):
        parts = [None if part is None else tf.identity(part) for part in parts]
    return list(tf.nest.pack_sequence_as(gradients, parts, expand_composites=True))


def _referenced_by(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What a function can reach without being given it: closure, globals, bound object."""
    if isinstance(function, functools.partial):
        yield from ((f"argument {i}", x) for i, x in enumerate(function.args))
        yield from function.keywords.items()
        yield from _referenced_by(function.func)
        return
    if hasattr(function, "__self__"):
        yield "self", function.__self__
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        yield "self", function
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with keras_internals.ignoring_empty_cell():
            yield name, cell.cell_contents
    loaded = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"}
    names = loaded & function.__globals__.keys()
    yield from ((name, function.__globals__[name]) for name in sorted(names))


def _refuse_closed_over_tensors(function: Callable[..., Any]) -> None:
    for name, value in _referenced_by(function):
        if any(_is_differentiable(x) for x in keras.tree.flatten(value)):
            raise ValueError(
                f"The function given to `recompute` uses the tensor '{name}' from outside, which "
                "would get no gradient. Make it an argument: `recompute(f)(x, "
                f"{name})`, or use `tf.stop_gradient` on it and pass it all the same."
            )


def _layers_referenced_by(function: Callable[..., Any]) -> list[keras.layers.Layer]:
    return _with_sublayers(
        x for _, value in _referenced_by(function) for x in keras.tree.flatten(value)
    )


def _with_sublayers(values: Iterable[Any]) -> list[keras.layers.Layer]:
    layers = [x for x in values if isinstance(x, keras.layers.Layer)]
    return [inner for layer in layers for inner in keras_internals.flatten_layers(layer)]
