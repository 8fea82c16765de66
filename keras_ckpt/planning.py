"""From a model and a `checkpoints=` setting to a plan.

The one place where the parts of planning meet: model -> steps -> costs -> segments -> plan.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import keras

from keras_ckpt.checkpoints import (
    Setting,
    check_setting,
    describe,
    find_cuts,
    marker_cuts,
)
from keras_ckpt.costs import ModelCosts
from keras_ckpt.graph import LinearModel, linearise
from keras_ckpt.plan import Checkpoint, Plan
from keras_ckpt.planners.budget import InfeasibleError, plan_budget
from keras_ckpt.planners.equal import plan_equal
from keras_ckpt.planners.memory import plan_memory
from keras_ckpt.planners.simulate import simulate
from keras_ckpt.planners.speed import plan_speed
from keras_ckpt.replayable import steps_to_run_once
from keras_ckpt.segment import Segment, segments_between, segments_without
from keras_ckpt.sizes import format_bytes, parse_bytes
from keras_ckpt.tracing import trace_costs

# What an input dimension that the model leaves open, other than the batch, is taken to be.
ASSUMED_LENGTH = 128
DEFAULT_BATCH_SIZE = 32


def make_plan(
    model: keras.Model,
    checkpoints: Any = "memory",
    batch_size: int = DEFAULT_BATCH_SIZE,
    memory_limit: int | str | None = None,
) -> Plan:
    """Plans which tensors a model keeps in training, without running it.

    Args:
        model: a Functional or a built Sequential model.
        checkpoints: a mode, an int, a list of layers, a `Plan`, None or False; see
            `CheckpointedModel`.
        batch_size: examples per train step. The figures of the plan hold for this size.
        memory_limit: what the whole train step may take, in bytes or as text ("2GB").

    Returns:
        the plan, with its predicted peak (bytes above resting memory) and overhead.

    Raises:
        ValueError: if the model has no known graph, or the setting does not fit it.
        TypeError: if the setting is of a wrong type.

    Example:

    >>> inputs = keras.Input((16,))
    >>> x = inputs
    >>> for _ in range(8):
    ...     x = keras.layers.Dense(16, activation="tanh")(x)
    >>> plan = make_plan(keras.Model(inputs, x), checkpoints=4, batch_size=64)
    >>> len(plan.segments)
    3
    """
    if memory_limit is not None and checkpoints == "memory":
        checkpoints = "budget"
    linear = linearise(model)
    setting = check_setting(checkpoints, memory_limit, linear)
    return plan_steps(linear, setting, input_specs(linear, batch_size), memory_limit, model)


def plan_steps(
    linear: LinearModel,
    setting: Setting,
    inputs: Sequence[keras.KerasTensor],
    memory_limit: int | str | None,
    model: keras.Model,
) -> Plan:
    """Makes the plan for checked settings and fully known input shapes."""
    names = tuple(step.name for step in linear.steps)
    once = steps_to_run_once(linear)
    if isinstance(setting, Plan):
        setting.check(names, linear.name)
        return _running_once(setting, once)
    setting = _resolved(setting, memory_limit, linear)
    costs = trace_costs(linear, inputs, model)
    segments = segments_without(_segments(setting, memory_limit, linear, costs), once)
    prediction = simulate(costs, segments)
    plain = prediction if not segments else simulate(costs, ())
    plan = Plan(
        model=linear.name,
        checkpoints=describe(setting),
        steps=names,
        segments=segments,
        kept=tuple(_kept(linear, segments, inputs)),
        batch_size=costs.batch_size,
        predicted_peak_bytes=prediction.peak_bytes,
        resting_bytes=costs.resting_bytes,
        predicted_overhead=prediction.overhead,
        notes=(*_notes(names, once), *_notes_on_shapes(linear, inputs)),
    )
    saves_nothing = prediction.peak_bytes >= plain.peak_bytes
    if saves_nothing and setting not in (False, "budget"):
        plan = replace(plan, notes=(*plan.notes, _why_nothing_is_saved(plan)))
        warnings.warn(plan.notes[-1], stacklevel=3)
    return plan


def check_against(setting: Setting, linear: LinearModel) -> None:
    """Checks that a setting fits a model, without planning.

    Raises:
        ValueError: if a named layer does not exist, there is no marker, there are fewer steps
            than segments, or a plan is for another model.
    """
    if isinstance(setting, Plan):
        setting.check([step.name for step in linear.steps], linear.name)
    elif isinstance(setting, tuple):
        find_cuts(setting, linear)
    elif setting == "collection" and not marker_cuts(linear):
        raise ValueError(
            f"`checkpoints='collection'` keeps the tensors that pass through a CheckpointMarker, "
            f"and model '{linear.name}' has none on the way to its outputs. Put "
            "`keras_ckpt.CheckpointMarker()(x)` after the layers whose outputs are to be kept, "
            "or leave `checkpoints` out."
        )
    elif isinstance(setting, int) and setting > len(linear.steps):
        raise ValueError(
            f"`checkpoints={setting}` asks for {setting} segments, and model '{linear.name}' has "
            f"{len(linear.steps)} steps. Give at most {len(linear.steps)}."
        )


def input_specs(
    linear: LinearModel, batch_size: int, shapes: Sequence[Sequence[int | None]] | None = None
) -> list[keras.KerasTensor]:
    """The model's inputs with every dimension known.

    Args:
        linear: the linearised model.
        batch_size: stands for an unknown first dimension.
        shapes: shapes of actual inputs, where there are any; they may be unknown in part.
    """
    tensors = [linear.tensors[t] for t in linear.inputs]
    shapes = shapes or [x.shape for x in tensors]
    return [
        keras.KerasTensor(known_shape(shape, batch_size), x.dtype, sparse=x.sparse)
        for x, shape in zip(tensors, shapes, strict=True)
    ]


def known_shape(shape: Sequence[int | None], batch_size: int) -> tuple[int, ...]:
    """A shape with the batch size in the place of the first unknown, and a guess for others."""
    unknown = (batch_size, *[ASSUMED_LENGTH] * len(shape))
    return tuple(unknown[min(i, 1)] if size is None else size for i, size in enumerate(shape))


def _resolved(setting: Setting, memory_limit: int | str | None, linear: LinearModel) -> Setting:
    check_against(setting, linear)
    if setting is None:
        if memory_limit is not None:
            return "budget"
        return "collection" if marker_cuts(linear) else "memory"
    return setting


def _segments(
    setting: Setting, memory_limit: int | str | None, linear: LinearModel, costs: ModelCosts
) -> tuple[Segment, ...]:
    steps = len(linear.steps)
    if setting is False:
        return ()
    if isinstance(setting, tuple):
        return segments_between(find_cuts(setting, linear), steps)
    if setting == "collection":
        return segments_between(marker_cuts(linear), steps)
    if setting == "sqrt":
        return plan_equal(steps, "sqrt")
    if isinstance(setting, int):
        return plan_equal(steps, setting)
    if setting == "speed":
        return plan_speed(costs)
    if setting == "budget" and memory_limit is not None:
        return _plan_within(parse_bytes(memory_limit), linear, costs)
    return plan_memory(costs)


def _plan_within(limit: int, linear: LinearModel, costs: ModelCosts) -> tuple[Segment, ...]:
    try:
        return plan_budget(costs, limit - costs.resting_bytes)
    except InfeasibleError as e:
        least = costs.resting_bytes + e.least_bytes
        batch_size = (costs.batch_size or 1) * max(limit - costs.resting_bytes, 0) // e.least_bytes
        advice = (
            f"Lower the batch size from {costs.batch_size} to about {batch_size}"
            if batch_size
            else "Make the model smaller"
        )
        raise ValueError(
            f"No plan trains model '{linear.name}' within {format_bytes(limit)}. The least that "
            f"recomputation can reach is {format_bytes(least)}: {format_bytes(costs.resting_bytes)}"
            f" of weights and optimizer slots, {format_bytes(e.least_bytes)} of activations and "
            f"gradients, which peak at step '{e.step}'. {advice}, use mixed precision, or raise "
            f"`memory_limit` to {least} bytes."
        ) from e


def _running_once(plan: Plan, once: Collection[int]) -> Plan:
    segments = segments_without(plan.segments, once)
    if segments == plan.segments:
        return plan
    notes = [x for x in _notes(plan.steps, once) if x not in plan.notes]
    return replace(plan, segments=segments, notes=(*plan.notes, *notes))


def _notes(steps: Sequence[str], once: Collection[int]) -> tuple[str, ...]:
    return tuple(
        f"Step '{steps[i]}' is never recomputed: it changes state that cannot be replayed, inside "
        "a TensorFlow loop or function, or in variables or random numbers of TensorFlow's own."
        for i in sorted(once)
    )


def _notes_on_shapes(linear: LinearModel, inputs: Sequence[keras.KerasTensor]) -> tuple[str, ...]:
    open_inputs = [
        known.name
        for t, known in zip(linear.inputs, inputs, strict=True)
        for size, planned in zip(linear.tensors[t].shape[1:], known.shape[1:], strict=False)
        if size is None and planned == ASSUMED_LENGTH
    ]
    if not open_inputs:
        return ()
    return (
        f"The model leaves the size of its inputs open; it was taken to be {ASSUMED_LENGTH}. "
        "`fit` plans for the sizes of its data.",
    )


def _why_nothing_is_saved(plan: Plan) -> str:
    """What to tell a user whose plan saves nothing: there is nothing to save, or a bad setting."""
    if plan.segments:
        return (
            f"The plan for model '{plan.model}' (checkpoints {plan.checkpoints}) saves no memory "
            "by its prediction: its segments keep as much as plain Keras does, or recompute it "
            'all at once. Use `checkpoints="memory"` to have them chosen.'
        )
    return (
        f"Nothing is recomputed in model '{plan.model}': no segments lower its predicted peak "
        f"({format_bytes(plan.predicted_peak_bytes or 0)} above the "
        f"{format_bytes(plan.resting_bytes or 0)} of weights and optimizer slots, which "
        "recomputation cannot lower)."
    )


def _kept(
    linear: LinearModel, segments: Sequence[Segment], inputs: Sequence[keras.KerasTensor]
) -> list[Checkpoint]:
    """The tensors that the segments keep, each with the first segment that reads it."""
    kept: dict[int, Checkpoint] = {}
    batch_size = inputs[0].shape[0] if inputs and inputs[0].shape else 1
    for i, segment in enumerate(segments):
        for t in linear.reads(segment.start, segment.stop):
            step = linear.produced_by(t)
            name = "input" if step < 0 else linear.steps[step].name
            kept.setdefault(t, Checkpoint(name, _bytes(linear.tensors[t], batch_size), i))
    return list(kept.values())


def _bytes(tensor: keras.KerasTensor, batch_size: int) -> int:
    bits = re.search(r"\d+", tensor.dtype)  # None for bool, of one byte, and for text
    return math.prod(known_shape(tensor.shape, batch_size)) * (int(bits[0]) // 8 if bits else 1)
