"""What a profile found: peak, resting memory, step time, and who holds the memory at the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from keras_ckpt.memory.naming import Phase
from keras_ckpt.memory.timeline import Row, held_at_peak
from keras_ckpt.plan import Plan
from keras_ckpt.sizes import format_bytes
from keras_ckpt.tables import render

# What memory that belongs to no step is for, by phase.
_OUTSIDE = {"forward": "(loss and metrics)", "update": "(optimizer)", "backward": "(gradients)"}
# A peak below this share of the whole memory is not worth checkpointing.
_LITTLE = 0.2


@dataclass(frozen=True)
class Holder:
    """A step that holds memory when most of it is in use.

    Attributes:
        step: the step's name; "(loss and metrics)", "(gradients)" or "(optimizer)" for what belongs
            to none. The gradients of eager mode do not tell their steps.
        phase: when the memory was handed out: "forward", "recompute", "backward" or "update".
        segment: the index of the plan's segment that the step is in; None outside of segments.
        bytes: how much it holds.
        blocks: in how many blocks.
        operations: the operations that they were for, the largest first.
    """

    step: str
    phase: Phase
    segment: int | None
    bytes: int
    blocks: int
    operations: tuple[str, ...]


class Holders(tuple[Holder, ...]):
    """The largest holders, as data; as text, a table."""

    __slots__ = ()

    def __str__(self) -> str:
        table = Table(show_header=True)
        for heading in ("step", "phase", "segment"):
            table.add_column(heading)
        table.add_column("holds", justify="right")
        table.add_column("blocks", justify="right")
        table.add_column("for")
        for holder in self:
            segment = "" if holder.segment is None else str(holder.segment)
            operations = ", ".join(holder.operations[:3])
            size, blocks = format_bytes(holder.bytes), str(holder.blocks)
            table.add_row(holder.step, holder.phase, segment, size, blocks, operations)
        return render(table)


@dataclass(frozen=True)
class Report:
    """What `profile` found.

    Attributes:
        model: the model's name.
        device: where it trained, such as "GPU:0".
        mode: "graph", "xla" or "eager".
        batch_size: examples in the batch; None if the data does not tell.
        steps: how many train steps were measured.
        peak_bytes: the most memory in use during a train step, above resting memory: the median
            of the steps.
        resting_bytes: in use before a train step: weights, optimizer slots, data, and whatever
            else the process holds on the device.
        step_seconds: the median time of a train step. Recording the timeline takes part of it.
        step_peaks: the peak of each step, in bytes above resting memory.
        timeline: memory over the course of the step that `peak_bytes` is from, a `Row` for each
            block handed out or taken back. Empty if it was not recorded.
        plan: the model's plan; None for a plain model.
        notes: what a reader should know.
    """

    model: str
    device: str
    mode: str
    batch_size: int | None
    steps: int
    peak_bytes: int
    resting_bytes: int
    step_seconds: float
    step_peaks: tuple[int, ...]
    timeline: tuple[Row, ...] = ()
    plan: Plan | None = None
    notes: tuple[str, ...] = ()

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The plan's prediction, in bytes above resting memory. It does not hold in eager mode."""
        return self.plan.predicted_peak_bytes if self.plan and self.mode != "eager" else None

    def largest(self, n: int = 10) -> Holders:
        """Who holds the memory when most of it is in use.

        An operation may write its result into a block that it was given; the block then counts
        for the operation that it was handed out for.

        Args:
            n: how many holders to list.

        Returns:
            the largest, first; printed, they are a table. Empty where no operations are known.
        """
        if self.mode == "xla":
            return Holders()
        blocks: dict[tuple[str, Phase, int | None], list[Row]] = defaultdict(list)
        for row in held_at_peak(self.timeline):
            step = row.step or _OUTSIDE.get(row.phase, "(other)")
            blocks[step, row.phase, row.segment].append(row)
        holders = [_holder(*key, rows) for key, rows in blocks.items()]
        return Holders(sorted(holders, key=lambda holder: -holder.bytes)[:n])

    def plot(self, path: str | Path) -> None:
        """Draws memory over time, with phases, resting memory, the peak and the predicted peak.

        Args:
            path: the picture's file; its ending (png, svg, pdf) tells the format.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: if the timeline was not recorded.
        """
        from keras_ckpt.memory.plots import plot_report

        plot_report(self, path)

    def save_trace(self, path: str | Path) -> None:
        """Writes the timeline for Perfetto (ui.perfetto.dev) and chrome://tracing.

        Args:
            path: the JSON file; an existing one is replaced.

        Raises:
            ValueError: if the timeline was not recorded.
        """
        from keras_ckpt.memory.trace import write_trace

        write_trace(self, path)

    def summary(self, print_fn: Callable[[str], Any] = print) -> None:
        """Prints the figures, and who holds the memory at the peak.

        Args:
            print_fn: takes the text instead of `print`. `str(report)` is the same text.
        """
        print_fn(str(self))

    def __str__(self) -> str:
        batch = "" if self.batch_size is None else f", batch size {self.batch_size}"
        predicted = self.predicted_peak_bytes
        lines = [
            f"Profile of model '{self.model}'{batch}, {self.mode} mode on {self.device}",
            f"Peak: {format_bytes(self.peak_bytes)} above resting memory "
            f"({format_bytes(self.resting_bytes)})"
            + (f"; predicted {format_bytes(predicted)}" if predicted else ""),
            f"Time: {self.step_seconds * 1e3:.1f} ms per train step (median of {self.steps})",
            *self.notes,
        ]
        holders = self.largest()
        if holders:
            lines += ["Who holds the memory at the peak:", str(holders)]
        return "\n".join(lines)


def require_timeline(report: Report) -> None:
    """Checks that a report has a timeline.

    Raises:
        ValueError: if it has none.
    """
    if not report.timeline:
        raise ValueError(
            f"The profile of model '{report.model}' has no timeline. Record one with "
            "`profile(..., timeline=True)`."
        )


def notes_on(mode: str, peak: int, resting: int, timeline: bool) -> tuple[str, ...]:
    """What a reader of these figures should know."""
    notes = []
    if mode == "xla" and timeline:
        notes.append(
            "XLA compiles the train step as a whole: memory is not told apart by step or phase."
        )
    if peak < _LITTLE * (peak + resting):
        notes.append(
            "Most of the memory is weights, optimizer slots and data, which checkpointing leaves "
            "as they are: there is little to gain."
        )
    return tuple(notes)


def _holder(step: str, phase: Phase, segment: int | None, rows: list[Row]) -> Holder:
    rows = sorted(rows, key=lambda row: -row.change)
    operations = tuple(dict.fromkeys(row.operation for row in rows if row.operation))
    return Holder(step, phase, segment, sum(row.change for row in rows), len(rows), operations)
