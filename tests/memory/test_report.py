import json
import sys

import matplotlib
import pytest

from keras_ckpt.memory import compare, profile
from tests.memory.models import checkpointed, plain


@pytest.fixture(scope="module")
def reports():
    return {
        "plain": profile(plain(), batch_size=1024),
        "4 segments": profile(checkpointed(), batch_size=1024),
    }


def test_the_text_tells_the_figures(reports):
    text = str(reports["4 segments"])
    assert "model 'checkpointed', batch size 1024, graph mode on CPU:0" in text
    assert "MiB above resting memory" in text
    assert "predicted" in text
    assert "Who holds the memory at the peak" in text
    lines = []
    reports["plain"].summary(lines.append)
    assert lines == [str(reports["plain"])]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_report_is_drawn(reports, tmp_path, ending):
    backend = matplotlib.get_backend()
    path = tmp_path / f"memory.{ending}"
    reports["4 segments"].plot(path)
    assert path.stat().st_size > 10_000
    assert matplotlib.get_backend() == backend
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )


def test_the_svg_names_what_it_shows(reports, tmp_path):
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        reports["4 segments"].plot(tmp_path / "memory.svg")
    text = (tmp_path / "memory.svg").read_text()
    for words in ("forward", "recompute", "backward", "resting:", "peak:", "predicted peak:"):
        assert words in text


def test_a_trace_opens_in_perfetto(reports, tmp_path):
    report = reports["4 segments"]
    report.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert all({"name", "ph", "ts", "pid", "tid"} <= event.keys() for event in events)
    counters = [event["args"]["train step"] for event in events if event["ph"] == "C"]
    assert max(counters) == report.peak_bytes
    slices = {event["name"] for event in events if event["ph"] == "X"}
    assert {"forward", "recompute", "backward"} <= slices
    # Segments whose operations mingle with their neighbours' may share one slice.
    named = {name for name in slices if name.startswith("segment")}
    assert named
    assert named <= {"segment 0", "segment 1", "segment 2"}
    begun = [event["id"] for event in events if event["ph"] == "b"]
    ended = [event["id"] for event in events if event["ph"] == "e"]
    assert sorted(begun) == sorted(ended)
    assert len(set(begun)) == len(begun)


def test_reports_are_compared(reports, tmp_path):
    comparison = compare(reports)
    share = reports["4 segments"].peak_bytes / reports["plain"].peak_bytes
    assert f"{share:.0%}" in str(comparison)
    assert "Not the same" not in str(comparison)
    comparison.plot(tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").stat().st_size > 10_000


def test_differences_that_matter_are_named(reports):
    small = profile(plain(), batch_size=256, timeline=False, steps=1)
    text = str(compare({"plain": reports["plain"], "small": small}))
    assert "Not the same batch size: plain: 1024, small: 256." in text


def test_reports_without_timelines_are_drawn_as_bars(tmp_path):
    report = profile(plain(), batch_size=256, timeline=False, steps=1)
    compare({"a": report, "b": report}).plot(tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 5_000
    with pytest.raises(ValueError, match="timeline=True"):
        report.plot(tmp_path / "none.png")
    with pytest.raises(ValueError, match="timeline=True"):
        report.save_trace(tmp_path / "none.json")


def test_bad_comparisons_are_refused():
    with pytest.raises(ValueError, match="nothing to compare"):
        compare({})
    with pytest.raises(TypeError, match="'plain' is 3"):
        compare({"plain": 3})


def test_without_matplotlib_it_says_what_to_install(reports, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install keras-ckpt\[plot\]"):
        reports["plain"].plot(tmp_path / "memory.png")
