"""How much an operation of a traced graph computes, from its shapes.

Products are counted exactly, as 2 FLOPs per multiply-accumulate; anything else as one FLOP per
element that it makes, or reads if it is a reduction. Planners compare these numbers with one
another, so what matters is that products dwarf the rest.
"""

from __future__ import annotations

import math

import tensorflow as tf

from keras_ckpt import keras_internals
from keras_ckpt.buffers import ALIASES, SHAPE_READERS, element_count, trip_count

_FREE = ALIASES | SHAPE_READERS | {"Const", "IdentityN", "NoOp", "Placeholder", "ReadVariableOp"}
_REDUCTIONS = {
    *("All", "Any", "ArgMax", "ArgMin", "AvgPool", "AvgPool3D", "BiasAddGrad", "L2Loss", "Max"),
    *("MaxPool", "MaxPool3D", "Mean", "Min", "Prod", "Sum"),
}
# Where an operation has the tensor with one element per filter position, and where the filter.
_CONVOLUTIONS = {
    "Conv2D": ("output", 0, 1),
    "Conv3D": ("output", 0, 1),
    "DepthwiseConv2dNative": ("output", 0, 1),
    "Conv2DBackpropInput": ("input", 2, 1),
    "Conv3DBackpropInputV2": ("input", 2, 1),
    "DepthwiseConv2dNativeBackpropInput": ("input", 2, 1),
    "Conv2DBackpropFilter": ("input", 2, None),
    "Conv3DBackpropFilterV2": ("input", 2, None),
    "DepthwiseConv2dNativeBackpropFilter": ("input", 2, None),
}
_MATMULS = {"MatMul": "transpose_a", "BatchMatMul": "adj_x", "BatchMatMulV2": "adj_x"}
_MATMULS |= {"BatchMatMulV3": "adj_x"}


def count_flops(op: tf.Operation) -> float:
    """The FLOPs of one operation; of all its rounds, for a loop."""
    if op.type in _FREE:
        return 0.0
    graphs = keras_internals.called_graphs(op)
    if graphs:
        rounds = trip_count(op) if op.type in {"While", "StatelessWhile"} else 1
        return rounds * max(sum(map(count_flops, graph.get_operations())) for graph in graphs)
    if op.type in _MATMULS:
        inner = op.inputs[0].shape[-2 if op.get_attr(_MATMULS[op.type]) else -1]
        return 2.0 * element_count(op.outputs[0]) * (inner or 1)
    if op.type in _CONVOLUTIONS:
        return _convolution_flops(op)
    if op.type == "Einsum":
        return _einsum_flops(op)
    tensors = op.inputs[:1] if op.type in _REDUCTIONS else op.outputs
    return float(sum(element_count(x) for x in tensors))


def is_expensive(op: tf.Operation) -> bool:
    """Whether an operation is a product, or a loop around one."""
    if op.type in _MATMULS or op.type in _CONVOLUTIONS or op.type == "Einsum":
        return True
    graphs = keras_internals.called_graphs(op)
    return any(is_expensive(inner) for graph in graphs for inner in graph.get_operations())


def _convolution_flops(op: tf.Operation) -> float:
    side, position, filter_input = _CONVOLUTIONS[op.type]
    results = (op.outputs if side == "output" else op.inputs)[position]
    kernel = (op.outputs[0] if filter_input is None else op.inputs[filter_input]).shape
    # A depthwise filter holds (height, width, channels, multiplier): only the window is summed.
    window = kernel[:-2] if op.type.startswith("Depthwise") else kernel[:-1]
    return 2.0 * element_count(results) * math.prod(size or 1 for size in window)


def _einsum_flops(op: tf.Operation) -> float:
    terms = op.get_attr("equation").decode().split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, op.inputs, strict=True):
        batch = (tensor.shape.rank or 0) - len(term.replace("...", ""))
        labels = term.replace("...", "".join(f"{i}" for i in range(batch)))
        sizes.update(zip(labels, (size or 1 for size in tensor.shape.as_list()), strict=True))
    return 2.0 * math.prod(sizes.values())
