"""Runs the steps of a linearised model, recomputing its segments.

A segment is called with the tensors that it reads from before it, which are thereby its
checkpoints, and returns the tensors that are read after it. Whatever else is alive across it is
not its concern: nothing is carried through, and nothing is recomputed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_ckpt.graph import LinearModel
from keras_ckpt.recompute import run_recomputed
from keras_ckpt.segment import Segment, walk


@dataclass(frozen=True)
class Execution:
    """How one call of a model is run.

    Attributes:
        model: the linearised model.
        segments: the segments to recompute.
        context: call-context arguments for every layer, such as `training`.
    """

    model: LinearModel
    segments: Sequence[Segment]
    context: dict[str, Any]

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs the whole model on its flat, standardised inputs; returns its flat outputs."""
        values = dict(zip(self.model.inputs, inputs, strict=True))
        self._run_items(self.segments, 0, len(self.model.steps), values)
        return [values[t] for t in self.model.outputs]

    def _run_items(
        self, segments: Sequence[Segment], start: int, stop: int, values: dict[int, Any]
    ) -> None:
        for item in walk(segments, start, stop):
            if isinstance(item, Segment):
                done = item.stop
                self._run_segment(item, values)
            else:
                done = item + 1
                self.model.steps[item].run(values, self.context)
            for t in [t for t in values if self.model.last_use(t) < done]:
                del values[t]

    def _run_segment(self, segment: Segment, values: dict[int, Any]) -> None:
        model, start, stop = self.model, segment.start, segment.stop
        reads, escapes = model.reads(start, stop), model.escapes(start, stop)

        def steps_of_segment(*tensors: Any) -> list[Any]:
            inner = dict(zip(reads, tensors, strict=True))
            self._run_items(segment.segments, start, stop, inner)
            return [inner[t] for t in escapes]

        results = run_recomputed(
            steps_of_segment,
            tuple(values[t] for t in reads),
            {},
            lambda: model.layers(start, stop),
        )
        values.update(zip(escapes, results, strict=True))
