"""Notebooks run from top to bottom, begin alike, and are kept without outputs."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import nbformat
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EVERY = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

IMAGE = "https://colab.research.google.com/assets/colab-badge.svg"
COLAB = "https://colab.research.google.com/github/gkv-jax/gkv_jax/blob/main/notebooks/"
EXTRAS = {"bench", "flax", "serve"}
COLAB_METADATA = {"provenance", "gpuType", "toc_visible"}


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


# How they are kept ------------------------------------------------------------------------------


def faults(notebook: Any, name: str) -> list[str]:
    """What is wrong with a notebook as a file; nothing, it is hoped."""
    found = list(_outputs(notebook)) + list(_metadata(notebook)) + list(_beginning(notebook, name))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            found += _installs(cell.source)
    return found


def _outputs(notebook: Any) -> Any:
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.outputs:
            yield "stale outputs"
        if cell.cell_type == "code" and cell.execution_count is not None:
            yield "an execution count"


def _metadata(notebook: Any) -> Any:
    unknown = set(notebook.metadata) - {"kernelspec", "language_info", "accelerator", "colab"}
    if unknown:
        yield f"metadata {sorted(unknown)}"
    if notebook.metadata.get("accelerator", "GPU") not in ("GPU", "TPU"):
        yield "an accelerator that Colab does not know"
    if not set(notebook.metadata.get("colab", {})) <= COLAB_METADATA:
        yield "metadata of Colab that is no choice of a runtime"
    if any(cell.metadata for cell in notebook.cells):
        yield "metadata of a cell"


def _beginning(notebook: Any, name: str) -> Any:
    """Badge and title, then the install cell, then the cell that names the backend."""
    first, install, backend = notebook.cells[:3]
    badge = f"[![Open in Colab]({IMAGE})]({COLAB}{name}.ipynb)"
    lines = first.source.splitlines()
    if first.cell_type != "markdown" or IMAGE not in lines[0]:
        yield "no badge"
    elif lines[0] != badge:
        yield "a badge that leads elsewhere"
    if len(lines) < 3 or not lines[2].startswith("# "):
        yield "no title"
    if not re.search(r"^if importlib\.util\.find_spec\(.gkv_jax.\) is None:", install.source, re.M):
        yield "no guarded install cell"
    if len(re.findall(r"^ +%pip install -q ", install.source, re.M)) != 1:
        yield "not one line that installs"
    if not re.search(r"^from gkv_jax\.notebook import .*\bcheck_backend$", backend.source, re.M):
        yield "no backend cell"
    if not re.search(r"^check_backend\(\)$", backend.source, re.M):
        yield "a backend that is not checked"


def _installs(source: str) -> Any:
    if re.search(r"\bgit\+|git clone", source):
        yield "an install from git"
    for line in source.splitlines():
        if re.match(r"\s*[%!]\s*(uv\s+)?pip\b", line):
            if re.search(r"\s(-U|--upgrade|--pre|--force-reinstall)\b", line):
                yield "an upgrade"
            if re.search(r"\bjax(lib)?\b(?!\.)", line.replace("gkv_jax", "")):
                yield "an install of jax"


@EVERY
def test_kept_clean(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert faults(notebook, path.stem) == []


def spoil(change: Callable[[Any], None]) -> list[str]:
    notebook = read(FOLDER / "quickstart.ipynb")
    change(notebook)
    return faults(notebook, "quickstart")


def _set(cell: int, old: str, new: str) -> Callable[[Any], None]:
    def change(notebook: Any) -> None:
        assert old in notebook.cells[cell].source
        notebook.cells[cell].source = notebook.cells[cell].source.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (_set(0, IMAGE, "x.svg"), "no badge"),
        (_set(0, "blob/main", "blob/dev"), "a badge that leads elsewhere"),
        (_set(0, "quickstart.ipynb", "other.ipynb"), "a badge that leads elsewhere"),
        (_set(0, "# ", ""), "no title"),
        (_set(1, "if importlib.util.find_spec", "if find"), "no guarded install cell"),
        (_set(1, "%pip", "# %pip"), "not one line that installs"),
        (_set(1, "-q", "-q --upgrade"), "an upgrade"),
        (_set(1, "-q", '-q "jax[cuda12]"'), "an install of jax"),
        (_set(1, "-q", "-q git+https://example.org/x"), "an install from git"),
        (_set(2, "check_backend()", "pass"), "a backend that is not checked"),
        (_set(2, "gkv_jax.notebook", "elsewhere"), "no backend cell"),
        (lambda nb: nb.cells[2].update(execution_count=3), "an execution count"),
        (
            lambda nb: nb.cells[2].outputs.append(nbformat.v4.new_output("stream", text="x")),
            "stale outputs",
        ),
        (lambda nb: nb.cells[2].metadata.update(tags=["x"]), "metadata of a cell"),
        (lambda nb: nb.metadata.update(accelerator="NPU"), "an accelerator that Colab does not know"),
        (lambda nb: nb.metadata.update(widgets={}), "metadata ['widgets']"),
    ],
)  # fmt: skip
def test_the_lint_finds(change: Callable[[Any], None], fault: str) -> None:
    assert fault in spoil(change)


def test_a_runtime_may_be_chosen() -> None:
    def choose(notebook: Any) -> None:
        notebook.metadata.update(accelerator="GPU", colab={"gpuType": "T4"})

    assert spoil(choose) == []


@EVERY
@pytest.mark.parametrize("checkout", [True, False], ids=["checkout", "alone"])
def test_installs_what_is_there(
    path: Path, checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The install cell, in an IPython whose pip only listens, where gkv_jax is not installed."""
    import importlib.util

    from IPython.core.interactiveshell import InteractiveShell

    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    if checkout:
        (tmp_path / "pyproject.toml").touch()
    lines: list[str] = []
    shell = InteractiveShell()
    shell.register_magic_function(lines.append, magic_name="pip")
    source = read(path).cells[1].source
    assert shell.run_cell(source).success
    assert lines == []  # as gkv_jax is installed
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert shell.run_cell(source).success
    (line,) = lines
    found = re.fullmatch(r'install -q "(\.\.|gkv_jax)\[([a-z,]+)\]"', line)
    assert found
    assert found[1] == (".." if checkout else "gkv_jax")
    assert set(found[2].split(",")) <= EXTRAS


