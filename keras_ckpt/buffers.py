"""Which buffers the tensors of a traced graph live in, and how many bytes are in use at once.

Memory belongs to buffers, not to tensors: a Reshape hands its input's buffer on, an addition may
write its result over an operand that nobody else reads, and one TensorList handle stands for as
many buffers as its loop ran rounds. Costs read off a graph are right only if these are told apart.

What holds no memory during a train step: weights (resting), and constants that TensorFlow folds
into the graph. It folds only results up to 100 KiB (`constant_folding.cc`): larger ones, such as
an attention mask, are made anew in each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import tensorflow as tf

from keras_ckpt import keras_internals

# The number of a buffer's tensor, or of a loop's tensor, to the buffer's bytes.
Buffers = dict[str, int]

# Operations whose result shares the buffer of their first input.
ALIASES = {
    "Bitcast",
    "CheckNumerics",
    "EnsureShape",
    "ExpandDims",
    "Identity",
    "PreventGradient",
    "Reshape",
    "Snapshot",
    "Squeeze",
    "StopGradient",
}
# Operations that read a shape and no element.
SHAPE_READERS = {
    "BroadcastGradientArgs",
    "OnesLike",
    "Rank",
    "Shape",
    "ShapeN",
    "Size",
    "TensorListElementShape",
    "TensorListLength",
    "VariableShape",
    "ZerosLike",
}
# Operations that write over an input which nobody reads later (`forward_input_or_allocate_output`).
_IN_PLACE = {
    *("Abs", "Add", "AddN", "AddV2", "BiasAdd", "Ceil", "Cos", "Div", "DivNoNan", "Elu"),
    *("EluGrad", "Erf", "Erfc", "Exp", "Expm1", "Floor", "Inv", "InvGrad", "LeakyRelu"),
    *("LeakyReluGrad", "Log", "Log1p", "LogSoftmax", "LogicalAnd", "LogicalNot"),
    *("LogicalOr", "Maximum", "Minimum", "Mul", "MulNoNan", "Neg", "Pow", "RealDiv"),
    *("Reciprocal", "Relu", "Relu6", "Relu6Grad", "ReluGrad", "Rsqrt", "RsqrtGrad", "Selu"),
    *("SeluGrad", "Sigmoid", "SigmoidGrad", "Sign", "Sin", "Softmax", "Softplus"),
    *("SoftplusGrad", "Softsign", "SoftsignGrad", "Sqrt", "SqrtGrad", "Square"),
    *("SquaredDifference", "Sub", "Tanh", "TanhGrad", "TensorListSetItem", "Xdivy"),
    *("Xlogy"),
}
# Other operations whose kernels allocate their results and nothing else.
_PLAIN = {
    *("BiasAddGrad", "BroadcastTo", "Cast", "ConcatV2", "Const", "Fill", "GreaterEqual"),
    *("IdentityN", "InvertPermutation", "Max", "Mean", "NoOp", "Pack", "Pad", "Placeholder"),
    *("Prod", "Range", "ReadVariableOp", "Select", "SelectV2", "Slice", "Split", "SplitV"),
    *("StatelessRandomGetKeyCounter", "StatelessRandomUniformV2", "StridedSlice"),
    *("StridedSliceGrad", "Sum", "Tile", "Transpose", "Unpack"),
}
_FOLDED_BYTES = 100 * 1024


def element_count(tensor: tf.Tensor) -> int:
    """The number of elements, with 1 for a dimension that depends on the data."""
    shape = tensor.shape
    return 1 if shape.rank is None else math.prod(size or 1 for size in shape.as_list())


def data_inputs(op: tf.Operation) -> list[tf.Tensor]:
    """The inputs whose elements an operation reads."""
    return [] if op.type in SHAPE_READERS else list(op.inputs)


def is_plain(op: tf.Operation) -> bool:
    """Whether an operation's kernel is known to allocate its results and nothing else."""
    return op.type in ALIASES or op.type in SHAPE_READERS or op.type in _IN_PLACE | _PLAIN


def ancestors(tensors: Iterable[tf.Tensor]) -> set[str]:
    """The names of the operations that the tensors are computed by, in whatever way."""
    found: set[str] = set()
    stack = [tensor.op for tensor in tensors]
    while stack:
        op = stack.pop()
        if op.name not in found:
            found.add(op.name)
            stack.extend(tensor.op for tensor in data_inputs(op))
            stack.extend(op.control_inputs)
    return found


def trip_count(loop: tf.Operation) -> int:
    """How often a While operation runs its body, as far as its inputs tell; at least once."""
    limit = tf.get_static_value(loop.inputs[1]) if len(loop.inputs) > 1 else None
    if limit is not None and limit.ndim == 0 and limit > 0:
        return int(limit)
    lists = [x for x in loop.inputs if x.dtype == tf.variant]
    return max((_list_length(x) for x in lists), default=1) or 1


