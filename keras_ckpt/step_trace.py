"""One step's forward and backward pass, traced into a scratch graph and read off it.

The forward tensors that the backward operations read are what the step saves. Nothing runs, and
nothing of the model changes: the trace happens in a graph and a Keras scope of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from keras_ckpt import keras_internals
from keras_ckpt.buffers import BufferMap, ancestors, data_inputs, root
from keras_ckpt.flops import count_flops, is_expensive
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
class StepOutput:
    """One result of a step.

    Attributes:
        info: what the next steps have to know of it; None for a result that is no tensor.
        bytes: what the step allocates for it.
        input: the position of the input whose buffer it lives in, if it does in one's.
        output: the position of the earlier output whose buffer it lives in, likewise.
    """

    info: TensorInfo | None
    bytes: int = 0
    input: int | None = None
    output: int | None = None


@dataclass(frozen=True)
class StepTrace:
    """What a step costs, whatever its place in the model; see `StepCost` for the figures.

    Attributes:
        outputs: one entry per result.
        saved_inputs: positions of the inputs whose buffers the backward pass reads.
        saved_outputs: positions of the outputs whose buffers it reads.
        problem: why the figures are a guess, or None: where a step cannot be traced, all its
            inputs and outputs are taken to be saved.
    """

    outputs: tuple[StepOutput, ...]
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    residual_bytes: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    free_flops: float = 0.0
    forward_workspace: int = 0
    backward_workspace: int = 0
    weight_gradient_bytes: int = 0
    expensive: bool = False
    problem: str | None = None


def trace_step(step: Step, inputs: Sequence[TensorInfo | None], used: Sequence[bool]) -> StepTrace:
    """Traces one step in training mode.

    Args:
        step: the step.
        inputs: what is known of each of `step.inputs`.
        used: whether each of `step.outputs` is read by anything.

    Raises:
        Exception: whatever the step's operation raises when it is traced.
    """
    graph = tf.__internal__.FuncGraph("trace")
    with graph.as_default():
        placeholders = [_placeholder(info) for info in inputs]
        sources = [x for x, info in zip(placeholders, inputs, strict=True) if _has_gradient(info)]
        sources += [keras_internals.stored_variable(w) for w in trainable_weights(step)]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs, losses = run_stateless(step, placeholders)
        forward = list(graph.get_operations())
        targets = [x for x, read in zip(outputs, used, strict=True) if read and _is_floating(x)]
        output_gradients = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in targets]
        loss_gradients = [tf.ones_like(loss) for loss in losses]
        gradients = [None] * len(sources)
        if sources and (targets or losses):
            gradients = tape.gradient(
                [*targets, *losses], sources, [*output_gradients, *loss_gradients]
            )
    reader = _Reader(graph, placeholders, outputs, losses, output_gradients)
    input_count = len(sources) - len(trainable_weights(step))
    return reader.read(forward, gradients[:input_count], gradients[input_count:], sources)


def guess_step(
    step: Step,
    inputs: Sequence[TensorInfo | None],
    outputs: Sequence[keras.KerasTensor],
    problem: str,
) -> StepTrace:
    """The costs of a step that cannot be traced: it may save all that it reads and makes."""
    sizes = [info.shape[0] for info in inputs if info and info.shape]
    batch_size = sizes[0] if sizes else 1
    differentiable = any(map(_has_gradient, inputs)) or bool(trainable_weights(step))
    infos = [
        TensorInfo(
            tuple(batch_size if size is None else size for size in x.shape),
            x.dtype,
            differentiable and tf.as_dtype(x.dtype).is_floating,
        )
        for x in outputs
    ]
    flops = float(sum(info.elements for info in infos))
    return StepTrace(
        outputs=tuple(StepOutput(info, info.bytes) for info in infos),
        saved_inputs=tuple(range(len(inputs))),
        saved_outputs=tuple(range(len(outputs))),
        forward_flops=flops,
        backward_flops=2 * flops,
        problem=problem,
    )


def trainable_weights(step: Step) -> list[keras.Variable]:
    """The weights that the step's backward pass makes gradients for."""
    return list(step.layer.trainable_weights) if step.layer else []


def run_stateless(step: Step, inputs: Sequence[Any]) -> tuple[list[Any], list[tf.Tensor]]:
    """Runs a step in training mode and keeps its updates from happening.

    Returns:
        its flat results, and the losses that it added.
    """
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


def _has_gradient(info: TensorInfo | None) -> bool:
    return info is not None and info.differentiable


def _is_floating(x: Any) -> bool:
    return isinstance(x, tf.Tensor) and (x.dtype.is_floating or x.dtype.is_complex)