# What they show ---------------------------------------------------------------------------------


def run(notebook: Any, *, tiny: bool) -> Any:
    """Execute in place, in a kernel of its own. Raises CellExecutionError where a cell does."""
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    environment = os.environ | {"GKV_TINY": "1" if tiny else "0"}
    if tiny:  # compiling is most of their time
        environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    return client.execute(env=environment)


def printed(notebook: Any, containing: str) -> str:
    """What the one code cell with ``containing`` in its source printed."""
    streams = [o for o in outputs(notebook, containing) if o.output_type == "stream"]
    return "".join(stream.text for stream in streams if stream.name == "stdout")


def pictures(notebook: Any, containing: str) -> int:
    """How many pictures it shows."""
    return sum("image/png" in o.get("data", {}) for o in outputs(notebook, containing))


def outputs(notebook: Any, containing: str) -> Any:
    (cell,) = [c for c in notebook.cells if c.cell_type == "code" and containing in c.source]
    return cell.outputs


def numbers(text: str) -> list[float]:
    """All numbers in a text, without the commas of thousands."""
    return [
        float(number)
        for number in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", text.replace(",", ""))
    ]


@EVERY
@pytest.mark.filterwarnings("default")  # those of the kernel's client are not ours
def test_runs(path: Path) -> None:
    """With a random model of two layers and small sizes."""
    notebook = run(read(path), tiny=True)
    CHECKS[path.stem](notebook, tiny=True)


@pytest.mark.model
@pytest.mark.full
@EVERY
@pytest.mark.filterwarnings("default")
def test_runs_with_the_real_model(path: Path) -> None:
    notebook = run(read(path), tiny=False)
    CHECKS[path.stem](notebook, tiny=False)


