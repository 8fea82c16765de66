"""Lifetimes: who makes, reads and needs each storage, and which gradients are alive when.

Every planner asks these questions about the linearised model, and all answers are independent
of the plan, so they are worked out once. Model inputs are left out throughout: they are resting
memory, in use before the train step begins, and no plan can drop them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from keras_ckpt.costs import ModelCosts


@dataclass(frozen=True)
class Lifetimes:
    """The plan-independent facts about the storages of a model.

    Attributes:
        costs: the model.
        producer: the step that allocates a storage, by its number; no entry for model inputs.
        readers: the steps that read a storage in the forward pass, ascending; `len(steps)`
            stands for the loss.
        gradient_readers: those of `readers` whose backward pass gives the storage a gradient.

    Example:

    >>> from keras_ckpt.costs import StepCost
    >>> steps = (StepCost("a", (0,), (1,)), StepCost("b", (1,), (2,)))
    >>> lifetimes = Lifetimes.of(ModelCosts(steps, (4, 4, 4), (False, True, True), (0,), (2,)))
    >>> lifetimes.producer[1], lifetimes.readers[2]
    (0, (2,))
    """

    costs: ModelCosts
    producer: dict[int, int] = field(default_factory=dict)
    readers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    gradient_readers: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, costs: ModelCosts) -> Lifetimes:
        """Collects the lifetimes of a model's storages.

        Raises:
            ValueError: if a step reads a storage that no earlier step made, or saves one that
                it neither reads nor makes.
        """
        producer: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        gradient_readers: dict[int, list[int]] = {}
        resting = set(costs.inputs)
        for index, step in enumerate(costs.steps):
            for storage in dict.fromkeys(step.inputs):
                if storage in resting:
                    continue
                if storage not in producer:
                    raise ValueError(
                        f"Step {index} ({step.name!r}) reads storage {storage}, which no earlier "
                        "step makes and which is not an input of the model."
                    )
                readers[storage].append(index)
                if costs.differentiable[storage] and has_backward(costs, index):
                    gradient_readers[storage].append(index)
            if not set(step.saved) <= {*step.inputs, *step.outputs}:
                raise ValueError(
                    f"Step {index} ({step.name!r}) saves storages {step.saved}, but it reads "
                    f"{step.inputs} and makes {step.outputs}."
                )
            for storage in step.outputs:
                if storage in producer or storage in resting:
                    raise ValueError(
                        f"Step {index} ({step.name!r}) makes storage {storage}, which is there "
                        "already. A storage has one producer."
                    )
                producer[storage] = index
                readers[storage], gradient_readers[storage] = [], []
        for storage in dict.fromkeys(costs.outputs):
            if storage in producer:
                readers[storage].append(len(costs.steps))
                if costs.differentiable[storage]:
                    gradient_readers[storage].append(len(costs.steps))
            elif storage not in resting:
                raise ValueError(f"The loss reads storage {storage}, which no step makes.")
        return cls(
            costs,
            producer,
            {storage: tuple(steps) for storage, steps in readers.items()},
            {storage: tuple(steps) for storage, steps in gradient_readers.items()},
        )

    def inputs(self, step: int) -> tuple[int, ...]:
        """The storages that a step reads and another step made."""
        read = dict.fromkeys(self.costs.steps[step].inputs)
        return tuple(storage for storage in read if storage in self.producer)

    def saved(self, step: int) -> tuple[int, ...]:
        """The storages that a step's backward pass reads and that some step made."""
        saved = dict.fromkeys(self.costs.steps[step].saved)
        return tuple(storage for storage in saved if storage in self.producer)

    def arguments(self, start: int, stop: int) -> tuple[int, ...]:
        """The storages that the steps `[start, stop)` read and that an earlier step made."""
        read = dict.fromkeys(s for step in range(start, stop) for s in self.inputs(step))
        return tuple(storage for storage in read if self.producer[storage] < start)

    def last_reader(self, storage: int, stop: int) -> int:
        """The last step before `stop` that reads a storage; its producer if there is none."""
        readers = self.readers[storage]
        position = bisect_left(readers, stop)
        return readers[position - 1] if position else self.producer[storage]

    def gradients(self, step: int) -> tuple[int, ...]:
        """The storages into which a step's backward pass sends a gradient."""
        return tuple(s for s in self.inputs(step) if step in self.gradient_readers[s])


def has_backward(costs: ModelCosts, index: int) -> bool:
    """Whether a step sends gradients to its inputs.

    A step whose outputs are all non-differentiable does not. One without outputs of its own
    does: it passes on its input's buffer (a Reshape) or adds a loss.
    """
    outputs = costs.steps[index].outputs
    return not outputs or any(costs.differentiable[storage] for storage in outputs)


def is_free(costs: ModelCosts, index: int) -> bool:
    """Whether a segment that ends with this step leaves out the step's last operation.

    Nothing reads the result of a segment's last step during its backward pass unless the step
    itself saved it, so the last operation is pruned from the recompute, result and all.
    """
    step = costs.steps[index]
    return step.free_flops > 0 and not set(step.saved) & set(step.outputs)
