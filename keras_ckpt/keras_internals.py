"""Every contact with what Keras and TensorFlow do not promise to keep.

Private names are used here and nowhere else, each with the reason; `tests/test_keras_internals.py`
fails clearly when a new release changes one of them.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

# Keras exports neither masks' accessors nor the state that a layer call runs in.
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

# What `fit` makes of any data it is given.
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.layers.layer import CallContext

# The Functional class is not exported, and `type(keras.Model(x, y))` would need a model.
from keras.src.models.functional import Functional, operation_fn, unpack_singleton
from keras.src.models.model import functional_init_arguments
from tensorflow.python.client import device_lib
from tensorflow.python.eager import record
from tensorflow.python.framework import ops as framework_ops

from keras_ckpt import randomness

__all__ = [
    "Functional",
    "functional_init_arguments",
    "operation_fn",
]

# Scopes of a layer call that the recompute has to find again: the arguments that a layer
# inherits from the layer that calls it (`training`), and the dtype that weights are cast to.
_CALL_CONTEXT = "current_call_ctx"
_AUTOCAST_SCOPE = "autocast_scope"
# Variables that were created inside a stateless scope and wait for their values.
_UNINITIALIZED = "uninitialized_variables"
# More frames than any model needs.
_DEEP = 1_000_000
# The seed generator of random operations that are given no seed.
_GLOBAL_SEED = "global_seed_generator"
# Operations that call functions, rather than carry one along as a mere attribute.
_CALLING = {"If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase"}
_CALLING |= {"PartitionedCall", "StatefulPartitionedCall"}
# Where a graph keeps the gradient functions that the registry holds weakly.
_GRADIENTS = "_keras_ckpt_gradients"


def require_tensorflow() -> None:
    """Checks that Keras runs on TensorFlow.

    Raises:
        RuntimeError: if it does not.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise RuntimeError(
            f"keras_ckpt recomputes through TensorFlow, and Keras runs on the '{backend}' backend. "
            'Set the environment variable KERAS_BACKEND="tensorflow" before Keras is imported.'
        )


@contextlib.contextmanager
def deep_recursion() -> Iterator[None]:
    """Lets Keras build a graph of any depth: it recurses once per layer of a chain."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _DEEP))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def without_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps AutoGraph from rewriting our own Python when a user's `tf.function` calls it."""
    return tf.autograph.experimental.do_not_convert(function)


def stop_recording() -> contextlib.AbstractContextManager[None]:
    """Keeps operations off every active tape (public only inside `tf.recompute_grad`)."""
    return record.stop_recording()


def call_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Captures the state of the layer call under way, to be entered again in the backward pass.

    Returns:
        a function that makes a context manager in which layers find the call arguments and the
        autocast dtype of now. Inside it no layer is the outermost one, so that none of them
        forgets the losses that it has already recorded.
    """
    context = copy.copy(global_state.get_global_attribute(_CALL_CONTEXT))
    autocast = global_state.get_global_attribute(_AUTOCAST_SCOPE)

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        inside = CallContext(entry_layer=None) if context is None else copy.copy(context)
        inside.entry_layer = None
        state = {_CALL_CONTEXT: inside, _AUTOCAST_SCOPE: autocast}
        outside = {name: global_state.get_global_attribute(name) for name in state}
        for name, value in state.items():
            global_state.set_global_attribute(name, value)
        try:
            yield
        finally:
            for name, value in outside.items():
                global_state.set_global_attribute(name, value)

    return restored


def is_symbolic(structure: Any) -> bool:
    """Whether Keras is only inferring shapes: nothing is computed, and nothing to recompute."""
    leaves = keras.tree.flatten(structure)
    return in_symbolic_scope() or any(isinstance(x, keras.KerasTensor) for x in leaves)


def run_symbolically(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Builds the layers that a function calls, without computing anything, as `fit` does."""
    args, kwargs = keras.tree.map_structure(_as_keras_tensor, (args, kwargs))
    keras_backend.compute_output_spec(function, *args, **kwargs)