class BufferMap:
    """The buffers of one graph's tensors."""

    def __init__(self, graph: tf.Graph, given: Iterable[tf.Tensor]) -> None:
        """Looks at every operation of the graph once.

        Args:
            graph: the traced graph.
            given: placeholders of tensors that differ from step to step.
        """
        self._changing = {tensor.op.name for tensor in given}
        for op in graph.get_operations():
            if _is_source(op) or any(x.op.name in self._changing for x in data_inputs(op)):
                self._changing.add(op.name)

    def buffers(self, tensor: tf.Tensor) -> Buffers:
        """The buffers that a tensor lives in, with their bytes: several for a TensorList."""
        tensor = root(tensor)
        if tensor.dtype == tf.variant:
            return _list_buffers(tensor)
        size = element_count(tensor) * tensor.dtype.size
        if tensor.op.type in {"ReadVariableOp", "Const"} or tensor.dtype == tf.resource:
            return {}
        is_constant = tensor.op.type == "Placeholder" or size <= _FOLDED_BYTES
        if is_constant and tensor.op.name not in self._changing:
            return {}
        return {tensor.name: size}

    def peak(self, operations: Sequence[tf.Operation], keep: Buffers) -> int:
        """The most bytes in use while operations run in the order given.

        Args:
            operations: what runs. What others made before is there already and counts nothing.
            keep: buffers that are still in use when all is done.
        """
        operations = [op for op in operations if op.type != "Placeholder"]
        inside = {op.name for op in operations}
        last_use: dict[str, int] = {}
        in_use: set[str] = set()
        for i, op in enumerate(operations):
            for tensor in (*data_inputs(op), *op.outputs):
                last_use.update(dict.fromkeys(self.buffers(tensor), i))
            for tensor in op.inputs:
                if tensor.op.name not in inside:
                    in_use.update(self.buffers(tensor))
        held: Buffers = {}
        peak = 0
        for i, op in enumerate(operations):
            read = [name for x in data_inputs(op) for name in self.buffers(x)]
            done = {name for name in read if last_use[name] == i and name not in keep}
            made = {k: v for x in op.outputs for k, v in self.buffers(x).items() if k not in in_use}
            if op.type in _IN_PLACE:
                _overwrite(held, done, made)
            in_use |= made.keys()
            held |= made
            peak = max(peak, sum(held.values()) + _inner_peak(op))
            for name in (*done, *(k for k in made if last_use[k] == i and k not in keep)):
                held.pop(name, None)
        return peak


def root(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that was made in the buffer that a tensor lives in."""
    op = tensor.op
    if op.type in ALIASES or (op.type == "Transpose" and _keeps_order(op)):
        return root(op.inputs[0])
    return root(op.inputs[tensor.value_index]) if op.type == "IdentityN" else tensor


def _overwrite(held: Buffers, done: set[str], made: Buffers) -> None:
    for size in made.values():
        name = next((name for name in done if held.get(name) == size), None)
        if name is not None:
            del held[name]


def _is_source(op: tf.Operation) -> bool:
    return op.type == "ReadVariableOp" or (op.type != "Placeholder" and op.op_def.is_stateful)


def _keeps_order(op: tf.Operation) -> bool:
    """Whether a Transpose only moves dimensions of size 1, which copies nothing."""
    order, shape = tf.get_static_value(op.inputs[1]), op.inputs[0].shape
    if order is None or shape.rank is None:
        return False
    moved = [axis for axis in order if shape[axis] != 1]
    return moved == sorted(moved)


def _inner_peak(op: tf.Operation) -> int:
    """The most bytes in use inside an operation that calls functions, between its rounds."""
    return max((_graph_peak(graph) for graph in keras_internals.called_graphs(op)), default=0)


def _graph_peak(graph: tf.Graph) -> int:
    needed = ancestors(graph.outputs)
    operations = [op for op in graph.get_operations() if op.name in needed]
    inner = BufferMap(graph, graph.inputs)
    keep = {k: v for x in graph.outputs for k, v in inner.buffers(x).items()}
    return inner.peak(operations, keep)


def _list_buffers(tensor: tf.Tensor) -> Buffers:
    """The buffers of a TensorList's elements, each once: loops put one tensor into many lists."""
    op = tensor.op
    if op.type == "TensorListFromTensor":
        return {tensor.name: element_count(op.inputs[0]) * op.inputs[0].dtype.size}
    if op.type not in {"While", "StatelessWhile"}:
        return {}
    body = keras_internals.called_graphs(op)[-1]
    last = body.outputs[tensor.value_index]
    if last is body.inputs[tensor.value_index]:
        return _list_buffers(root(op.inputs[tensor.value_index]))
    element = _element(root(last))
    if element is None:
        return {}
    element = _over_rounds(root(element), body)
    if element.op.type in {"ReadVariableOp", "Const", "Placeholder"}:
        return {}
    size = element_count(element) * element.dtype.size
    return {f"{body.name}/{element.name}": size * trip_count(op)}


def _element(variant: tf.Tensor) -> tf.Tensor | None:
    """What one round of a loop adds to a list."""
    if variant.op.type == "TensorListSetItem":
        return variant.op.inputs[2]
    return variant.op.inputs[1] if variant.op.type == "TensorListPushBack" else None


def _over_rounds(tensor: tf.Tensor, body: tf.Graph) -> tf.Tensor:
    """The tensor of the round before that a loop variable is, so that both count once."""
    for before, after in zip(body.inputs, body.outputs, strict=False):
        if tensor is before:
            return root(after)
    return tensor


def _list_length(tensor: tf.Tensor) -> int:
    op = root(tensor).op
    if op.type == "TensorListFromTensor":
        return op.inputs[0].shape[0] or 0
    if op.type == "TensorListReserve":
        return int(tf.get_static_value(op.inputs[1]) or 0)
    return trip_count(op) if op.type in {"While", "StatelessWhile"} else 0
