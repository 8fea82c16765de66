"""What the optimizer takes while it updates the weights.

In a graph each weight is updated as soon as its gradient is there, while the backward pass goes
on, so these bytes add to it. And whatever an update computes without the gradient (`momentum *
velocity`) runs as soon as the train step starts, for all weights at once, and then waits. Both
are read off the graph of one update of a stand-in.

Known gap: `global_clipnorm` waits for all gradients, and so holds them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from keras_ckpt import keras_internals
from keras_ckpt.buffers import BufferMap
from keras_ckpt.graph import Step
from keras_ckpt.passes import trainable_weights

# Large against the scalars that an optimizer keeps, as weights are.
_STAND_IN_LENGTH = 1024
_ASSIGNMENTS = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}


@dataclass(frozen=True)
class UpdateCost:
    """What the update of a weight takes, in multiples of the weight's size.

    Attributes:
        ahead: what is computed without the gradient, and is in use from the start of the train
            step until the weight is updated.
        during: what is in use only while the weight is updated, besides the gradient.
    """

    ahead: float = 0.0
    during: float = 0.0

    def workspace(self, step: Step) -> int:
        """Bytes in use while a step's weights are updated: one after the other."""
        sizes = [_bytes(weight) for weight in trainable_weights(step)]
        return round(self.during * max(sizes, default=0))

    def bytes_ahead(self, model: keras.Model) -> int:
        """Bytes that wait for the gradients of all of a model's weights."""
        return round(self.ahead * sum(_bytes(weight) for weight in model.trainable_weights))


def update_cost(optimizer: keras.optimizers.Optimizer | None) -> UpdateCost:
    """Reads off what an optimizer takes; nothing, if the model is not compiled."""
    if optimizer is None:
        return UpdateCost()
    return keras_internals.run_isolated(lambda: _trace_update(optimizer))


def _trace_update(optimizer: keras.optimizers.Optimizer) -> UpdateCost:
    twin = type(optimizer).from_config(optimizer.get_config())
    weight = keras.Variable(tf.zeros(_STAND_IN_LENGTH))
    twin.build([weight])

    @tf.function(autograph=False)
    def update(given: tf.Tensor) -> None:
        with keras_internals.releasing_gradients():
            # An operation's result, so that it may be written over.
            twin.apply([tf.negative(given)], [weight])

    graph = update.get_concrete_function(tf.TensorSpec([_STAND_IN_LENGTH])).graph
    operations = graph.get_operations()
    buffers = BufferMap(graph, graph.inputs[:1])
    late = _waiting_for(graph.inputs[0], operations)
    early = [op for op in operations if op.name not in late]
    made_early = {k: v for op in early for x in op.outputs for k, v in buffers.buffers(x).items()}
    # What late operations read, and new values of variables whose old ones are still being read.
    readers = [op for op in operations if op.name in late or op.type in _ASSIGNMENTS]
    read = [k for op in readers for x in op.inputs for k in buffers.buffers(x)]
    ahead = sum(made_early.get(name, 0) for name in set(read))
    peak = buffers.peak(operations, {})
    size = _bytes(weight)
    # And a copy of the weight: the backward pass is still reading its old value, so that the
    # assignment cannot write over it.
    return UpdateCost(ahead / size, max(0.0, (peak - size - ahead) / size) + 1)


def _waiting_for(tensor: tf.Tensor, operations: Sequence[tf.Operation]) -> set[str]:
    """The operations that cannot run before a tensor is there."""
    waiting = {tensor.op.name}
    for op in operations:
        before = (*(x.op for x in op.inputs), *op.control_inputs)
        if any(earlier.name in waiting for earlier in before):
            waiting.add(op.name)
    return waiting


def _bytes(weight: keras.Variable) -> int:
    return math.prod(weight.shape) * tf.as_dtype(weight.dtype).size
