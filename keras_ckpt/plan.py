"""Plans: the segments chosen for one model, and what they are predicted to cost.

A plan is data. It names the model's steps, so that a plan that was made for another model is
refused with the first difference, and it is stored as JSON, which runs no code when loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from keras_ckpt.segment import Segment, check_segments
from keras_ckpt.sizes import format_bytes
from keras_ckpt.tables import render

_FORMAT = "keras_ckpt plan, version 1"


@dataclass(frozen=True)
class Checkpoint:
    """A tensor that a plan keeps from the forward pass until its backward use.

    Attributes:
        name: the step that makes it, or `input`.
        bytes: its size at the plan's batch size.
        segment: the index of the first of the plan's segments that reads it.
    """

    name: str
    bytes: int
    segment: int


@dataclass(frozen=True)
class Plan:
    """The nested segments chosen for one model.

    Attributes:
        model: the model's name.
        checkpoints: the setting that the plan was made from, in words.
        steps: the names of the model's steps, in execution order.
        segments: the segments to recompute, outermost first, in order.
        kept: the tensors kept for them.
        batch_size: the batch size that the figures hold for.
        predicted_peak_bytes: the predicted activation peak, in bytes above resting memory; None
            where the plan was made without costs.
        resting_bytes: predicted weights and optimizer slots, in bytes, likewise.
        predicted_overhead: recomputed FLOPs / FLOPs of the plain train step, likewise.
        notes: what a reader should know, such as assumptions that were made.

    Raises:
        ValueError: if the segments overlap or lie outside the steps.
    """

    model: str
    checkpoints: str
    steps: tuple[str, ...]
    segments: tuple[Segment, ...]
    kept: tuple[Checkpoint, ...] = ()
    batch_size: int | None = None
    predicted_peak_bytes: int | None = None
    resting_bytes: int | None = None
    predicted_overhead: float | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_segments(self.segments, 0, len(self.steps))

    def check(self, steps: Sequence[str], model: str) -> None:
        """Checks that the plan is one for a model with these steps.

        Keras numbers the layers that have no name through the process, so that the same model gets
        other numbers when it is made again: numbers at the end of a name are not compared.

        Raises:
            ValueError: naming the first step that differs.
        """
        for i, (planned, actual) in enumerate(zip(self.steps, steps, strict=False)):
            if unnumbered(planned) != unnumbered(actual):
                raise ValueError(
                    f"The plan was made for another model than '{model}': its step {i} is "
                    f"'{planned}', the model's is '{actual}'. Make a new plan with "
                    "`keras_ckpt.make_plan(model)`."
                )
        if len(self.steps) != len(steps):
            raise ValueError(
                f"The plan has {len(self.steps)} steps, model '{model}' has {len(steps)}; they are "
                f"the same up to step {min(len(self.steps), len(steps)) - 1}. Make a new plan with "
                "`keras_ckpt.make_plan(model)`."
            )

    def summary(self, print_fn: Callable[[str], Any] = print) -> None:
        """Prints a table of the segments: first and last step, what each keeps, and bytes.

        Args:
            print_fn: takes the text instead of `print`. `str(plan)` is the same text.

        Example:

        >>> Plan("mlp", "sqrt", ("a", "b", "c"), (Segment(0, 2),)).summary()
        Plan for model 'mlp', checkpoints sqrt: 2 of 3 steps recomputed in 1 segment
        ...
        """
        print_fn(str(self))

    def __str__(self) -> str:
        table = Table(show_header=True)
        for heading in ("segment", "first step", "last step"):
            table.add_column(heading)
        table.add_column("steps", justify="right")
        table.add_column("keeps")
        table.add_column("kept", justify="right")
        for label, segment in _labelled(self.segments):
            kept = [x for x in self.kept if str(x.segment) == label]
            table.add_row(
                label,
                self.steps[segment.start],
                self.steps[segment.stop - 1],
                str(segment.stop - segment.start),
                ", ".join(x.name for x in kept),
                format_bytes(sum(x.bytes for x in kept)) if kept else "",
            )
        self._add_tail(table)
        lines = [self._headline(), render(table), *self._figures(), *self.notes]
        return "\n".join(line for line in lines if line)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON.

        Args:
            path: the file; an existing one is replaced.
        """
        text = json.dumps({"format": _FORMAT, **self.to_dict()}, indent=1)
        temporary = Path(f"{path}.tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan that `save` wrote.

        Raises:
            ValueError: if the file holds something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data.pop("format", None) != _FORMAT:
                raise KeyError("format")
            return cls.from_dict(data)
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError, UnicodeError) as e:
            raise ValueError(
                f"'{path}' does not hold a plan that this version of keras_ckpt wrote. Make one "
                "with `keras_ckpt.make_plan(model).save(path)`."
            ) from e

    def to_dict(self) -> dict[str, Any]:
        """The plan as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The plan that `to_dict` described."""
        return cls(
            **{
                **data,
                "steps": tuple(data["steps"]),
                "segments": _segments_from(data["segments"]),
                "kept": tuple(Checkpoint(**x) for x in data["kept"]),
                "notes": tuple(data["notes"]),
            }
        )

    def _headline(self) -> str:
        recomputed = sum(segment.stop - segment.start for segment in self.segments)
        count = f"{len(self.segments)} segment" + ("s" if len(self.segments) != 1 else "")
        text = f"Plan for model '{self.model}', checkpoints {self.checkpoints}"
        if not self.segments:
            return f"{text}: nothing is recomputed, as in plain Keras"
        return f"{text}: {recomputed} of {len(self.steps)} steps recomputed in {count}"

    def _add_tail(self, table: Table) -> None:
        start = self.segments[-1].stop if self.segments else 0
        if start < len(self.steps):
            count = str(len(self.steps) - start)
            table.add_row("plain", self.steps[start], self.steps[-1], count, "all it needs", "")

    def _figures(self) -> Iterator[str]:
        if self.predicted_peak_bytes is not None:
            yield (
                f"Predicted peak at batch size {self.batch_size}: "
                f"{format_bytes(self.predicted_peak_bytes)} above resting memory"
                + (f" ({format_bytes(self.resting_bytes)})" if self.resting_bytes else "")
            )
        if self.predicted_overhead is not None:
            yield f"Predicted overhead: {self.predicted_overhead:.1%} more FLOPs per train step"


def unnumbered(name: str) -> str:
    """A step's name without the numbers that Keras gives to layers that have no name."""
    return re.sub(r"_\d+(?=[/#]|$)", "", name)


def _segments_from(data: Sequence[dict[str, Any]]) -> tuple[Segment, ...]:
    return tuple(Segment(x["start"], x["stop"], _segments_from(x["segments"])) for x in data)


def _labelled(segments: Sequence[Segment], prefix: str = "") -> Iterator[tuple[str, Segment]]:
    for i, segment in enumerate(segments):
        yield f"{prefix}{i}", segment
        yield from _labelled(segment.segments, f"{prefix}{i}.")
