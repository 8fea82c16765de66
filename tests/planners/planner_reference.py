"""An independent replay and an enumeration of every plan, to hold the planners against.

The replay knows no machine: it writes the train step down as a list of operations that make and
read *versions* of buffers, and then works out from first to last use which are in memory when.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache

from keras_ckpt.costs import ModelCosts
from keras_ckpt.segment import Segment, walk


@dataclass
class Operation:
    phase: str
    step: int
    flops: float = 0.0
    transient: int = 0
    uses: set[tuple] = field(default_factory=set)  # what must be in memory while it runs


class Tape:
    """The operations of one train step, in order."""

    def __init__(self, costs: ModelCosts, segments: tuple[Segment, ...]) -> None:
        self.costs = costs
        self.operations: list[Operation] = []
        self.version: dict[int, int] = {}  # how often a storage was made so far
        self.gates: list[tuple[int, int]] = []  # (step whose backward opens the gate, step inside)
        self.updates: list[tuple[int, int]] = []  # (step whose backward is next, step let out)
        self.maker = {s: i for i, step in enumerate(costs.steps) for s in step.outputs}
        count = len(costs.steps)
        everything = self.forward(segments, 0, count, None)
        outputs = {s for s in costs.outputs if s in self.maker}
        loss = Operation("backward", count - 1)
        loss.uses |= {self.buffer(s) for s in outputs}
        loss.uses |= {("gradient", s) for s in outputs if costs.differentiable[s]}
        self.operations.append(loss)
        self.backward(everything, None)

    def buffer(self, storage: int) -> tuple:
        return ("value", storage, self.version[storage])

    def run(self, step: int, phase: str, *, pruned: bool = False) -> None:
        cost = self.costs.steps[step]
        drop = pruned and cost.free_flops > 0 and not set(cost.saved) & set(cost.outputs)
        flops = cost.forward_flops - (cost.free_flops if drop else 0)
        workspace = 0 if drop and not flops else cost.forward_workspace
        operation = Operation(phase, step, flops, cost.residual_bytes + workspace)
        operation.uses = {self.buffer(s) for s in cost.inputs if s in self.maker}
        if not drop:
            for storage in cost.outputs:
                self.version[storage] = self.version.get(storage, 0) + 1
            operation.uses |= {self.buffer(s) for s in cost.outputs}
        self.operations.append(operation)

    def forward(self, segments, start: int, stop: int, inside: Segment | None) -> list:
        """Runs items forward and returns what their backward passes will need."""
        done = []
        phase = "recompute" if inside else "forward"
        for item in walk(segments, start, stop):
            if isinstance(item, Segment):
                read = {s for t in range(item.start, item.stop) for s in self.costs.steps[t].inputs}
                held = {self.buffer(s) for s in read if self.maker.get(s, item.start) < item.start}
                if not (inside and item.stop == stop):
                    for step in range(item.start, item.stop):
                        self.run(step, phase)
            else:
                self.run(item, phase, pruned=bool(inside) and item + 1 == stop)
                cost = self.costs.steps[item]
                held = {self.buffer(s) for s in cost.saved if s in self.maker}
                token = ("residual", item, len(self.operations))
                held.add(token)
            done.append((item, held))
        return done

    def backward(self, items: list, outermost: Segment | None) -> None:
        for item, held in reversed(items):
            first = len(self.operations)
            if isinstance(item, Segment):
                outer = outermost or item
                self.backward(self.forward(item.segments, item.start, item.stop, item), outer)
            else:
                self.step_backward(item, outermost)
            for operation in self.operations[first:]:
                operation.uses |= held

    def step_backward(self, step: int, outermost: Segment | None) -> None:
        cost = self.costs.steps[step]
        operation = Operation("backward", step, 0.0, cost.backward_workspace)
        operation.uses = {("weights", step)}
        if not cost.outputs or any(self.costs.differentiable[s] for s in cost.outputs):
            read = {s for s in cost.inputs if s in self.maker and self.costs.differentiable[s]}
            operation.uses |= {("gradient", s) for s in read}
        self.operations.append(operation)
        if outermost:
            self.gates.append((outermost.start, step))
        self.updates.append(((outermost.start if outermost else step) - 1, step))

    def replay(self) -> list[int]:
        """The bytes in memory during every operation."""
        uses: dict[tuple, list[int]] = defaultdict(list)
        for index, operation in enumerate(self.operations):
            for thing in operation.uses:
                uses[thing].append(index)
        backward_of = {o.step: i for i, o in enumerate(self.operations) if o.phase == "backward"}
        for thing in [t for t in uses if t[0] == "gradient"]:
            uses[thing].append(backward_of[self.maker[thing[1]]])
        for start, step in self.gates:
            uses["weights", step].append(backward_of[start])
        for thing in [t for t in uses if t[0] == "residual"]:
            uses[thing].append(thing[2])
        standing = self.costs.standing_bytes
        memory = [standing + operation.transient for operation in self.operations]
        for following, step in self.updates:
            if following >= 0:
                memory[backward_of[following]] += self.size(("weights", step))
        for thing, indices in uses.items():
            for index in range(min(indices), max(indices) + 1):
                memory[index] += self.size(thing)
        return memory

    def size(self, thing: tuple) -> int:
        if thing[0] == "residual":
            return self.costs.steps[thing[1]].residual_bytes
        if thing[0] == "weights":
            return self.costs.steps[thing[1]].weight_gradient_bytes
        return self.costs.storage_bytes[thing[1]]


def reference_replay(
    costs: ModelCosts, segments: tuple[Segment, ...]
) -> tuple[list[tuple[str, int, int]], float]:
    """The timeline (phase, step, bytes) and the FLOPs done again."""
    tape = Tape(costs, segments)
    timeline = [(o.phase, o.step, m) for o, m in zip(tape.operations, tape.replay(), strict=True)]
    return timeline, sum(o.flops for o in tape.operations if o.phase == "recompute")


@cache
def one_level_plans(start: int, stop: int) -> tuple[tuple[Segment, ...], ...]:
    """Every plan of `[start, stop)` in which each step is plain or in one segment."""
    if start == stop:
        return ((),)
    plans = list(one_level_plans(start + 1, stop))
    for end in range(start + 1, stop + 1):
        plans += [(Segment(start, end), *rest) for rest in one_level_plans(end, stop)]
    return tuple(plans)


def nested_plans(start: int, stop: int) -> tuple[tuple[Segment, ...], ...]:
    """Every plan of `[start, stop)`, nested to any depth."""
    proper = _proper_plans(start, stop)
    if start == stop:
        return proper
    return (*proper, *((Segment(start, stop, inner),) for inner in proper))


@cache
def _proper_plans(start: int, stop: int) -> tuple[tuple[Segment, ...], ...]:
    """Those without a segment that spans all of `[start, stop)`."""
    if start == stop:
        return ((),)
    plans = list(nested_plans(start + 1, stop))
    for end in range(start + 1, stop):
        for inner in _proper_plans(start, end):
            plans += [(Segment(start, end, inner), *rest) for rest in nested_plans(end, stop)]
    return tuple(plans)