def check_quickstart(notebook: Any, *, tiny: bool) -> None:
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

    sailor = printed(notebook, "free, guided =").rstrip("\n")
    sailor = sailor[sailor.rindex("\n{") :] if "\n{" in sailor else sailor
    jsonschema.validate(json.loads(sailor), names["schema"])

    sizes = printed(notebook, "long.stats['prompt_tokens']")
    prompt, tokens, places, after, before = numbers(sizes.replace("four", ""))
    assert prompt + tokens > places == 256
    assert 0 < before == after
    assert "backend llguidance" in printed(notebook, "tokens_per_second")


def check_guided_json_and_tools(notebook: Any, *, tiny: bool) -> None:
    lines = printed(notebook, "for kind, batch in").splitlines()
    verdicts = {line.split()[0]: [] for line in lines if line.startswith(("free", "guided"))}
    for line in lines[:-1]:
        verdicts[line.split()[0]].append(line.split(maxsplit=2)[2])
    assert verdicts["guided"] == ["valid"] * 2
    assert len(verdicts["free"]) == 2
    if tiny:  # nonsense
        assert all(verdict.startswith("no JSON") for verdict in verdicts["free"])
    assert set(json.loads(lines[-1])) == {"dish", "serves", "ingredients"}

    document, counts, _ = printed(notebook, "trace=True").splitlines()
    assert set(json.loads(document)) == {"dish", "serves", "ingredients"}
    tokens, alone = numbers(counts)
    assert 0 < alone < tokens
    assert pictures(notebook, "axes.bar(range(len(shown))") == 1
    loose, compact = numbers(printed(notebook, "loose, compact"))
    assert compact <= loose

    gate = printed(notebook, "with_a_six = ")
    assert gate.startswith("exact: True")
    assert "exact: False" in gate
    assert "/contains" in gate
    for line in printed(notebook, "for roll in rolls:").splitlines():
        reason, _, text = line.partition(" ")
        if reason == "stop":
            assert 6 in json.loads(text)
        else:
            assert reason == "error"
            assert "'contains'" in text
    exact, thrown = printed(notebook, "exact_rolls =").splitlines()
    assert exact == "exact: True"
    assert all(6 in json.loads(text) for text in thrown.split())
    assert len(thrown.split()) == 8

    assert printed(notebook, "nonsense =").splitlines()[:2] == [
        "invalid_json_schema",
        "/properties/age/minimum",
    ]
    date, fish, total = printed(notebook, "Guide.lark").splitlines()
    assert re.fullmatch(r"19\d\d-\d\d-\d\d", date)
    assert fish in ("yes", "no")
    assert re.fullmatch(r"(\d+\+){2}\d+=\d+", total)

    assert re.search(r"<tool_call>\s*\{", printed(notebook, "parse_tool_calls"))
    assert re.match(r"(weather|time_in) returned \{", printed(notebook, "talk += ["))


def check_bounded_cache(notebook: Any, *, tiny: bool) -> None:
    story = printed(notebook, "spec = CacheSpec(sinks=4, window=60)")
    tokens, evicted, before, after = numbers(story[story.rindex("\n\n") :])
    assert before == after
    assert tokens - evicted in (63, 64)
    for containing in ("def cache_bytes", "plot_kept(story", "plot_kept(found", "votes ="):
        assert pictures(notebook, containing) == 1, containing

    tables = "".join(
        o.get("data", {}).get("text/markdown", "") for o in outputs(notebook, "table.markdown()")
    )
    _, _, table = tables.partition("**perplexity of")
    lines = [
        line for line in table.partition("**perplexity through")[0].splitlines() if line[:1] == "|"
    ]
    perplexity = {}
    for line in lines[2:]:  # after the names of the columns: the cache, tokens, all
        cells = [cell.strip() for cell in line.split("|")]
        perplexity[cells[1].split()[0]] = float(cells[3])
    full, window = perplexity["full"], perplexity["window"]
    assert 1 < full != window > 1
    if tiny:  # which solves no task, and the page says so
        assert "is left out" in printed(notebook, "table.markdown()")
        assert pictures(notebook, "plot_grids(quality") == 1
    else:
        assert full < window < 1.3 * full
        assert perplexity["sliding"] > 1.3 * window
        assert "right answers" in tables
        assert pictures(notebook, "plot_grids(quality") == 2


