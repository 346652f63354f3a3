"""What the documents say runs, their links lead somewhere, and the benchmarks find their place in the README."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
WITH_CODE = (
    "README.md",
    "docs/data.md",
    "docs/fidelity.md",
    "docs/fusing.md",
    "docs/interleaved.md",
    "docs/jax.md",
    "docs/keras.md",
    "docs/kernels.md",
    "docs/memory.md",
    "docs/own-loop.md",
    "docs/process-memory.md",
    "docs/results.md",
    "docs/tensorflow-graphs.md",
    "docs/workers.md",
)
XLA = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION")
MARKERS = ("<!-- benchmarks:start -->", "<!-- benchmarks:end -->")


def python_blocks(document: Path) -> list[tuple[int, str]]:
    """The Python blocks of a document, each with the line it starts at."""
    text = document.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)) + 1, block.group(1)) for block in found]


def test_the_documents_that_should_show_code_do():
    shown = {str(document.relative_to(ROOT)) for document in DOCUMENTS if python_blocks(document)}
    assert shown == set(WITH_CODE)


@pytest.mark.parametrize("document", WITH_CODE)
def test_the_code_runs(document: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The blocks of a document one after another, as its reader would run them."""
    monkeypatch.chdir(tmp_path)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TF_FORCE_GPU_ALLOW_GROWTH", *XLA):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # what a document sets is taken back
    known = {"__name__": "__main__"}
    for line, code in python_blocks(ROOT / document):
        padded = "\n" * (line - 1) + code  # a traceback names the document's own line
        exec(compile(padded, str(ROOT / document), "exec"), known)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        led = (document.parent / path) if path else document
        assert led.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in anchors(led), f"{document.name} links to {target}"


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"(?:`|^)(?:PYTHON=\S+ )?make ([a-z-]+)", document.read_text(), re.MULTILINE))
        assert named <= targets, f"{document.name} names {sorted(named - targets)}"


def test_the_benchmarks_have_their_place():
    text = (ROOT / "README.md").read_text()
    assert [text.count(marker) for marker in MARKERS] == [1, 1]
    assert text.index(MARKERS[0]) < text.index(MARKERS[1])
