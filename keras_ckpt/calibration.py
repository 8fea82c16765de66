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
from keras_ckpt.memory.allocator import measuring, require_figures
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
    require_figures()
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
        require_figures()
    except RuntimeError:
        return False
    return True


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
        with measuring() as ahead:
            values = forward(*(data[x.name] for x in inputs))
        made = dict(zip((x.name for x in results), values, strict=True))
        arguments = [data[x.name] if x.name in data else made[x.name] for x in given]
        with measuring() as back:
            gradients = backward(*arguments) if backward else []
        returned = sum(x.shape.num_elements() * x.dtype.size for x in gradients)
        own = sum(output.bytes for output in trace.outputs) + trace.residual_bytes
        return max(0, ahead.peak_bytes - own), max(0, back.peak_bytes - returned)

    run()  # The first run also allocates what kernels keep for good.
    return run()


def _is_kept(tensor: tf.Tensor) -> bool:
    """Whether a tensor that the backward pass reads comes from the forward pass's run."""
    return tensor.op.type not in {"Const", "Placeholder", "ReadVariableOp"}


def _random(like: tf.Tensor) -> tf.Tensor:
    shape = [size or 1 for size in like.shape]
    if like.dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(shape, seed=(0, 0)), like.dtype)
    return tf.ones(shape, like.dtype) if like.dtype == tf.bool else tf.zeros(shape, like.dtype)
