"""What docs/tensorflow.md shows of modules runs."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[3] / "docs" / "tensorflow.md"


def test_the_code_of_the_document_runs():
    blocks = re.findall(r"^```py\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    namespace = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, str(DOCUMENT), "exec"), namespace)
