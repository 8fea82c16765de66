"""Runs real train steps of a model and measures them; the model stays as it was."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_ckpt import keras_internals
from keras_ckpt.memory.allocator import (
    Measurement,
    default_device,
    measuring,
    require_figures,
)
from keras_ckpt.memory.batch import make_batch, size_of
from keras_ckpt.memory.naming import Naming, no_place
from keras_ckpt.memory.report import Report, notes_on
from keras_ckpt.memory.state import preserving_random_state, preserving_variables
from keras_ckpt.memory.timeline import TRAIN_STEP, Row, make_timeline, recording
from keras_ckpt.plan import Plan

TrainStep = Callable[[Any], Any]


def profile(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    steps: int = 3,
    timeline: bool = True,
) -> Report:
    """Measures the memory and the time of a model's train steps.

    After a step to warm up, runs train steps as `fit` does, eagerly, in graph mode or under XLA as
    the model is compiled, all of them on one batch that is on the device before. Weights,
    optimizer, metrics and random generators are afterwards as before.

    Args:
        model: a compiled model, plain or checkpointed.
        x: data as for `fit`, of which the first batch is used; None for random data of the
            model's input and output shapes.
        y: targets as for `fit`.
        batch_size: examples per train step; 32 if None. Data that comes in batches keeps its own.
        steps: how many train steps to measure.
        timeline: whether to record every block of memory. Doing so takes no memory of the device,
            but some time.

    Returns:
        the figures, from the device's allocator.

    Raises:
        ValueError: if the model is not compiled, or the data does not fit it.
        RuntimeError: if the device's allocator does not count the memory in use (on a CPU, unless
            TF_CPU_ALLOCATOR_USE_BFC=1 is set before TensorFlow is imported).

    Example:

    >>> x = inputs = keras.Input((16,))
    >>> for _ in range(8):
    ...     x = keras.layers.Dense(64, activation="tanh")(x)
    >>> model = keras.Model(inputs, x)
    >>> model.compile(optimizer="sgd", loss="mse")
    >>> report = profile(model, batch_size=512)
    >>> report.peak_bytes > 8 * 512 * 64 * 4
    True
    """
    _check(model, steps)
    require_figures()
    with preserving_random_state():
        batch = make_batch(model, x, y, batch_size)
        with _explaining_misfit(model):
            keras_internals.build_for_training(model, batch)
        with preserving_variables(model):
            return _profile(model, batch, steps, timeline)


def _check(model: keras.Model, steps: int) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(f"`profile` needs a Keras model; received {model!r}.")
    if not model.compiled:
        raise ValueError(
            f"Model '{model.name}' is not compiled, so it has no train step to profile. "
            "Call `model.compile(optimizer=..., loss=...)` first."
        )
    if steps < 1:
        raise ValueError(f"`steps` has to be 1 or more; received {steps}.")


@contextlib.contextmanager
def _explaining_misfit(model: keras.Model) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        raise ValueError(
            f"Model '{model.name}' cannot be trained on this data: {error}\n"
            "Give `x` and `y` as to `fit`, in shapes that fit the model's inputs and its loss."
        ) from error


def _profile(model: keras.Model, batch: Any, steps: int, timeline: bool) -> Report:
    mode = "eager" if model.run_eagerly else "xla" if model.jit_compile else "graph"
    naming = Naming(model)
    train_step = _train_step(model)
    with contextlib.ExitStack() as stack:
        if timeline:
            stack.enter_context(naming.active())
        with _explaining_misfit(model):
            train_step(batch)
        gc.collect()  # What nobody holds is not resting memory.
        events = stack.enter_context(recording()) if timeline else []
        runs = [_run(train_step, batch, number) for number in range(steps)]
    peaks = [memory.peak_bytes for memory, _ in runs]
    seconds = sorted(seconds for _, seconds in runs)
    median = sorted(range(steps), key=peaks.__getitem__)[steps // 2]
    memory, _ = runs[median]
    plan = getattr(model, "plan", None)
    rows: tuple[Row, ...] = ()
    if timeline:
        place = no_place if mode == "xla" else naming.place
        rows = make_timeline(
            events, median, memory.offset_bytes, default_device(), place, _segments(plan)
        )
    return Report(
        model=model.name,
        device=default_device(),
        mode=mode,
        batch_size=size_of(batch),
        steps=steps,
        peak_bytes=memory.peak_bytes,
        resting_bytes=memory.resting_bytes,
        step_seconds=seconds[steps // 2],
        step_peaks=tuple(peaks),
        timeline=rows,
        plan=plan,
        notes=notes_on(mode, memory.peak_bytes, memory.resting_bytes, timeline),
    )


def _train_step(model: keras.Model) -> TrainStep:
    """The train step as `fit` runs it, on a batch instead of an iterator.

    It is the profile's own function, so that steps can be named in it, and the model's is not
    replaced.
    """

    def train_step(batch: Any) -> Any:
        return model.distribute_strategy.run(model.train_step, args=(batch,))

    if model.run_eagerly:
        return train_step
    return tf.function(train_step, autograph=False, jit_compile=model.jit_compile or None)


def _run(train_step: TrainStep, batch: Any, number: int) -> tuple[Measurement, float]:
    """One train step: its memory, and its time in seconds."""
    with measuring() as memory, tf.profiler.experimental.Trace(TRAIN_STEP, step_num=number):
        start = time.perf_counter()
        train_step(batch)
        tf.test.experimental.sync_devices()
        seconds = time.perf_counter() - start
    return memory, seconds


def _segments(plan: Plan | None) -> Mapping[str, int]:
    """The index of the plan's segment that each step is in."""
    segments = plan.segments if plan else ()
    return {
        plan.steps[step]: index  # type: ignore[union-attr]
        for index, segment in enumerate(segments)
        for step in range(segment.start, segment.stop)
    }
