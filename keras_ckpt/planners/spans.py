"""What every possible segment `[i, j)` would need, for all i and j at once.

The simulator replays one plan; planners compare n²/2 segments. Seen from one segment, memory
falls into what others hold (a number that depends on the plan) and what it needs itself (which
does not), so the second part is tabulated here, with numpy, in O(n²) time and bytes. Each table
is a sum over storages of rectangles in the (i, j) plane, so it is built as a difference array,
or a running maximum of one.

All figures follow the rules of `simulate`, and the tests hold each against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keras_ckpt.planners.lifetimes import Lifetimes, is_free

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Tables over segments `[i, j)`, in bytes unless said otherwise; n is the number of steps.

    Attributes:
        lifetimes: the facts that the tables come from.
        live: [i] storages made before step i and read at or after it.
        forward: [i, j] the most that running the steps forward adds to `live[i]`.
        recompute: [i, j] the most during the recompute, besides what others hold and the
            segment's arguments; gradients included.
        backward: [i, j] the same during its backward steps, with no inner segments, besides
            the weight gradients of the steps before j: subtract `weight_gradients[j]`.
        entry: [i, j] what its last step, the first one to run backward, needs of that, weight
            gradients included: the weights of the item after the segment are updated meanwhile.
        arguments: [i, j] storages made before i and read inside.
        plain_backward: [t] gradients and workspace during the backward pass of a plain step t.
        gradients: [t] gradients alive between the backward passes of the steps t and t - 1.
        weight_gradients: [t] weight gradients of all steps before t.
        work: [i, j] FLOPs of one recompute.
    """

    lifetimes: Lifetimes
    live: Bytes
    forward: Bytes
    recompute: Bytes
    backward: Bytes
    entry: Bytes
    arguments: Bytes
    plain_backward: Bytes
    gradients: Bytes
    weight_gradients: Bytes
    work: NDArray[np.float64]

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.live) - 1

    @property
    def segment_backward(self) -> Bytes:
        """[i, j] the most that an outermost segment without inner ones needs when it goes back."""
        return np.maximum(self.recompute, self.backward + self.weight_gradients)

    @classmethod
    def of(cls, lifetimes: Lifetimes) -> Spans:
        """Builds all tables."""
        steps = lifetimes.costs.steps
        weights = _prefix_sum([step.weight_gradient_bytes for step in steps])
        during, between = _gradients(lifetimes)
        workspace = np.array([step.backward_workspace for step in steps], np.int64)
        kept = _kept(lifetimes)
        peaks = kept + during + workspace - weights[:-1]
        own = np.array([step.weight_gradient_bytes for step in steps], np.int64)
        return cls(
            lifetimes=lifetimes,
            live=_live(lifetimes),
            forward=_shift(_running_maximum(_transient(lifetimes))),
            recompute=_recompute(lifetimes, kept) + between,
            backward=_shift(_running_maximum(peaks)),
            entry=_shift(peaks + weights[1:]),
            arguments=_arguments(lifetimes),
            plain_backward=during + workspace + own,
            gradients=between,
            weight_gradients=weights,
            work=_work(lifetimes),
        )


def _prefix_sum(values: list[int]) -> Bytes:
    return np.concatenate([[0], np.cumsum(np.array(values, np.int64))]).astype(np.int64)


