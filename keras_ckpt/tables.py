"""Tables as text."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

_WIDTH = 110


def render(table: Table) -> str:
    """A rich table as plain text, the same on every terminal and in every log."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_terminal=False)
    console.print(table)
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]
