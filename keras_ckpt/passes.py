"""One step's forward and backward pass as operations of a graph.

Nothing runs, and nothing of the model changes: updates, losses and seeds stay in a Keras scope
of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from keras_ckpt import keras_internals
from keras_ckpt.buffers import ancestors, data_inputs
from keras_ckpt.graph import Step


@dataclass(frozen=True)
class TensorInfo:
    """What a step has to know of a tensor that it reads.

    Attributes:
        shape: fully known, as far as it can be.
        dtype: its dtype's name.
        differentiable: whether a gradient flows into it.
        mask: what is known of the Keras mask that travels with it, if there is one.
    """

    shape: tuple[int | None, ...]
    dtype: str
    differentiable: bool = False
    mask: TensorInfo | None = None

    @property
    def elements(self) -> int:
        """How many elements the tensor has."""
        return math.prod(size or 1 for size in self.shape)

    @property
    def bytes(self) -> int:
        """The tensor's size."""
        return self.elements * tf.as_dtype(self.dtype).size


@dataclass(frozen=True)
class Passes:
    """The two passes of a step, in the graph that was the default one.

    Attributes:
        inputs: placeholders of the step's inputs; None for what is no tensor.
        masks: placeholders of the masks that travel with them.
        outputs: the step's flat results.
        losses: what it added to the model's losses.
        output_gradients: placeholders of the gradients that come in.
        sources: what gradients are made for: inputs, then trainable variables.
        input_gradients: the gradients of the differentiable inputs; None where there is none.
        weight_gradients: those of the trainable weights, likewise.
        forward: the operations of the forward pass, in order.
        backward: those of the backward pass, without what no gradient needs.
    """

    inputs: list[tf.Tensor | None]
    masks: list[tf.Tensor]
    outputs: list[Any]
    losses: list[tf.Tensor]
    output_gradients: list[tf.Tensor]
    sources: list[tf.Tensor | tf.Variable]
    input_gradients: list[Any]
    weight_gradients: list[Any]
    forward: list[tf.Operation]
    backward: list[tf.Operation]

    @property
    def given(self) -> list[tf.Tensor]:
        """Every placeholder that a value is to be given for."""
        return [x for x in (*self.inputs, *self.masks, *self.output_gradients) if x is not None]

    @property
    def results(self) -> list[tf.Tensor]:
        """The outputs that are tensors, and the losses."""
        return [x for x in (*self.outputs, *self.losses) if isinstance(x, tf.Tensor)]

    @property
    def gradients(self) -> list[tf.Tensor]:
        """All gradients that come out, a sparse one in its parts."""
        return flatten_gradients([*self.input_gradients, *self.weight_gradients])

    @property
    def read_back(self) -> list[tf.Tensor]:
        """The tensors of the forward pass that the backward pass reads, each once."""
        forward = {op.name for op in self.forward}
        read = (x for op in self.backward for x in data_inputs(op) if x.op.name in forward)
        return list({x.name: x for x in read}.values())


def build_passes(step: Step, infos: Sequence[TensorInfo | None], used: Sequence[bool]) -> Passes:
    """Traces a step, in training mode, and its gradient into the default graph.

    Args:
        step: the step.
        infos: what is known of each of `step.inputs`.
        used: whether each of `step.outputs` is read by anything.
    """
    graph = tf.compat.v1.get_default_graph()
    inputs = [_placeholder(info) for info in infos]
    # Noted now, since a layer may take the mask off a tensor.
    masks = [keras_internals.get_mask(x) for x in inputs if x is not None]
    watched = [x for x, info in zip(inputs, infos, strict=True) if has_gradient(info)]
    weights = [keras_internals.stored_variable(w) for w in trainable_weights(step)]
    sources = [*watched, *weights]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        outputs, losses = _run_stateless(step, inputs)
    before = graph.get_operations()
    targets = [x for x, read in zip(outputs, used, strict=True) if read and is_floating(x)]
    incoming = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in targets]
    gradients = [None] * len(sources)
    if sources and (targets or losses):
        loss_gradients = [tf.ones_like(loss) for loss in losses]
        gradients = tape.gradient([*targets, *losses], sources, [*incoming, *loss_gradients])
    # A loop gets its accumulators only when its gradient is built: they are forward work.
    in_forward = {op.name for op in before} | ancestors(x for op in before for x in op.outputs)
    in_backward = ancestors(flatten_gradients(gradients)) - in_forward
    operations = graph.get_operations()
    return Passes(
        inputs=inputs,
        masks=[mask for mask in masks if mask is not None],
        outputs=outputs,
        losses=losses,
        output_gradients=incoming,
        sources=sources,
        input_gradients=gradients[: len(watched)],
        weight_gradients=gradients[len(watched) :],
        forward=[op for op in operations if op.name in in_forward],
        backward=[op for op in operations if op.name in in_backward],
    )


def trainable_weights(step: Step) -> list[keras.Variable]:
    """The weights that the step's backward pass makes gradients for."""
    return list(step.layer.trainable_weights) if step.layer else []


def flatten_gradients(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """The tensors of gradients that may be sparse, or None."""
    parts = tf.nest.flatten(list(gradients), expand_composites=True)
    return [x for x in parts if x is not None]


def has_gradient(info: TensorInfo | None) -> bool:
    """Whether a gradient flows into a tensor."""
    return info is not None and info.differentiable


def is_floating(x: Any) -> bool:
    """Whether a result is one that a gradient may flow into."""
    return isinstance(x, tf.Tensor) and (x.dtype.is_floating or x.dtype.is_complex)


def _run_stateless(step: Step, inputs: Sequence[Any]) -> tuple[list[Any], list[tf.Tensor]]:
    values = dict(zip(step.inputs, inputs, strict=True))
    scope = keras.StatelessScope(collect_losses=True, initialize_variables=False)
    with scope:
        step.run(values, {"training": True})
    layers = keras_internals.flatten_layers(step.layer) if step.layer else []
    for loss in scope.losses:
        keras_internals.take_loss_owner(loss, layers)
    return [values.get(t) for t in step.outputs], scope.losses


def _placeholder(info: TensorInfo | None) -> tf.Tensor | None:
    if info is None:
        return None
    tensor = tf.compat.v1.placeholder(info.dtype, info.shape)
    if info.mask is not None:
        keras_internals.set_mask(tensor, _placeholder(info.mask))
    return tensor