class _Reader:
    """Reads a step's costs off the graph that its passes were traced into."""

    def __init__(
        self,
        graph: tf.Graph,
        inputs: Sequence[tf.Tensor | None],
        outputs: Sequence[Any],
        losses: Sequence[tf.Tensor],
        output_gradients: Sequence[tf.Tensor],
    ) -> None:
        self._operations = graph.get_operations()
        self._inputs = inputs
        self._outputs = outputs
        self._losses = losses
        self._map = BufferMap(graph, [x for x in (*inputs, *output_gradients) if x is not None])

    def read(
        self,
        forward: Sequence[tf.Operation],
        input_gradients: Sequence[Any],
        weight_gradients: Sequence[Any],
        sources: Sequence[Any],
    ) -> StepTrace:
        made = [x for x in (*input_gradients, *weight_gradients) if x is not None]
        made = [x for x in tf.nest.flatten(made, expand_composites=True) if x is not None]
        # A loop gets its accumulators only when its gradient is built: they are forward work.
        in_forward = {op.name for op in forward} | ancestors(op_outputs(forward))
        in_backward = ancestors(made) - in_forward
        backward = [op for op in self._operations if op.name in in_backward]
        read = [x for op in backward for x in data_inputs(op) if x.op.name in in_forward]
        saved = {k: v for x in read for k, v in self._map.buffers(x).items()}
        places = self._places()
        residual = {k: v for k, v in saved.items() if k not in places}

        results = [x for x in (*self._outputs, *self._losses) if tf.is_tensor(x)]
        needed = ancestors([*results, *read])
        runs = [op for op in self._operations if op.name in in_forward & needed]
        again = ancestors([x for x in read if self._map.buffers(x).keys() - self._input_names()])
        flops = {op.name: count_flops(op) for op in runs}
        keep = residual | {k: v for x in results for k, v in self._map.buffers(x).items()}
        keep = {k: v for k, v in keep.items() if k not in self._input_names()}
        gradients = {k: v for x in made for k, v in self._map.buffers(x).items()}
        return StepTrace(
            outputs=tuple(self._output(i, sources) for i in range(len(self._outputs))),
            saved_inputs=tuple(sorted(i for s, i in places.items() if s in saved and i >= 0)),
            saved_outputs=tuple(sorted(~i for s, i in places.items() if s in saved and i < 0)),
            residual_bytes=sum(residual.values()),
            forward_flops=sum(flops.values()),
            backward_flops=sum(map(count_flops, backward)),
            free_flops=sum(n for name, n in flops.items() if name not in again),
            forward_workspace=max(0, self._map.peak(runs, keep) - sum(keep.values())),
            backward_workspace=max(
                0, self._map.peak(backward, gradients) - sum(gradients.values())
            ),
            weight_gradient_bytes=sum(
                sum(self._map.buffers(x).values())
                for x in tf.nest.flatten(list(weight_gradients), expand_composites=True)
                if x is not None
            ),
            expensive=any(map(is_expensive, runs)),
        )

    def _input_names(self) -> set[str]:
        return {x.name for x in self._inputs if x is not None}

    def _places(self) -> dict[str, int]:
        """Buffers that outlive the step: an input's position, or an output's as -1, -2, ..."""
        places: dict[str, int] = {}
        for i, x in enumerate(self._inputs):
            if x is not None:
                places[x.name] = i
        for i, x in enumerate(self._outputs):
            if isinstance(x, tf.Tensor):
                places.setdefault(root(x).name, ~i)
        return places

    def _output(self, position: int, sources: Sequence[Any]) -> StepOutput:
        x = self._outputs[position]
        if not isinstance(x, tf.Tensor):
            return StepOutput(None)
        info = replace(_info(x), differentiable=_is_floating(x) and _depends_on(x, sources))
        place = self._places()[root(x).name]
        if place >= 0:
            return StepOutput(info, input=place)
        if ~place < position:
            return StepOutput(info, output=~place)
        return StepOutput(info, bytes=sum(self._map.buffers(x).values()))


def op_outputs(operations: Sequence[tf.Operation]) -> list[tf.Tensor]:
    """All tensors that the operations make."""
    return [x for op in operations for x in op.outputs]


def _info(tensor: tf.Tensor) -> TensorInfo:
    mask = keras_internals.get_mask(tensor)
    shape = tuple(tensor.shape.as_list()) if tensor.shape.rank is not None else ()
    return TensorInfo(
        shape, tensor.dtype.name, mask=None if mask is None else _info(tf.convert_to_tensor(mask))
    )


def _depends_on(tensor: tf.Tensor, sources: Sequence[Any]) -> bool:
    """Whether a gradient can flow from a tensor to any of the sources."""
    graph = tensor.graph
    handles = {
        graph.capture(x.handle).name if isinstance(x, tf.Variable) else x.name for x in sources
    }
    seen: set[str] = set()
    stack = [tensor]
    while stack:
        x = stack.pop()
        if x.name in handles:
            return True
        if x.name not in seen and x.op.type != "StopGradient":
            seen.add(x.name)
            stack.extend(
                y for y in data_inputs(x.op) if not (y.dtype.is_integer or y.dtype.is_bool)
            )
    return False