def _as_keras_tensor(x: Any) -> Any:
    return keras.KerasTensor(x.shape, x.dtype.name) if isinstance(x, tf.Tensor) else x


@contextlib.contextmanager
def ignoring_empty_cell() -> Iterator[None]:
    """Reading a closure cell that has no value yet raises ValueError: there is nothing to see."""
    with contextlib.suppress(ValueError):
        yield


@contextlib.contextmanager
def recording_call() -> Iterator[None]:
    """Lets a model's `call` be recorded on symbolic tensors.

    Raises:
        ValueError: if the call reads or assigns a variable by itself: the record would freeze it.
    """
    with _NoState():
        yield


@contextlib.contextmanager
def forgetting_nodes(model: keras.Model) -> Iterator[None]:
    """Drops the nodes that symbolic calls inside add to a model's layers, which keep them all."""
    layers = flatten_layers(model)
    counts = [(len(x._inbound_nodes), len(x._outbound_nodes)) for x in layers]
    try:
        yield
    finally:
        for layer, (inbound, outbound) in zip(layers, counts, strict=True):
            del layer._inbound_nodes[inbound:]
            del layer._outbound_nodes[outbound:]


class _NoState(keras.StatelessScope):
    """Refuses what a record of a call cannot hold."""

    def get_current_value(self, variable: keras.Variable) -> Any:
        raise ValueError(f"it reads the variable '{variable.path}' itself")

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        raise ValueError(f"it assigns the variable '{update[0].path}' itself")


def is_tensor(x: Any) -> bool:
    """Whether a value is a tensor of TensorFlow's, not a symbolic one of Keras's."""
    return isinstance(x, tf.Tensor)


def symbolic(x: Any) -> Any:
    """A symbolic tensor like a tensor, of any batch size; other values as they are."""
    if not is_tensor(x):
        return x
    shape = (None, *x.shape[1:]) if x.shape.rank else x.shape
    tensor = keras.KerasTensor(shape, x.dtype.name)
    mask = get_mask(x)
    if mask is not None:
        set_mask(tensor, keras.KerasTensor((None, *mask.shape[1:]), "bool"))
    return tensor


def training_of_call() -> bool | None:
    """The `training` argument of the layer call under way, whether or not `call` takes one."""
    context = global_state.get_global_attribute(_CALL_CONTEXT)
    return None if context is None else context.get_value("training")


def is_inside_call() -> bool:
    """Whether the call of some layer is under way."""
    return global_state.get_global_attribute(_CALL_CONTEXT) is not None


def entry_layer() -> keras.layers.Layer | None:
    """The outermost layer whose call is under way."""
    context = global_state.get_global_attribute(_CALL_CONTEXT)
    return None if context is None else context.entry_layer


def flatten_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """A layer and all layers inside it: public only for models, and only one level deep."""
    return layer._flatten_layers()


def uninitialized_variables() -> list[keras.Variable]:
    """Variables that were created where none can be: inside a stateless scope."""
    return list(global_state.get_global_attribute(_UNINITIALIZED) or ())


def forget_uninitialized_variables(variables: Sequence[keras.Variable]) -> None:
    """Drops variables that will never get a value, so that a later scope does not fill them."""
    dropped = {id(variable) for variable in variables}
    kept = [v for v in uninitialized_variables() if id(v) not in dropped]
    global_state.set_global_attribute(_UNINITIALIZED, kept)


def get_mask(tensor: Any) -> Any:
    """The Keras mask that travels with a tensor, or None."""
    return keras_backend.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a Keras mask to a tensor."""
    keras_backend.set_keras_mask(tensor, mask)


def read_variable(variable: keras.Variable) -> tf.Tensor:
    """A variable's value now, unseen by any tape: `Variable.value` would ask the active scope."""
    stored = variable._value
    return tf.raw_ops.ReadVariableOp(resource=stored.handle, dtype=stored.dtype)


def assign_variable(variable: keras.Variable, value: tf.Tensor) -> None:
    """Assigns although a stateless scope is active, as `Variable.assign` does outside of one."""
    variable._direct_assign(value)


