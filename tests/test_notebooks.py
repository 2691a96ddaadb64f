"""Notebooks run from top to bottom, and are kept without outputs."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import nbformat
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def run(notebook: Any) -> Any:
    """Execute in place, in a kernel of its own. Raises CellExecutionError where a cell does."""
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    return client.execute()


def printed(notebook: Any, containing: str) -> str:
    """What the one code cell with ``containing`` in its source printed."""
    (cell,) = [c for c in notebook.cells if c.cell_type == "code" and containing in c.source]
    streams = [o for o in cell.outputs if o.output_type == "stream" and o.name == "stdout"]
    return "".join(stream.text for stream in streams)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_clean(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert not cell.metadata
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            assert not re.search(r"\bgit\+|git clone", cell.source)


@pytest.mark.model
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")  # those of the kernel's client are not ours
def test_runs(path: Path) -> None:
    notebook = run(read(path))
    check = CHECKS.get(path.stem)
    assert check is not None, f"add a check of what {path.name} shows"
    check(notebook)


def check_quickstart(notebook: Any) -> None:
    """Every claim of the page, in its own outputs."""
    (source,) = [c.source for c in notebook.cells if "schema = {" in c.source]
    names: dict[str, Any] = {}
    exec(source.split("def ask")[0], names)
    reason, _, person = printed(notebook, "schema = {").partition("\n")
    assert reason == "stop"
    jsonschema.validate(json.loads(person), names["schema"])

    date, mood = printed(notebook, "Guide.regex").split()
    assert re.fullmatch(r"(19|20)\d\d-\d\d-\d\d", date)
    assert mood in ("positive", "neutral", "negative")
    assert printed(notebook, "engine.stream").strip()

    sailor = printed(notebook, "free, guided =")
    jsonschema.validate(json.loads(sailor[sailor.index("{") :]), names["schema"])

    before, after = re.findall(r"[\d,]{6,}", printed(notebook, "cache_bytes"))
    assert before == after
    assert "backend llguidance" in printed(notebook, "tokens_per_second")


CHECKS = {"quickstart": check_quickstart}
