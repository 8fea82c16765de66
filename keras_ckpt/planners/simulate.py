"""Replays one train step under a plan: the one source of predicted peaks and extra work.

Planners reason about memory in closed form; this module does not. It runs the steps one by one
on an abstract machine that only knows which buffers are held and by whom, in the manner of
`checkpoint_schedules` (Dolci et al. 2024), so that every plan is checked by something simpler
than what made it. The rules of the machine:

* **Forward, plain step.** Allocates its outputs and residual; what its backward pass reads stays.
  Any other storage is freed after the last step that reads it.
* **Forward, segment.** Its arguments (storages read inside and made before) stay until its
  backward pass is done, since a custom gradient keeps its arguments. Inside, nothing is saved.
* **Backward, segment.** Its steps run forward again (*recompute*), this time saving, with inner
  segments dropped as above; then its items go backward in reverse order. Nothing reads the
  result of a segment's *last* item, so graph pruning drops it from the recompute: a plain last
  step loses its free operation (`StepCost.free_flops`) and its outputs unless its own backward
  pass saved them, and an inner segment that ends the outer one does not run forward at all.
* **Gradients.** The gradient of a storage is as large as the storage. It is there from the first
  backward pass that adds to it (for model outputs: from the loss) until the backward pass of
  the step that made the storage is done. Weight gradients are applied as they arrive, but a
  segment's gate lets none out before the outermost segment's backward pass is done.
* **Updates.** The weights of an item (a plain step, or an outermost segment) are updated while
  the next step runs backward: their gradients count in that one event as well. What the
  optimizer computes ahead of the gradients (`ModelCosts.standing_bytes`) is there throughout.
* **Model inputs** are resting memory and count nothing.

Known gaps: gradients that alias one another (both inputs of an Add) count once per storage;
several partial gradients of one storage count as one; an update may take longer than the one
step it is counted in, and it is not counted in a recompute that comes between; what the loss
itself allocates besides the outputs' gradients is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from keras_ckpt.costs import ModelCosts
from keras_ckpt.planners.lifetimes import Lifetimes, is_free
from keras_ckpt.segment import Segment, check_segments, walk

Phase = Literal["forward", "recompute", "backward"]


class IllegalPlanError(ValueError):
    """A step would run while something that it reads is not in memory."""


@dataclass(frozen=True)
class Event:
    """One step's pass over the machine.

    Attributes:
        phase: "forward", "recompute" or "backward".
        step: the index of the step. The first backward event is the loss making the gradients
            of the outputs; it bears the index of the last step.
        bytes: bytes in use above resting memory while it runs, workspace included.
    """

    phase: Phase
    step: int
    bytes: int


@dataclass(frozen=True)
class Simulation:
    """What one train step does under a plan.

    Attributes:
        events: the timeline.
        recomputed_flops: FLOPs of forward work done again.
        overhead: `recomputed_flops` over the FLOPs of the plain train step.
        forward_runs: how often the forward pass of each step ran, in full or in part.
    """

    events: tuple[Event, ...]
    recomputed_flops: float
    overhead: float
    forward_runs: tuple[int, ...]

    @property
    def peak_event(self) -> Event | None:
        """The first event at which the most memory is in use; None if there are no steps."""
        return max(self.events, key=lambda event: event.bytes, default=None)

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use above resting memory."""
        return self.peak_event.bytes if self.peak_event else 0


def simulate(costs: ModelCosts, segments: Sequence[Segment]) -> Simulation:
    """Replays one train step under a plan.

    Args:
        costs: what the model's steps cost.
        segments: the plan: what is recomputed together, nested or not. `()` is plain Keras.

    Returns:
        The timeline, its peak in bytes above resting memory, and the FLOPs done again.

    Raises:
        ValueError: if the segments overlap or leave the model, or the costs contradict themselves.
        IllegalPlanError: if a step would read a storage that is not in memory.

    Example:

    >>> from keras_ckpt.costs import StepCost
    >>> chain = ModelCosts(
    ...     steps=tuple(StepCost(f"s{i}", (i,), (i + 1,), (i + 1,), 0, 1.0, 2.0) for i in range(4)),
    ...     storage_bytes=(8,) * 5, differentiable=(True,) * 5, inputs=(0,), outputs=(4,))
    >>> simulate(chain, ()).peak_bytes, simulate(chain, (Segment(0, 2),)).peak_bytes
    (48, 32)
    """
    check_segments(segments, 0, len(costs.steps))
    machine = _Machine(Lifetimes.of(costs))
    machine.train_step(segments)
    plain_flops = sum(step.forward_flops + step.backward_flops for step in costs.steps)
    return Simulation(
        events=tuple(machine.events),
        recomputed_flops=machine.recomputed_flops,
        overhead=machine.recomputed_flops / plain_flops if plain_flops else 0.0,
        forward_runs=tuple(machine.forward_runs),
    )


@dataclass(frozen=True)
class _Pass:
    """A forward pass over the steps from `start`; what is read before `stop` matters to it."""

    phase: Phase
    start: int
    stop: int