def stored_variable(variable: keras.Variable) -> tf.Variable:
    """The TensorFlow variable behind a Keras one, whichever scope is active."""
    return variable._value


def take_loss_owner(
    loss: tf.Tensor, layers: Sequence[keras.layers.Layer]
) -> keras.layers.Layer | None:
    """Finds the layer that recorded a loss in a stateless scope, and makes it forget that it did.

    Keras notes only the `id` of the tensor with the layer. It has to go before the tensor does,
    since a later tensor may get the same `id`.
    """
    for layer in layers:
        if id(loss) in layer._loss_ids:
            layer._loss_ids.discard(id(loss))
            return layer
    return None


def nodes_in_order(functional: Functional) -> list[Any]:
    """The operation nodes of a Functional model, in the order in which Keras runs them."""
    depths = sorted(functional._nodes_by_depth, reverse=True)
    nodes = (node for depth in depths for node in functional._nodes_by_depth[depth])
    return [node for node in nodes if node.operation and not node.is_input]


def inner_functional(operation: Any) -> Functional | None:
    """The graph that a model runs when it is called, if it is one that does nothing else."""
    if not isinstance(operation, keras.Model):
        return None
    call = type(operation).call
    call = getattr(call, "plain", call)
    if call is Functional.call:
        return operation
    return operation._functional if call is keras.Sequential.call else None


def standardize_inputs(functional: Functional, inputs: Any) -> list[Any]:
    """The flat input tensors as a Functional model's own `call` prepares them."""
    return functional._standardize_inputs(inputs)


def functional_inputs(
    functional: Functional,
    inputs: Any,
    training: bool | None = None,
    mask: Any = None,
    **kwargs: Any,
) -> tuple[list[Any], dict[str, Any]]:
    """What a Functional model's `call` runs its graph on: flat tensors, and call arguments."""
    flat = standardize_inputs(functional, inputs)
    for x, x_mask in zip(flat, [] if mask is None else keras.tree.flatten(mask), strict=False):
        if x_mask is not None:
            set_mask(x, x_mask)
    return flat, {"training": training, **kwargs}


def pack_outputs(functional: Functional, outputs: list[Any]) -> Any:
    """Flat outputs in the structure that a Functional model's `call` returns."""
    return unpack_singleton(keras.tree.pack_sequence_as(functional._outputs_struct, outputs))


def structures(functional: Functional) -> tuple[Any, Any]:
    """The nested structures of a Functional model's inputs and outputs (public ones are flat)."""
    return functional._inputs_struct, functional._outputs_struct


def layers_with_input(model: keras.Sequential) -> list[keras.layers.Layer]:
    """A Sequential model's layers with its input layer, which `layers` leaves out."""
    return list(model._layers)


def share_compile_state(source: keras.Model, target: keras.Model) -> None:
    """Compiles a model with the very optimizer, losses and metrics of another."""
    if not source.compiled:
        return
    metrics, loss = source._compile_metrics, source._compile_loss
    target.compile(
        optimizer=source.optimizer,
        loss=source.loss,
        loss_weights=None if loss is None else loss._user_loss_weights,
        metrics=None if metrics is None else metrics._user_metrics,
        weighted_metrics=None if metrics is None else metrics._user_weighted_metrics,
        run_eagerly=source.run_eagerly,
        steps_per_execution=source.steps_per_execution,
        jit_compile=source.jit_compile,
        auto_scale_loss=False,
    )


