"""What the steps of a model cost: the planners' only view of a model.

Memory is counted by *storage*, a buffer that one or more tensors share (a Reshape's output
lives in its input's buffer), so that nothing is charged twice. Pure data: no TensorFlow here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepCost:
    """What one step reads, writes, saves and computes.

    Attributes:
        name: the step's name in the linearised model.
        inputs: storages that the step reads and that were there before it.
        outputs: storages that the step allocates and that later steps, or the loss, read.
        saved: those of `inputs` and `outputs` that the step's backward pass reads.
        residual_bytes: bytes allocated inside the step that only its own backward pass reads.
        forward_flops: FLOPs of the forward pass.
        backward_flops: FLOPs of the backward pass.
        free_flops: FLOPs of the step's last operation, when no gradient needs its result:
            a segment that ends here recomputes everything but this.
        forward_workspace: bytes that are in use only while the forward pass of the step runs.
        backward_workspace: bytes in use only while its backward pass runs.
        weight_gradient_bytes: bytes of the gradients of the step's trainable weights.
        expensive: whether the step is a matmul, convolution, attention or recurrent step.
    """

    name: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    residual_bytes: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    free_flops: float = 0.0
    forward_workspace: int = 0
    backward_workspace: int = 0
    weight_gradient_bytes: int = 0
    expensive: bool = False


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a model's steps at one batch size.

    Attributes:
        steps: one entry per step, in execution order.
        storage_bytes: the size of every storage, by its number.
        differentiable: whether a gradient flows into the storage, by its number.
        inputs: storages of the model's inputs: data that is there before the step begins.
        outputs: storages that the loss reads.
        resting_bytes: weights, optimizer slots and data that are there before a step begins.
        batch_size: the batch size that the figures hold for.
        standing_bytes: bytes that are in use from the start of a train step to its end whatever
            the plan: what the optimizer computes ahead of the gradients. They are part of every
            peak, unlike resting memory.
    """

    steps: tuple[StepCost, ...]
    storage_bytes: tuple[int, ...]
    differentiable: tuple[bool, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    resting_bytes: int = 0
    batch_size: int | None = None
    standing_bytes: int = 0
