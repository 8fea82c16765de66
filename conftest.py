"""Sets the environment of every test, and collects the code blocks of the documentation.

Tests of planners and plans import no TensorFlow, so nothing here may import it either.
"""

import contextlib
import os
import tempfile
from typing import Any

# Before anything can import TensorFlow. The first line chooses the allocator that GPUs use: with
# it, peak memory can be read on a CPU too.
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Two test processes share the cores. Threads between operations stay as they are: that
# operations run at the same time is part of what the tests look at.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser


def _enter_folder_of_its_own(names: dict[str, Any]) -> None:
    names["leave_folder"] = leave_folder = contextlib.ExitStack()
    leave_folder.enter_context(
        contextlib.chdir(leave_folder.enter_context(tempfile.TemporaryDirectory()))
    )


# Every Python block of README.md and docs/ runs as it stands. The blocks of one page run in order
# and share their names, as if a reader pasted them one after the other.
pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/**/*.md", "docs/*.md"],
    setup=_enter_folder_of_its_own,
    teardown=lambda names: names["leave_folder"].close(),
).pytest()
