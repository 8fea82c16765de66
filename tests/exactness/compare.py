"""Trains a model plain and checkpointed from the same seeds, and compares everything that trained.

The matrix is case x execution x setting. Where a file does not say otherwise it runs all twelve
combinations. Whoever runs fewer says so next to its `parametrize`; what is dropped is always a
repetition: the layers that cannot be compiled by XLA, or settings that cut a model in the same way.

Tolerance: with `run_eagerly` the same kernels run in the same order, so equal means equal bits. In
graph mode and under XLA the two runs are two different programs, whose compilers may fuse and
reorder sums. Float32 rounds at 6e-8; a hundred such steps, some of which cancel, stay below 1e-5.
The faults that this is about (a mask drawn again, a statistic moved twice, a gradient that is
lost) change the results of these models by 1e-3 and more.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

import keras_ckpt
from keras_ckpt.graph import linearise
from keras_ckpt.segment import Segment

TOLERANCE = 1e-5
EXECUTIONS = {
    "graph": {"jit_compile": False},
    "jit": {"jit_compile": True},
    "eager": {"run_eagerly": True},
}
SETTINGS = ("memory", "sqrt", 3, "nested")


@dataclass(frozen=True, eq=False)
class Case:
    """A training run.

    Attributes:
        build: makes the plain model. Everything random in it follows from the seed.
        x: the training data.
        y: the targets.
        compile: makes the arguments of `compile`, as optimizers and metrics hold state.
        fit: further arguments of `fit`.
        tolerance: the rounding that graph mode and XLA may show, relative and absolute.
        eager_tolerance: the same in eager mode. Above 0 only where a tensor is read three times or
            more: its gradients are added in another order if a segment holds some of its readers.
    """

    build: Callable[[], keras.Model]
    x: Any
    y: Any
    compile: Callable[[], dict[str, Any]] = dict
    fit: dict[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    eager_tolerance: float = 0


@dataclass(frozen=True)
class Run:
    """What a training run left behind: the values of History, and of every variable."""

    history: dict[str, list[float]]
    variables: list[tuple[str, np.ndarray]]


def uniform(*shape: int, seed: int = 0) -> np.ndarray:
    """Data between -1 and 1."""
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype("float32")


def integers(high: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Whole numbers below `high`."""
    return np.random.default_rng(seed).integers(0, high, shape).astype("int32")


def nested_plan(model: keras.Model, depth: int = 3) -> keras_ckpt.Plan:
    """Recomputes every step, the tail too, in segments that lie in segments."""
    return nest([step.name for step in linearise(model).steps], depth)


def nest(steps: list[str], depth: int = 3) -> keras_ckpt.Plan:
    """The nested plan for steps of these names: halves of halves."""
    segments = (Segment(0, len(steps), _halves(0, len(steps), depth - 1)),)
    return keras_ckpt.Plan("any", "nested", tuple(steps), segments)


def _halves(start: int, stop: int, depth: int) -> tuple[Segment, ...]:
    middle = (start + stop) // 2
    if depth == 0 or middle == start:
        return ()
    ends = [(start, middle), (middle, stop)]
    return tuple(Segment(a, b, _halves(a, b, depth - 1)) for a, b in ends)


def checkpoint(model: keras.Model, setting: Any) -> keras_ckpt.CheckpointedModel:
    """The checkpointed twin of a plain model; "nested" stands for `nested_plan`."""
    return keras_ckpt.checkpointed(model, nested_plan(model) if setting == "nested" else setting)


def train(model: keras.Model, case: Case, execution: str) -> Run:
    """Trains a model as the case says."""
    settings = {"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": "mse"}
    model.compile(**settings | case.compile() | EXECUTIONS[execution])
    arguments = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    with warnings.catch_warnings():
        # These models are too small for a plan to save anything.
        warnings.filterwarnings("ignore", "The plan for model|Nothing is recomputed")
        history = model.fit(case.x, case.y, **arguments | case.fit).history
    return Run(history, variables_of(model))


def variables_of(model: keras.Model) -> list[tuple[str, np.ndarray]]:
    """Weights, statistics, seed generators, metrics and optimizer slots, with their names."""
    optimizer = getattr(model, "optimizer", None)
    slots = [] if optimizer is None else optimizer.variables
    return [(v.name, keras.ops.convert_to_numpy(v.value)) for v in [*model.variables, *slots]]


@functools.cache
def plain_run(case: Case, execution: str) -> Run:
    """The run of the plain model, once per case and execution."""
    keras.utils.set_random_seed(1)
    return train(case.build(), case, execution)


def checkpointed_run(case: Case, execution: str, setting: Any) -> Run:
    """The run of the checkpointed model."""
    keras.utils.set_random_seed(1)
    model = checkpoint(case.build(), setting)
    run = train(model, case, execution)
    # "memory" may find that nothing pays; all others have to recompute something.
    assert model.plan is not None
    assert model.plan.segments or setting == "memory"
    return run


def check(case: Case, execution: str, setting: Any) -> None:
    """Asserts that checkpointing changes nothing in a training run."""
    expected = plain_run(case, execution)
    assert all(np.isfinite(expected.history["loss"])), "this case would compare nothing"
    tolerance = case.eager_tolerance if execution == "eager" else case.tolerance
    assert_same(checkpointed_run(case, execution, setting), expected, tolerance)


def assert_same(actual: Run, expected: Run, tolerance: float = 0) -> None:
    """Asserts that two runs are equal: in bits, or up to rounding."""
    assert actual.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(
            actual.history[name], values, tolerance, tolerance, err_msg=f"history of {name}"
        )
    assert_same_variables(actual.variables, expected.variables, tolerance)


def assert_same_variables(
    actual: list[tuple[str, np.ndarray]], expected: list[tuple[str, np.ndarray]], tolerance: float
) -> None:
    """Asserts that variables are equal, one by one."""
    assert len(actual) == len(expected)
    for i, ((_, x), (name, y)) in enumerate(zip(actual, expected, strict=True)):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if x.dtype.kind == "f" and tolerance:
            np.testing.assert_allclose(x, y, tolerance, tolerance, err_msg=f"variable {i}, {name}")
        else:
            np.testing.assert_array_equal(x, y, err_msg=f"variable {i}, {name}")