@contextlib.contextmanager
def releasing_gradients() -> Iterator[None]:
    """Lets the gradient functions registered inside die with the graph that they belong to.

    In a graph, `tf.custom_gradient` enters each call in TensorFlow's process-wide gradient
    registry, from where it would hold the whole trace for ever. Here the registry keeps a weak
    stub, and the graph keeps the function: when the graph goes, so do both.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = _outermost_graph()
    if not hasattr(graph, _GRADIENTS):
        setattr(graph, _GRADIENTS, [])
    kept = getattr(graph, _GRADIENTS)
    registry = framework_ops.gradient_registry._registry
    first = framework_ops.uid()
    try:
        yield
    finally:
        for name in _custom_gradients_since(first, registry):
            entry = registry[name]
            if not isinstance(entry["type"], _WeakGradient):
                strong = entry["type"]
                kept.append(strong)
                registry[name] = {**entry, "type": _WeakGradient(strong), "location": None}
                weakref.finalize(graph, registry.pop, name, None)


def _custom_gradients_since(first: int, registry: dict[str, Any]) -> list[str]:
    """The names of gradient functions made after a number of TensorFlow's counter was drawn.

    Their place in the registry would not tell: older entries may go at any time.
    """
    names = []
    for name in reversed(registry):
        kind, _, number = name.partition("-")
        if kind == "CustomGradient":
            if int(number) < first:
                break
            names.append(name)
    return names


def _outermost_graph() -> Any:
    # A loop's body is a graph of its own that may be gone when its gradient is built.
    graph = tf.compat.v1.get_default_graph()
    while isinstance(getattr(graph, "outer_graph", None), tf.__internal__.FuncGraph):
        graph = graph.outer_graph
    return graph


class _WeakGradient:
    """A registered gradient function that does not keep its graph alive."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = weakref.ref(function)

    def __call__(self, *args: Any) -> Any:
        function = self._function()
        if function is None:
            raise RuntimeError("The graph that this gradient belongs to no longer exists.")
        return function(*args)


def scratch_graph() -> Any:
    """A graph to trace operations into that are never run."""
    return tf.__internal__.FuncGraph("scratch")


def called_graphs(op: tf.Operation) -> list[Any]:
    """The graphs of the functions that an operation calls (a loop's condition, then its body)."""
    if op.type not in _CALLING:
        return []
    graphs: list[Any] = []
    for attribute in op.op_def.attr:
        if attribute.type == "func":
            names = [op.get_attr(attribute.name).name]
        elif attribute.type == "list(func)":
            names = [function.name for function in op.get_attr(attribute.name)]
        else:
            continue
        graphs.extend(op.graph._get_function(name).graph for name in names)
    return graphs


def run_isolated(function: Callable[[], Any]) -> Any:
    """Runs a function where no tape, graph or Keras scope is active, whatever is active here.

    Tapes, default graphs and Keras's scopes all belong to a thread, so a thread of its own is
    free of them. A seed generator stands in for the process-wide one, which would be advanced.
    """

    def run() -> Any:
        global_state.set_global_attribute(_GLOBAL_SEED, keras.random.SeedGenerator(0))
        with call_state()(), randomness.capture()():
            return function()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(run).result()


def device_memory_limit(device: str) -> int:
    """The most bytes that the allocator of a device hands out (no public name tells)."""
    name = f"/device:{device}"
    return next(d.memory_limit for d in device_lib.list_local_devices() if d.name == name)


def first_batch(model: keras.Model, x: Any, y: Any, batch_size: int | None) -> Any:
    """The first batch that `fit` would train on, as `fit` converts it."""
    batches = TFEpochIterator(
        x=x,
        y=y,
        batch_size=batch_size,
        steps_per_epoch=1,
        shuffle=False,
        distribute_strategy=model.distribute_strategy,
        steps_per_execution=1,
    )
    for _, _, iterator in batches:
        return next(iterator)
    raise ValueError("there is no first batch: the data is empty")


def build_for_training(model: keras.Model, batch: Any) -> None:
    """Builds a model, its metrics and its optimizer as `fit` does, without running anything."""
    model._symbolic_build(data_batch=batch)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


@contextlib.contextmanager
def preserving_global_seed() -> Iterator[None]:
    """Leaves the process-wide seed generator as it was, be it not there at all."""
    generator = global_state.get_global_attribute(_GLOBAL_SEED)
    state = None if generator is None else generator.state.numpy()
    try:
        yield
    finally:
        global_state.set_global_attribute(_GLOBAL_SEED, generator)
        if generator is not None:
            generator.state.assign(state)
