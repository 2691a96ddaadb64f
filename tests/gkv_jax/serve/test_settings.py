"""The command line and its configuration file."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gkv_jax import CacheSpec, UserError
from gkv_jax.serve import process
from gkv_jax.serve.__main__ import main
from gkv_jax.serve.process import public_name
from gkv_jax.serve.settings import Limits, Settings, load_settings

ROOT = Path(__file__).parents[3]
DEFAULT = ROOT / "configs" / "serve" / "default.toml"


@pytest.fixture
def config(tmp_path: Path) -> Any:
    path = tmp_path / "server.toml"

    def write(text: str) -> Path:
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_default_file_holds_the_defaults() -> None:
    assert load_settings(DEFAULT, {}) == Settings("smollm2-135m-instruct")


def test_flags_override_the_file(config: Any) -> None:
    path = config(
        'model = "a"\nport = 1\n[cache]\nsinks = 2\nwindow = 30\n[limits]\nbody_bytes = 9'
    )
    settings = load_settings(path, {"port": 2, "slots": None, "cache": {"window": 40}})
    assert settings == Settings(
        "a", port=2, cache=CacheSpec(sinks=2, window=40, max_drafts=7), limits=Limits(body_bytes=9)
    )


def test_kept_tokens_mean_snapkv() -> None:
    cache = load_settings(DEFAULT, {"cache": {"kept": 16}}).cache
    assert (cache.policy, cache.kept) == ("snapkv", 16)


@pytest.mark.parametrize(
    ("cache", "flag", "expected"),
    [
        ("", None, 7),
        ("max_drafts = 3", None, 3),
        ("max_drafts = 3", 0, 0),
        ('policy = "h2o"\nkept = 8\ninterval = 4', None, 3),
        ('policy = "tova"\nkept = 8', None, 0),
    ],
)
def test_room_for_drafts_is_what_is_said_or_what_the_policy_can_take_back(
    config: Any, cache: str, flag: int | None, expected: int
) -> None:
    path = config(f'model = "a"\n[cache]\n{cache}')
    assert load_settings(path, {"cache": {"max_drafts": flag}}).cache.max_drafts == expected


def test_draft_and_verify_reach_the_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}

    def from_pretrained(name: str, **options: Any) -> Any:
        given.update(options, model=name)
        raise UserError("far enough")

    monkeypatch.setattr(process.Engine, "from_pretrained", from_pretrained)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    arguments = ["--model", "a", "--port", "0", "--max-drafts", "5"]
    assert main([*arguments, "--draft", "b", "--verify", "always"]) == 2
    assert "far enough" in capsys.readouterr().err
    assert (given["model"], given["draft"], given["verify"]) == ("a", "b", "always")
    assert given["cache"].max_drafts == 5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("port = 1", "no model"),
        ('model = "a"\nprot = 1', "unknown key 'prot'"),
        ('model = "a"\n[cache]\nsink = 1', "unknown key 'cache.sink'"),
        ('model = "a"\n[cache]\nmax_drafts = -1', "cache.max_drafts is -1"),
        ('model = "a"\n[limits]\nbody = 1', "unknown key 'limits.body'"),
        ('model = "a"\ncache = 5', "write it as a table"),
        ('model = "a"\n[cache]\nwindow = 0', "cache.window"),
        ('model = "a"\n[limits]\nprompt_tokens = 0', "limits.prompt_tokens"),
        ('model = "a"\n[limits]\ncompletion_tokens = 1', "limits.default_completion_tokens"),
        ('model = "a"\nport = 70000', "port is 70000"),
        ('model = "a"\nslots = true', "slots is True"),
        ('model = "a"\nloop = "fast"', "loop is 'fast'"),
        ('model = "a"\nverify = "never"', "verify is 'never'"),
        ('model = "a"\ndraft = ""', "draft is ''"),
        ('model = "a"\ndraft = false', "draft is False"),
        ("model = 5", "model is 5"),
        ("model = ", "not valid TOML"),
    ],
)
def test_bad_file(config: Any, text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load_settings(config(text), {})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--model"),
        (["--modle", "a"], "--modle"),
        (["--model", "a", "--port", "x"], "--port"),
        (["--model", "a", "--loop", "fast"], "--loop"),
        (["--model", "a", "--slots", "0"], "slots is 0"),
        (["--model", "a", "--window", "-1"], "cache.window is -1"),
        (["--model", "a", "--max-drafts", "-1"], "cache.max_drafts is -1"),
        (["--model", "a", "--verify", "never"], "--verify"),
        (["--config", "nowhere.toml"], "nowhere.toml cannot be read"),
        (["--model", "a", "--host", "256.0.0.1"], "256.0.0.1"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert complaint in line


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # Noticed before the model is looked for: there is none of that name.
        assert main(["--model", "no-such-model", "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"port {port}" in line
    assert "--port" in line


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    flags = [
        "model", "host", "port", "slots", "sinks", "window", "kept",
        "max-drafts", "draft", "verify", "loop", "config",
    ]  # fmt: skip
    for flag in flags:
        assert f"--{flag} " in text


def test_clients_see_no_path(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert public_name(str(file)) == "model"
    assert public_name(str(tmp_path)) == tmp_path.name
    assert public_name("organisation/name") == "organisation/name"


def test_unknown_model_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gkv_jax.serve", "--model", "no-such-model", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "no-such-model" in line
    assert "smollm2-135m-instruct" in line


def test_importing_the_library_leaves_the_server_out() -> None:
    code = (
        "import gkv_jax, sys; "
        "assert not {'fastapi', 'uvicorn', 'pydantic', 'sse_starlette', 'prometheus_client', "
        "'gkv_jax.serve'} & sys.modules.keys()"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)
