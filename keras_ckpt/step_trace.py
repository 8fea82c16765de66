"""What one step costs, read off a graph of its forward and backward pass.

The forward tensors that backward operations read are what the step saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from keras_ckpt import keras_internals
from keras_ckpt.buffers import BufferMap, Buffers, ancestors, data_inputs, is_plain, root
from keras_ckpt.flops import count_flops, is_expensive
from keras_ckpt.graph import Step
from keras_ckpt.passes import (
    Passes,
    TensorInfo,
    build_passes,
    flatten_gradients,
    has_gradient,
    is_floating,
    trainable_weights,
)


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
        exact: whether its kernels take no memory that a graph does not show.
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
    exact: bool = False
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
    with keras_internals.scratch_graph().as_default():
        return _Reader(build_passes(step, inputs, used)).read()


def guess_step(
    step: Step,
    inputs: Sequence[TensorInfo | None],
    outputs: Sequence[keras.KerasTensor],
    problem: str,
) -> StepTrace:
    """The costs of a step that cannot be traced: it may save all that it reads and makes."""
    sizes = [info.shape[0] for info in inputs if info and info.shape]
    batch_size = sizes[0] if sizes else 1
    differentiable = any(map(has_gradient, inputs)) or bool(trainable_weights(step))
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


class _Reader:
    """Reads a step's costs off the graph that its passes were traced into."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._map = BufferMap(tf.compat.v1.get_default_graph(), passes.given)
        self._places = self._find_places()

    def read(self) -> StepTrace:
        passes = self._passes
        saved = self._buffers(passes.read_back)
        residual = {k: v for k, v in saved.items() if k not in self._places}
        results = self._buffers(passes.results)
        own = {k: v for k, v in (results | residual).items() if self._places.get(k, -1) < 0}
        needed = ancestors([*passes.results, *passes.read_back])
        forward = [op for op in passes.forward if op.name in needed]
        again = ancestors(x for x in passes.read_back if self._buffers([x]).keys() & own.keys())
        flops = {op.name: count_flops(op) for op in forward}
        gradients = self._buffers(passes.gradients)
        weight_gradients = self._buffers(flatten_gradients(passes.weight_gradients))
        places = [self._places[name] for name in saved if name in self._places]
        return StepTrace(
            outputs=tuple(self._output(i) for i in range(len(passes.outputs))),
            saved_inputs=tuple(sorted(place for place in places if place >= 0)),
            saved_outputs=tuple(sorted(~place for place in places if place < 0)),
            residual_bytes=sum(residual.values()),
            forward_flops=sum(flops.values()),
            backward_flops=sum(map(count_flops, passes.backward)),
            free_flops=sum(n for name, n in flops.items() if name not in again),
            forward_workspace=self._workspace(forward, own),
            backward_workspace=self._workspace(passes.backward, gradients),
            weight_gradient_bytes=sum(weight_gradients.values()),
            expensive=any(map(is_expensive, forward)),
            exact=all(map(is_plain, [*forward, *passes.backward])),
        )

    def _buffers(self, tensors: Sequence[tf.Tensor]) -> Buffers:
        return {k: v for x in tensors for k, v in self._map.buffers(x).items()}

    def _workspace(self, operations: Sequence[tf.Operation], keep: Buffers) -> int:
        return max(0, self._map.peak(operations, keep) - sum(keep.values()))

    def _find_places(self) -> dict[str, int]:
        """Buffers that outlive the step: an input's position, or an output's as -1, -2, ..."""
        places = {x.name: i for i, x in enumerate(self._passes.inputs) if x is not None}
        for i, x in enumerate(self._passes.outputs):
            if isinstance(x, tf.Tensor):
                places.setdefault(root(x).name, ~i)
        return places

    def _output(self, position: int) -> StepOutput:
        x = self._passes.outputs[position]
        if not isinstance(x, tf.Tensor):
            return StepOutput(None)
        info = replace(_info(x), differentiable=_depends_on(x, self._passes.sources))
        place = self._places[root(x).name]
        if place >= 0:
            return StepOutput(info, input=place)
        if ~place < position:
            return StepOutput(info, output=~place)
        return StepOutput(info, bytes=sum(self._map.buffers(x).values()))


def _info(tensor: tf.Tensor) -> TensorInfo:
    mask = keras_internals.get_mask(tensor)
    shape = tuple(tensor.shape.as_list()) if tensor.shape.rank is not None else ()
    return TensorInfo(
        shape, tensor.dtype.name, mask=None if mask is None else _info(tf.convert_to_tensor(mask))
    )


def _depends_on(tensor: tf.Tensor, sources: Sequence[Any]) -> bool:
    """Whether a gradient can flow from a tensor to any of the sources."""
    if not is_floating(tensor):
        return False
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
