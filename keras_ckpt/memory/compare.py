"""Several profiles in one table and one plot: what a plan saves, and what it costs in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from keras_ckpt.memory.report import Report
from keras_ckpt.sizes import format_bytes
from keras_ckpt.tables import render


class Comparison:
    """Profiles by name; the first one is what the others are compared with.

    Attributes:
        reports: the profiles, by name.
    """

    def __init__(self, reports: Mapping[str, Report]) -> None:
        self.reports = dict(reports)

    def summary(self, print_fn: Callable[[str], Any] = print) -> None:
        """Prints the table.

        Args:
            print_fn: takes the text instead of `print`. `str(comparison)` is the same text.
        """
        print_fn(str(self))

    def plot(self, path: str | Path) -> None:
        """Draws the peaks as bars and, where they were recorded, the timelines as curves.

        Args:
            path: the picture's file; its ending (png, svg, pdf) tells the format.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        from keras_ckpt.memory.plots import plot_comparison

        plot_comparison(self.reports, path)

    def __str__(self) -> str:
        table = Table(show_header=True)
        table.add_column("profile")
        for heading in ("peak", "of first", "predicted", "resting", "time per step", "of first"):
            table.add_column(heading, justify="right")
        first = next(iter(self.reports.values()))
        for name, report in self.reports.items():
            predicted = report.predicted_peak_bytes
            table.add_row(
                name,
                format_bytes(report.peak_bytes),
                f"{report.peak_bytes / first.peak_bytes:.0%}",
                "" if predicted is None else format_bytes(predicted),
                format_bytes(report.resting_bytes),
                f"{report.step_seconds * 1e3:.1f} ms",
                f"{report.step_seconds / first.step_seconds:.2f}x",
            )
        lines = [render(table), "Peaks are above resting memory.", *self._differences()]
        return "\n".join(lines)

    def _differences(self) -> list[str]:
        """What makes the profiles hard to compare."""
        lines = []
        for what in ("batch_size", "mode", "device"):
            values = {name: getattr(report, what) for name, report in self.reports.items()}
            if len(set(values.values())) > 1:
                found = ", ".join(f"{name}: {value}" for name, value in values.items())
                lines.append(f"Not the same {what.replace('_', ' ')}: {found}.")
        return lines


def compare(reports: Mapping[str, Report]) -> Comparison:
    """Puts several profiles into one table and one plot.

    Args:
        reports: what `profile` returned, by a name for each. The others are compared with the
            first one.

    Returns:
        the comparison; printed, it is the table.

    Raises:
        ValueError: if there are no reports.
        TypeError: if something else than reports is given.

    Example:

    >>> report = Report("mlp", "CPU:0", "graph", 32, 3, 2**20, 2**10, 0.01, (2**20,) * 3)
    >>> print(compare({"plain": report, "again": report}))
    ┏━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━━━━━┳━━━━━━━━━━┓
    ┃ profile ┃    peak ┃ of first ┃ predicted ┃ resting ┃ time per step ┃ of first ┃
    ┡━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━━━━━╇━━━━━━━━━━┩
    │ plain   │ 1.0 MiB │     100% │           │ 1.0 KiB │       10.0 ms │    1.00x │
    │ again   │ 1.0 MiB │     100% │           │ 1.0 KiB │       10.0 ms │    1.00x │
    └─────────┴─────────┴──────────┴───────────┴─────────┴───────────────┴──────────┘
    Peaks are above resting memory.
    """
    if not reports:
        raise ValueError(
            "There is nothing to compare. Give reports by name: "
            '`compare({"plain": profile(plain), "memory": profile(checkpointed)})`.'
        )
    for name, report in reports.items():
        if not isinstance(report, Report):
            raise TypeError(
                f"`compare` takes reports that `profile` returned; '{name}' is {report!r}."
            )
    return Comparison(reports)
