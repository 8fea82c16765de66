"""What a trace cannot see: the workspace that kernels take, measured on the device.

A convolution's kernel may lay out its operands anew, and a product may be cut into blocks, in
buffers that no graph shows. They depend on the device, so each distinct step runs there once,
alone, on random data: forward, then backward, with the allocator's peak read after each. What
exceeds the step's results, by the trace, is workspace.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import keras
import tensorflow as tf

from keras_ckpt import keras_internals
from keras_ckpt.costs import ModelCosts
from keras_ckpt.graph import LinearModel, Step
from keras_ckpt.passes import Passes, build_passes
from keras_ckpt.tracing import Key, TracedStep, traced_steps
from keras_ckpt.updates import update_cost

_measured: weakref.WeakKeyDictionary[LinearModel, dict[Key, tuple[int, int]]]
_measured = weakref.WeakKeyDictionary()


def calibrate(
    costs: ModelCosts,
    linear: LinearModel,
    inputs: Sequence[keras.KerasTensor],
    model: keras.Model,
) -> ModelCosts:
    """Replaces the workspace of each step, which a trace underestimates, by a measured figure.

    Runs each distinct step once, forward and backward, on random data; no state of the model
    changes. Figures are kept as long as the linearised model is.

    Args:
        costs: the traced costs.
        linear: the linearised model.
        inputs: the model's flat inputs, with every dimension known.
        model: the model.

    Returns:
        The costs, with `forward_workspace` and `backward_workspace` in bytes as measured.

    Raises:
        RuntimeError: if the device's allocator cannot be read.
    """
    check_allocator()
    known = _measured.setdefault(linear, {})

    def measure_all() -> list[tuple[int, int]]:
        workspaces = []
        for step, traced in zip(linear.steps, traced_steps(linear, inputs), strict=True):
            if traced.key not in known:
                known[traced.key] = _measure(step, traced)
            workspaces.append(known[traced.key])
        return workspaces

    update = update_cost(getattr(model, "optimizer", None))
    workspaces = keras_internals.run_isolated(measure_all)
    steps = [
        replace(
            cost,
            forward_workspace=forward,
            backward_workspace=backward + update.workspace(step),
        )
        for step, cost, (forward, backward) in zip(
            linear.steps, costs.steps, workspaces, strict=True
        )
    ]
    return replace(costs, steps=tuple(steps))


def can_calibrate() -> bool:
    """Whether the device's allocator tells how much memory is in use."""
    try:
        check_allocator()
    except RuntimeError:
        return False
    return True


def check_allocator() -> None:
    """Checks that the device's allocator tells how much memory is in use.

    Raises:
        RuntimeError: if it does not.
    """
    try:
        tf.config.experimental.get_memory_info(_device())
    except (ValueError, tf.errors.OpError) as error:
        raise RuntimeError(
            f"The memory allocator of {_device()} cannot be read, so costs cannot be measured. "
            "On a CPU, set the environment variable TF_CPU_ALLOCATOR_USE_BFC=1 before "
            "TensorFlow is imported."
        ) from error


def _device() -> str:
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def _measure(step: Step, traced: TracedStep) -> tuple[int, int]:
    """The workspace of one step's forward and backward pass, in bytes."""
    trace = traced.trace
    if trace.problem or trace.exact:
        return trace.forward_workspace, trace.backward_workspace
    passes: list[Passes] = []
    whole = tf.compat.v1.wrap_function(
        lambda: passes.append(build_passes(step, traced.inputs, traced.used)), []
    )
    (built,) = passes
    inputs = [x for x in (*built.inputs, *built.masks) if x is not None]
    kept = [x for x in built.read_back if _is_kept(x)]
    if any(x.dtype == tf.variant for x in kept):
        # A loop's lists cannot leave the function that the loop is in.
        return trace.forward_workspace, trace.backward_workspace
    results = list({x.name: x for x in (*built.results, *kept)}.values())
    forward = whole.prune(inputs, results)
    given = list({x.name: x for x in (*built.given, *kept)}.values())
    data = {x.name: _random(x) for x in built.given}
    backward = whole.prune(given, built.gradients) if built.gradients else None

    def run() -> tuple[int, int]:
        with _Peak() as ahead:
            values = forward(*(data[x.name] for x in inputs))
        made = dict(zip((x.name for x in results), values, strict=True))
        arguments = [data[x.name] if x.name in data else made[x.name] for x in given]
        with _Peak() as back:
            gradients = backward(*arguments) if backward else []
        returned = sum(x.shape.num_elements() * x.dtype.size for x in gradients)
        own = sum(output.bytes for output in trace.outputs) + trace.residual_bytes
        return max(0, ahead.bytes - own), max(0, back.bytes - returned)

    run()  # The first run also allocates what kernels keep for good.
    # The allocator may hand out a larger piece than was asked for: the lower figure is the truth.
    forward_bytes, backward_bytes = zip(run(), run(), strict=True)
    return min(forward_bytes), min(backward_bytes)


def _is_kept(tensor: tf.Tensor) -> bool:
    """Whether a tensor that the backward pass reads comes from the forward pass's run."""
    return tensor.op.type not in {"Const", "Placeholder", "ReadVariableOp"}


class _Peak:
    """The most memory in use inside a `with` block, above what was in use before it."""

    bytes = 0

    def __enter__(self) -> _Peak:
        tf.config.experimental.reset_memory_stats(_device())
        self._before = tf.config.experimental.get_memory_info(_device())["current"]
        return self

    def __exit__(self, *exception: object) -> None:
        peak = tf.config.experimental.get_memory_info(_device())["peak"]
        self.bytes = peak - self._before


def _random(like: tf.Tensor) -> tf.Tensor:
    shape = [size or 1 for size in like.shape]
    if like.dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(shape, seed=(0, 0)), like.dtype)
    return tf.ones(shape, like.dtype) if like.dtype == tf.bool else tf.zeros(shape, like.dtype)
