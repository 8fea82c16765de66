"""The demo, at a size that takes seconds: it runs, proves its claim and leaves its results."""

import re
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "demo_resnet.py"


def run_demo(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    small = ("--depth", "20", "--epochs", "1", "--images", "100", "--batch-size", "16")
    command = [sys.executable, str(DEMO), *small, "--output", str(output), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_saves_memory_and_writes_its_results(tmp_path: Path) -> None:
    done = run_demo(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "recomputed in" in (tmp_path / "plan.txt").read_text(encoding="utf-8")
    table = (tmp_path / "table.txt").read_text(encoding="utf-8")
    plain, checkpointed = map(float, re.findall(r"([\d.]+) MiB", table))
    assert checkpointed < 0.9 * plain
    assert "loss, epoch 1" in table
    assert "Largest difference" in table or "equal to the last bit" in table


def test_refuses_a_depth_that_is_none(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--depth", "21")
    assert done.returncode == 2
    assert "6n + 2" in done.stderr