def _running_maximum(values: Bytes) -> Bytes:
    """[i, t] the largest of `values[i, i..t]`."""
    steps = len(values)
    masked = np.where(np.tri(steps, k=-1, dtype=bool), np.iinfo(np.int64).min // 2, values)
    return np.maximum.accumulate(masked, axis=1)


def _shift(table: Bytes) -> Bytes:
    """From [i, last step] to [i, step after the last], with room for i, j = n."""
    result = np.zeros((len(table) + 1, len(table) + 1), np.int64)
    result[:-1, 1:] = table
    return result


def _integrate(corners: Bytes) -> Bytes:
    """Turns marked corners of rectangles into their sum."""
    return corners.cumsum(axis=0).cumsum(axis=1)


def _live(lifetimes: Lifetimes) -> Bytes:
    changes = np.zeros(len(lifetimes.costs.steps) + 2, np.int64)
    for storage, producer in lifetimes.producer.items():
        if lifetimes.readers[storage]:
            size = lifetimes.costs.storage_bytes[storage]
            changes[producer + 1] += size
            changes[lifetimes.readers[storage][-1] + 1] -= size
    return changes.cumsum()[:-1]


def _gradients(lifetimes: Lifetimes) -> tuple[Bytes, Bytes]:
    """Gradients alive [t] during the backward pass of step t, and [t] just before that of t - 1."""
    steps = len(lifetimes.costs.steps)
    during, between = np.zeros(steps + 2, np.int64), np.zeros(steps + 2, np.int64)
    for storage, readers in lifetimes.gradient_readers.items():
        if readers:
            size, producer = lifetimes.costs.storage_bytes[storage], lifetimes.producer[storage]
            during[producer] += size
            during[readers[-1] + 1] -= size
            between[producer + 1] += size
            between[readers[-1] + 1] -= size
    return during.cumsum()[:steps], between.cumsum()[: steps + 1]


def _transient(lifetimes: Lifetimes) -> Bytes:
    """[i, t] made at or after i and in use while step t runs forward without saving."""
    steps = lifetimes.costs.steps
    size = len(steps)
    table = np.zeros((size + 1, size + 1), np.int64)
    for storage, producer in lifetimes.producer.items():
        readers = lifetimes.readers[storage]
        last = min(readers[-1], size - 1) if readers else producer
        table[0, producer] += lifetimes.costs.storage_bytes[storage]
        table[producer + 1, producer] -= lifetimes.costs.storage_bytes[storage]
        table[0, last + 1] -= lifetimes.costs.storage_bytes[storage]
        table[producer + 1, last + 1] += lifetimes.costs.storage_bytes[storage]
    own = [step.residual_bytes + step.forward_workspace for step in steps]
    return _integrate(table)[:-1, :-1] + np.array(own, np.int64)


def _first_saver(lifetimes: Lifetimes) -> dict[int, int]:
    first: dict[int, int] = {}
    for step in range(len(lifetimes.costs.steps)):
        for storage in lifetimes.saved(step):
            first.setdefault(storage, step)
    return first


def _kept(lifetimes: Lifetimes) -> Bytes:
    """[i, t] made at or after i and kept for the backward passes of the steps i..t."""
    steps = lifetimes.costs.steps
    table = np.zeros((len(steps) + 1, len(steps) + 1), np.int64)
    for storage, saver in _first_saver(lifetimes).items():
        table[0, saver] += lifetimes.costs.storage_bytes[storage]
        table[lifetimes.producer[storage] + 1, saver] -= lifetimes.costs.storage_bytes[storage]
    for index, step in enumerate(steps):
        table[0, index] += step.residual_bytes
        table[index + 1, index] -= step.residual_bytes
    return _integrate(table)[:-1, :-1]


def _arguments(lifetimes: Lifetimes) -> Bytes:
    """[i, j] made before i and read inside."""
    everything = {storage: producer + 1 for storage, producer in lifetimes.producer.items()}
    return argument_bytes(lifetimes, everything)


def argument_bytes(lifetimes: Lifetimes, since: dict[int, int]) -> Bytes:
    """[i, j] the arguments of `[i, j)` among some storages, each from a boundary on.

    Args:
        lifetimes: the facts about the storages.
        since: for each storage that counts, the first i at which it does.
    """
    steps = len(lifetimes.costs.steps)
    table = np.zeros((steps + 2, steps + 2), np.int64)
    for storage, first in since.items():
        size = lifetimes.costs.storage_bytes[storage]
        for reader in lifetimes.readers[storage]:
            if first <= reader < steps:
                table[first, reader + 1] += size
                table[reader + 1, reader + 1] -= size
                first = reader + 1
    return _integrate(table)[:-1, :-1]


def _recompute(lifetimes: Lifetimes, kept: Bytes) -> Bytes:
    """[i, j] the most in use, of what is made at or after i, while [i, j) runs forward saving.

    What step t sees depends on j through the unsaved storages that pass over t and are read
    before j. They are added as j grows; only skip connections pass over anything.
    """
    costs = lifetimes.costs
    steps = len(costs.steps)
    first_saver = _first_saver(lifetimes)
    seen = np.zeros((steps, steps), np.int64)  # [t, i]
    highest = np.zeros(steps, np.int64)  # over t, by i
    result = np.zeros((steps + 1, steps + 1), np.int64)
    for step, cost in enumerate(costs.steps):
        row = kept[:, step].copy()
        for storage in lifetimes.inputs(step):
            size, producer = costs.storage_bytes[storage], lifetimes.producer[storage]
            saver = first_saver.get(storage, steps)
            if saver > step:
                row[: producer + 1] += size
            passed = lifetimes.last_reader(storage, step) + 1
            over = seen[passed : min(step, saver), : producer + 1]
            if over.size:
                over += size
                highest[: producer + 1] = np.maximum(highest[: producer + 1], over.max(axis=0))
        made = sum(costs.storage_bytes[s] for s in cost.outputs if first_saver.get(s) != step)
        last = row
        if not is_free(costs, step):
            last = row + made + cost.forward_workspace
        elif cost.forward_flops > cost.free_flops:
            last = row + cost.forward_workspace
        result[: step + 1, step + 1] = np.maximum(highest, last)[: step + 1]
        row[: step + 1] += made + cost.forward_workspace
        seen[step, : step + 1] = row[: step + 1]
        highest[: step + 1] = np.maximum(highest, row)[: step + 1]
    return result


def _work(lifetimes: Lifetimes) -> NDArray[np.float64]:
    costs = lifetimes.costs
    total = np.concatenate([[0.0], np.cumsum([step.forward_flops for step in costs.steps])])
    free = [s.free_flops if is_free(costs, i) else 0.0 for i, s in enumerate(costs.steps)]
    return total[None, :] - np.array([0.0, *free])[None, :] - total[:, None]