class _Machine:
    """Counts the holders of every buffer and the bytes of those that are held at all."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self.lifetimes = lifetimes
        self.costs = lifetimes.costs
        self.holders: Counter[int] = Counter()
        self.with_gradient: set[int] = set()
        self.in_use = self.costs.standing_bytes
        self.gated_bytes = 0
        self.updating_bytes = 0  # gradients let out by the item before, until one step has run
        self.events: list[Event] = []
        self.recomputed_flops = 0.0
        self.forward_runs = [0] * len(self.costs.steps)

    def train_step(self, segments: Sequence[Segment]) -> None:
        """Runs forward, the loss, and backward."""
        steps = len(self.costs.steps)
        first = _Pass("forward", 0, steps + 1)
        self._run_items(segments, 0, steps, first)
        self._loss(first)
        self._backward_items(segments, 0, steps, gated=False)

    def _run_items(
        self, segments: Sequence[Segment], start: int, stop: int, current: _Pass
    ) -> None:
        """Runs the steps `[start, stop)` forward, saving what the plain ones among them need."""
        for item in walk(segments, start, stop):
            if isinstance(item, Segment):
                self._run_segment(item, current)
            else:
                self._run_step(item, current, pruned=item + 1 == current.stop)
                self._save(item)
                self._release_read(item, current)

    def _run_segment(self, segment: Segment, current: _Pass) -> None:
        """Runs a segment forward and drops its insides; skips it if nothing reads its results."""
        arguments = self.lifetimes.arguments(segment.start, segment.stop)
        for storage in arguments:
            self._check(storage, segment.start)
            self._hold(storage)
        if segment.stop == current.stop:
            for storage in arguments:
                if self.lifetimes.producer[storage] >= current.start:
                    self._release(storage)
            return
        for step in range(segment.start, segment.stop):
            self._run_step(step, current, pruned=False)
            self._release_read(step, current)

    def _run_step(self, index: int, current: _Pass, pruned: bool) -> None:
        """Runs one step, without its free operation if `pruned`; what is read later is held."""
        step = self.costs.steps[index]
        pruned = pruned and is_free(self.costs, index)
        for storage in self.lifetimes.inputs(index):
            self._check(storage, index)
        for storage in () if pruned else step.outputs:
            self._hold(storage)
        flops = step.forward_flops - (step.free_flops if pruned else 0.0)
        runs = flops > 0 or not pruned
        self.forward_runs[index] += runs
        self.recomputed_flops += flops if current.phase == "recompute" else 0.0
        transient = step.residual_bytes + (step.forward_workspace if runs else 0)
        self._record(current.phase, index, transient)
        for storage in () if pruned else step.outputs:
            if self.lifetimes.last_reader(storage, current.stop) == index:
                self._release(storage)

    def _save(self, index: int) -> None:
        for storage in self.lifetimes.saved(index):
            self._hold(storage)
        self.in_use += self.costs.steps[index].residual_bytes

    def _release_read(self, index: int, current: _Pass) -> None:
        """Frees what this pass made, a step has read, and no later step of the pass reads."""
        for storage in self.lifetimes.inputs(index):
            made_here = self.lifetimes.producer[storage] >= current.start
            if made_here and self.lifetimes.last_reader(storage, current.stop) == index:
                self._release(storage)

    def _loss(self, current: _Pass) -> None:
        """Makes the gradients of the model's outputs while the outputs are still there."""
        steps = len(self.costs.steps)
        outputs = [s for s, readers in self.lifetimes.readers.items() if steps in readers]
        for storage in outputs:
            self._check(storage, steps - 1)
            if steps in self.lifetimes.gradient_readers[storage]:
                self._make_gradient(storage)
        if steps:
            self._record("backward", steps - 1, 0)
        for storage in outputs:
            self._release(storage)

    def _backward_items(
        self, segments: Sequence[Segment], start: int, stop: int, gated: bool
    ) -> None:
        for item in reversed(tuple(walk(segments, start, stop))):
            if isinstance(item, Segment):
                self._backward_segment(item, gated)
            else:
                self._backward_step(item, gated)

    def _backward_segment(self, segment: Segment, gated: bool) -> None:
        """Recomputes a segment, then goes backward through it and lets its gradients out."""
        start, stop = segment.start, segment.stop
        self._run_items(segment.segments, start, stop, _Pass("recompute", start, stop))
        self._backward_items(segment.segments, start, stop, gated=True)
        for storage in self.lifetimes.arguments(start, stop):
            self._release(storage)
        if not gated:
            self.in_use -= self.gated_bytes
            self.updating_bytes, self.gated_bytes = self.gated_bytes, 0

    def _backward_step(self, index: int, gated: bool) -> None:
        step = self.costs.steps[index]
        for storage in self.lifetimes.saved(index):
            self._check(storage, index)
        for storage in self.lifetimes.gradients(index):
            self._make_gradient(storage)
        own = step.weight_gradient_bytes
        self._record("backward", index, own + step.backward_workspace + self.updating_bytes)
        self.updating_bytes = 0 if gated else own
        if gated:
            self.gated_bytes += own
            self.in_use += own
        for storage in self.lifetimes.saved(index):
            self._release(storage)
        self.in_use -= step.residual_bytes
        for storage in self.with_gradient.intersection(step.outputs):
            self.with_gradient.remove(storage)
            self.in_use -= self.costs.storage_bytes[storage]

    def _make_gradient(self, storage: int) -> None:
        if storage not in self.with_gradient:
            self.with_gradient.add(storage)
            self.in_use += self.costs.storage_bytes[storage]

    def _hold(self, storage: int) -> None:
        self.holders[storage] += 1
        if self.holders[storage] == 1:
            self.in_use += self.costs.storage_bytes[storage]

    def _release(self, storage: int) -> None:
        self.holders[storage] -= 1
        if not self.holders[storage]:
            self.in_use -= self.costs.storage_bytes[storage]

    def _check(self, storage: int, index: int) -> None:
        if not self.holders[storage]:
            raise IllegalPlanError(
                f"Step {index} ({self.costs.steps[index].name!r}) reads storage {storage}, "
                "which is not in memory."
            )

    def _record(self, phase: Phase, index: int, transient: int) -> None:
        self.events.append(Event(phase, index, self.in_use + transient))
