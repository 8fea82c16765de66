"""Pictures of measured memory: over the time of one train step, and of several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_ckpt.memory.report import Report, require_timeline
from keras_ckpt.memory.timeline import Row, Span, spans_of
from keras_ckpt.sizes import format_bytes

# Told apart by people who do not see all colours, and in grey.
_COLOURS = {
    "forward": "#9ecae1",
    "recompute": "#fdae6b",
    "backward": "#a1d99b",
    "update": "#bcbddc",
}
_CURVES = ("#1f4e79", "#c1571a", "#2d7d46", "#6a4c93", "#8c6d1f", "#b03a5b")
_MIB = 2**20


def plot_report(report: Report, path: str | Path) -> None:
    """Draws the memory in use over the course of one train step.

    Args:
        report: the report, with a timeline.
        path: the picture's file.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the report has no timeline.
    """
    require_timeline(report)
    figure = _figure(10, 5)
    axes = figure.subplots()
    resting = report.resting_bytes / _MIB
    _shade(axes, spans_of(report.timeline))
    times, sizes = _curve(report.timeline, resting)
    axes.fill_between(times, resting, sizes, step="post", color=_CURVES[0], alpha=0.25, lw=0)
    axes.step(times, sizes, where="post", color=_CURVES[0], lw=1.5, label="in use")
    axes.axhline(resting, color="0.35", lw=1.2, ls=":", label=f"resting: {resting:.1f} MiB")
    _mark_peak(axes, report)
    predicted = report.predicted_peak_bytes
    if predicted:
        label = f"predicted peak: {predicted / _MIB:.1f} MiB above resting"
        axes.axhline(resting + predicted / _MIB, color="#b03a5b", lw=1.2, ls="--", label=label)
    axes.set_title(
        f"Memory of one train step: {report.model}"
        + (f", batch size {report.batch_size}" if report.batch_size else "")
        + f" ({report.mode} mode, {report.device})",
        loc="left",
        pad=12,
    )
    _finish(axes, times, max(*sizes, resting + (predicted or 0) / _MIB))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=8, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def plot_comparison(reports: Mapping[str, Report], path: str | Path) -> None:
    """Draws several reports side by side: their peaks as bars, their timelines as curves.

    Args:
        reports: the reports by name.
        path: the picture's file.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    curves = {name: report for name, report in reports.items() if report.timeline}
    figure = _figure(12, 5) if curves else _figure(6, 5)
    bars, *rest = figure.subplots(1, 1 + bool(curves), squeeze=False)[0]
    _draw_bars(bars, reports)
    for axes in rest:
        longest: list[float] = []
        for i, (name, report) in enumerate(reports.items()):
            times, sizes = _curve(report.timeline, report.resting_bytes / _MIB)
            axes.step(times, sizes, where="post", color=_colour(i), lw=1.5, label=name)
            longest = max(longest, times, key=lambda times: times[-1] if times else 0.0)
        axes.set_title("Over one train step", loc="left")
        _finish(axes, longest, max(_total(report) for report in reports.values()))
        axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _draw_bars(axes: Any, reports: Mapping[str, Report]) -> None:
    """Stacked bars: resting memory below, the peak above it."""
    first = next(iter(reports.values()))
    for i, report in enumerate(reports.values()):
        resting, peak = report.resting_bytes / _MIB, report.peak_bytes / _MIB
        axes.bar(i, resting, color="0.75", width=0.6, label=None if i else "resting")
        axes.bar(i, peak, bottom=resting, color=_colour(i), width=0.6)
        share = "" if report is first else f"\n{report.peak_bytes / first.peak_bytes:.0%}"
        axes.text(i, resting + peak, f"{format_bytes(report.peak_bytes)}{share}", **_ABOVE_BAR)
    axes.set_xticks(range(len(reports)), reports.keys())
    axes.set_ylim(0, 1.2 * max(_total(report) for report in reports.values()))
    axes.set_ylabel("MiB")
    axes.set_title("Peak above resting memory", loc="left")
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    _remove_frame(axes)


_ABOVE_BAR = {"ha": "center", "va": "bottom", "fontsize": 9}


def _figure(width: float, height: float) -> Any:
    """A figure that can be saved, without pyplot, whose state is the user's."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib. Install it with `pip install keras-ckpt[plot]`."
        ) from error
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def _curve(rows: Sequence[Row], resting: float) -> tuple[list[float], list[float]]:
    """Milliseconds, and MiB in use from then on."""
    times = [0.0, *(row.seconds * 1e3 for row in rows)]
    return times, [resting, *(resting + row.bytes / _MIB for row in rows)]


def _shade(axes: Any, spans: Sequence[Span]) -> None:
    """Colours the background by phase, and numbers the segments that are recomputed."""
    labelled: set[str] = set()
    end = spans[-1].stop if spans else 0.0
    for span in spans:
        label = None if span.phase in labelled else span.phase
        labelled.add(span.phase)
        start, stop = span.start * 1e3, span.stop * 1e3
        colour = _COLOURS[span.phase]
        axes.axvspan(start, stop, color=colour, alpha=0.45, lw=0, label=label)
        if span.segment is not None and span.stop - span.start > 0.02 * end:
            axes.text(
                (start + stop) / 2,
                1.005,
                f"segment {span.segment}" if stop - start > 80 * end else f"{span.segment}",
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=8,
                color="#a04f10",
            )


def _mark_peak(axes: Any, report: Report) -> None:
    peak = max(report.timeline, key=lambda row: row.bytes)
    x, y = peak.seconds * 1e3, (report.resting_bytes + peak.bytes) / _MIB
    axes.plot([x], [y], "o", color="#7a0019", ms=6, zorder=5)
    is_late = peak.seconds > 0.6 * report.timeline[-1].seconds
    axes.annotate(
        f"peak: {format_bytes(peak.bytes)} above resting"
        + (f"\n{peak.step}, {peak.phase}" if peak.step else ""),
        (x, y),
        xytext=(-10 if is_late else 10, 8),
        textcoords="offset points",
        ha="right" if is_late else "left",
        va="bottom",
        fontsize=9,
        color="#7a0019",
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )


def _finish(axes: Any, times: Sequence[float], top: float) -> None:
    axes.set_xlim(0, times[-1] or 1.0)
    axes.set_ylim(0, 1.2 * top)
    axes.set_xlabel("time in the train step (ms)")
    axes.set_ylabel("memory in use (MiB)")
    _remove_frame(axes)


def _remove_frame(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _total(report: Report) -> float:
    return (report.resting_bytes + report.peak_bytes) / _MIB


def _colour(number: int) -> str:
    return _CURVES[number % len(_CURVES)]