def check_write_a_cache_policy(notebook: Any, *, tiny: bool) -> None:
    assert "the best two: 4" in printed(notebook, "six = Evidence(")
    rows = {
        line.split()[0]: numbers(line.partition("attention held")[2])
        for line in printed(notebook, "rows[policy.name] =").splitlines()
    }
    assert set(rows) == {"oldest", "snapkv", "loud_values", "loud_neighbours"}
    assert all(0 < held < 100 and kl > 0 for held, kl, _ in rows.values())
    if not tiny:
        assert all(rows[name][0] > rows["oldest"][0] for name in rows if name != "oldest")
    assert pictures(notebook, "barh") == 1
    story = printed(notebook, "decode=LOUD_VALUES")
    assert "head kept 28" in story
    kept = numbers(story.splitlines()[-1])
    assert len(kept) == 28 == len(set(kept))
    assert pictures(notebook, "decode=LOUD_VALUES") == 1


def check_kernels_tour(notebook: Any, *, tiny: bool) -> None:
    assert printed(notebook, "by_kernel =").split() == (
        ["XLA", "is", "right:", "True", "kernel", "is", "right:", "True"]
    )
    xla, kernel, legal = printed(notebook, "sample_tpu.masked_sample").splitlines()
    assert xla.split()[1:] == kernel.split()[1:]
    assert "False" not in legal
    assert numbers(printed(notebook, "draws = 4000"))[-1] < 0.03
    shares = numbers(printed(notebook, "def read(count"))[1::2]
    assert shares == sorted(shares)
    assert shares[0] < 10 < shares[-1] == 100

    tokens, rows = printed(notebook, "poisoned = head.copy()").splitlines()
    ours, right = (part.split()[-4:] for part in tokens.split("|"))
    assert ours == right
    assert numbers(rows)[0] == 512
    assert numbers(printed(notebook, 'largest difference:", float(jnp'))[0] < 1e-4
    reads = printed(notebook, "poisoned_k[0")
    assert "40 tokens: 1 of 2 blocks" in reads
    assert "nothing changed: True" in reads
    assert sum(pictures(notebook, each) for each in ("def traffic", "draws = 4000", "imshow")) == 3


def check_flax_training_eval(notebook: Any, *, tiny: bool) -> None:
    lines = printed(notebook, "evaluations[step] = guided(").splitlines()
    figures = [
        numbers(line) for line in lines
    ]  # step, valid free and guided, exact free and guided
    assert [figure[0] for figure in figures] == ([0, 3, 6] if tiny else list(range(0, 401, 50)))
    assert all(figure[2] == 100 for figure in figures)  # guided is always valid
    assert figures[0][1] == 0  # free: nonsense, at first
    assert figures[0][4] == 0
    if not tiny:
        assert figures[-1][1] > 80
        assert figures[-1][4] > figures[0][4] + 30
    assert pictures(notebook, "panels[0]") == 1
    answers = re.findall("^(guided|free): ", printed(notebook, "last = "), re.M)
    assert answers == ["guided"] * 3 + ["free"] * 3


CHECKS = {
    "bounded_cache": check_bounded_cache,
    "flax_training_eval": check_flax_training_eval,
    "guided_json_and_tools": check_guided_json_and_tools,
    "kernels_tour": check_kernels_tour,
    "quickstart": check_quickstart,
    "write_a_cache_policy": check_write_a_cache_policy,
}


def test_every_notebook_has_its_check() -> None:
    assert sorted(CHECKS) == [path.stem for path in NOTEBOOKS]
