"""Every Python block of the README and of the documentation runs as it stands.

The blocks of one page run in order and share their names, as a reader would paste them. A block
marked ```` ```python {test="skip"} ```` is left out.
"""

from pathlib import Path

import pytest
from pytest_examples import EvalExample, find_examples

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(ROOT.glob("docs/**/*.md")) if "```py" in page.read_text("utf-8")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(
    page: Path, eval_example: EvalExample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # blocks may write files
    names = {}
    for block in find_examples(page):
        if block.prefix_settings().get("test") != "skip":
            names |= eval_example.run(block, module_globals=names)
    assert names, f"{page} holds no Python block that runs"
