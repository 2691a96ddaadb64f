"""The command line and its configuration file."""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gkv_jax import CacheSpec, UserError
from gkv_jax.serve import process
from gkv_jax.serve.__main__ import main
from gkv_jax.serve.process import public_name
from gkv_jax.serve.settings import Auth, Chat, Cors, Limits, Log, Queue, Settings, load_settings

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "configs" / "serve"
DEFAULT = EXAMPLES / "default.toml"
KEY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _leave_logging_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the process that runs the tests."""
    monkeypatch.setattr(process.logs, "configure", lambda _: None)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    path = tmp_path / "server.toml"

    def write(text: str) -> Path:
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_default_file_holds_the_defaults() -> None:
    assert load_settings(DEFAULT, {}) == Settings("smollm2-135m-instruct")


def test_default_file_names_every_key() -> None:
    text = DEFAULT.read_text(encoding="utf-8")
    tables = [Settings, CacheSpec, Chat, Limits, Queue, Auth, Cors, Log]
    for table in tables[:1] + tables[2:]:  # a cache's keys depend on its policy
        for field in dataclasses.fields(table):
            assert re.search(rf"^(# |\[)?{field.name}\b", text, re.MULTILINE), field.name


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_examples_load(path: Path) -> None:
    settings = load_settings(path, {})
    assert settings.limits.choices <= settings.slots
    assert settings.limits.prompt_tokens >= 1024


def test_long_context_selects_tokens_of_its_prompts() -> None:
    cache = load_settings(EXAMPLES / "long-context.toml", {}).cache
    assert cache.policy == "snapkv"
    assert cache.kept > 0


def test_kubernetes_waits_for_the_drain(config: Any) -> None:
    text = (ROOT / "configs" / "deploy" / "kubernetes.yaml").read_text(encoding="utf-8")
    kinds = {each["kind"]: each for each in yaml.safe_load_all(text)}
    settings = load_settings(config(kinds["ConfigMap"]["data"]["server.toml"]), {})
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    _, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    takes = int(seconds) + settings.drain_seconds + process.MARGIN_S
    assert pod["terminationGracePeriodSeconds"] > takes
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_systemd_waits_for_the_drain() -> None:
    text = (ROOT / "configs" / "deploy" / "gkv-serve.service").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(seconds) > Settings("m").drain_seconds + process.MARGIN_S


def test_flags_override_the_file(config: Any) -> None:
    path = config(
        'model = "a"\nport = 1\n[cache]\nsinks = 2\nwindow = 30\n[limits]\nbody_bytes = 9'
    )
    settings = load_settings(path, {"port": 2, "slots": None, "cache": {"window": 40}})
    assert settings == Settings(
        "a", port=2, cache=CacheSpec(sinks=2, window=40, max_drafts=7), limits=Limits(body_bytes=9)
    )


def test_every_table_reaches_its_field(config: Any) -> None:
    path = config(
        'model = "a"\nmodel_name = "b"\nhosts = ["a.org", "::1"]\ncompilation_cache = ""\ndrain_seconds = 0\n'
        "[limits]\nheader_bytes = 1\nschema_bytes = 2\nrequest_seconds = 3\nbody_seconds = 4\n"
        "connections = 5\nchoices = 6\nanswers = 7\n[queue]\nsize = 0\n"
        '[auth]\nkeys_file = "k"\nkeys_env = "K"\nmetrics_open = true\n'
        '[cors]\norigins = ["https://a.org", "http://b:81", "*"]\n[log]\nformat = "json"'
    )
    limits = Limits(
        header_bytes=1,
        schema_bytes=2,
        request_seconds=3,
        body_seconds=4,
        connections=5,
        choices=6,
        answers=7,
    )
    assert load_settings(path, {"log": {"level": "debug", "format": None}}) == Settings(
        "a",
        model_name="b",
        hosts=("a.org", "::1"),
        compilation_cache="",
        drain_seconds=0,
        limits=limits,
        queue=Queue(0),
        auth=Auth("k", "K", True),
        cors=Cors(("https://a.org", "http://b:81", "*")),
        log=Log("json", "debug"),
    )


@pytest.mark.parametrize(
    ("text", "flag", "expected"),
    [
        ("", None, 8),
        ("slots = 3", None, 3),
        ("slots = 3", 5, 5),
        ("slots = 3\n[limits]\nchoices = 9", 5, 9),
    ],
)
def test_a_request_may_have_as_many_choices_as_there_are_slots(
    config: Any, text: str, flag: int | None, expected: int
) -> None:
    settings = load_settings(config(f'model = "a"\n{text}'), {"slots": flag})
    assert settings.limits.choices == expected


def test_keys_come_from_file_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# Ann's\n{KEY}1\n\n  {KEY}2 \n", encoding="utf-8")
    environment = {"GKV_API_KEYS": f"{KEY}3, {KEY}1,", "OTHER": f"{KEY}4"}
    assert Auth(str(path)).read_keys(environment) == (KEY + "1", KEY + "2", KEY + "3")
    assert Auth(keys_env="OTHER").read_keys(environment) == (KEY + "4",)
    assert Auth().read_keys({}) == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no key"),
        ("\n# nothing\n", "has no key"),
        (f"{KEY}\n{KEY[:-1]}", "line 2: a key has at least 16"),
        (f"{KEY} {KEY}", "line 1: a key has at least 16"),
        (f"{KEY}é", "line 1: a key has at least 16"),
    ],
)
def test_bad_keys_are_errors_that_do_not_show_them(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    for auth, environment in [(Auth(str(path)), {}), (Auth(), {"GKV_API_KEYS": text})]:
        with pytest.raises(UserError, match=complaint) as raised:
            auth.read_keys(environment)
        assert KEY[:-1] not in str(raised.value)


def test_unreadable_keys_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, binary = tmp_path / "missing", tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path, complaint in [(missing, "cannot be read: No such file"), (binary, "not UTF-8")]:
        arguments = ["--model", "no-such-model", "--port", "0", "--keys-file", str(path)]
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: auth.keys_file {path}")
        assert complaint in line


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
    arguments = ["--model", "a", "--port", "0", "--max-drafts", "5", "--compilation-cache", ""]
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
        ('model = "a"\nhosts = "a.org"', "hosts is 'a.org'; write a list"),
        ('model = "a"\nhosts = ["http://a.org"]', "hosts has 'http://a.org'; write a name"),
        ('model = "a"\nhosts = ["a.org:80"]', "hosts has 'a.org:80'"),
        ('model = "a"\nhosts = ["[::1]"]', "without scheme, brackets and port"),
        ('model = "a"\nhosts = [""]', "hosts has ''"),
        ('model = "a"\nhosts = [1]', "hosts has 1"),
        ('model = "a"\n[limits]\nanswers = 0', "limits.answers is 0"),
        ('model = "a"\nslots = true', "slots is True"),
        ('model = "a"\nloop = "fast"', "loop is 'fast'"),
        ('model = "a"\nverify = "never"', "verify is 'never'"),
        ('model = "a"\ndraft = ""', "draft is ''"),
        ('model = "a"\ndraft = false', "draft is False"),
        ("model = 5", "model is 5"),
        ('model = "a"\nmodel_name = ""', "model_name is ''"),
        ('model = "a"\ncompilation_cache = 1', "compilation_cache is 1"),
        ('model = "a"\ndrain_seconds = -1', "drain_seconds is -1"),
        ('model = "a"\n[limits]\nbody_seconds = 0.5', "limits.body_seconds is 0.5"),
        ('model = "a"\n[limits]\nchoices = 0', "limits.choices is 0"),
        ('model = "a"\n[queue]\nsize = -1', "queue.size is -1"),
        ('model = "a"\n[queue]\nlength = 1', "unknown key 'queue.length'; known: size"),
        ('model = "a"\n[auth]\nkeys = ["k"]', "unknown key 'auth.keys'; known: keys_file"),
        ('model = "a"\n[auth]\nkeys_env = ""', "auth.keys_env is ''"),
        ('model = "a"\n[auth]\nmetrics_open = 1', "auth.metrics_open is 1"),
        ('model = "a"\n[cors]\norigins = "*"', "cors.origins is"),
        ('model = "a"\n[cors]\norigins = ["example.org"]', "cors.origins has 'example.org'"),
        ('model = "a"\n[cors]\norigins = ["http://a.org/"]', "cors.origins has 'http://a.org/'"),
        ('model = "a"\n[log]\nformat = "xml"', "log.format is 'xml'"),
        ('model = "a"\n[log]\nlevel = "INFO"', "log.level is 'INFO'"),
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
        (["--model", "a", "--log-format", "xml"], "--log-format"),
        (["--model", "a", "--drain-seconds", "-1"], "drain_seconds is -1"),
        (
            ["--model", "a", "--port", "0", "--compilation-cache", "/dev/null/x"],
            "compilation_cache",
        ),
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
        "max-drafts", "draft", "verify", "loop", "config", "model-name", "keys-file",
        "compilation-cache", "drain-seconds", "log-format", "log-level",
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
        "'pythonjsonlogger', "
        "'gkv_jax.serve'} & sys.modules.keys()"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)
