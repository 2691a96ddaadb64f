"""The command line: one line and exit code 2 for what cannot be served, a valid document otherwise."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from gkv_jax.generate import main

ROOT = Path(__file__).parent.parent.parent


def fails(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """The one line that a refused command prints."""
    monkeypatch.setattr(sys, "argv", ["generate", *arguments])
    assert main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "no-such-model"], "known names: smollm2-135m-instruct"),
        (["--schema", "no-such-file.json"], "--schema no-such-file.json: No such file"),
        (["--regex", "(", "--json"], "--json, --regex exclude each other"),
        (["--temperature", "-1"], "sampling.temperature is -1.0"),
        (["--temperature", "nan"], "sampling.temperature is nan"),
        (["--top-p", "2"], "sampling.top_p is 2.0"),
        (["--max-tokens", "0"], "sampling.max_tokens is 0"),
        (["--window", "0"], "cache.window is 0"),
        (["--kept", "5", "--full"], "--full and --kept exclude each other"),
        (["--regex", ""], "regex"),
        (["--temperature", "hot"], "'--temperature'"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_bad_options_are_one_line(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in fails(["--prompt", "Hi", *arguments], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{not json", "--schema "),
        ("[1, 2]", "--schema "),
        ('{"type": "no-such-type"}', "schema"),
        ('{"type": "string", "minLength": 3, "maxLength": 1}', "schema"),
    ],
)
@pytest.mark.model
def test_bad_schema_files_are_one_line(
    content: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(content)
    line = fails(["--prompt", "Hi", "--schema", str(path)], monkeypatch, capsys)
    assert line.startswith(f"error: {said}")
    assert ".cc" not in line


@pytest.mark.model
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", ""], "empty"),
        (["--prompt", "", "--raw"], "empty"),
        (["--prompt", "Hi", "--regex", "(unclosed"], "regex"),
        (["--prompt", "word " * 300, "--full", "--window", "100"], "the cache holds 104"),
    ],
)
def test_bad_prompts_and_guides_are_one_line(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in fails(arguments, monkeypatch, capsys)


@pytest.mark.model
def test_the_demo_writes_a_valid_document() -> None:
    """The command that ``make demo`` runs, as a user runs it."""
    schema = ROOT / "examples" / "person.json"
    command = [sys.executable, "-m", "gkv_jax.generate", "--schema", str(schema)]
    command += [
        "--sinks",
        "4",
        "--window",
        "252",
        "--prompt",
        "Describe a person from Lisbon as JSON.",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    jsonschema.validate(json.loads(done.stdout), json.loads(schema.read_text()))
    assert done.stderr.startswith("[stop]")
    assert "llguidance: compiled in" in done.stderr
