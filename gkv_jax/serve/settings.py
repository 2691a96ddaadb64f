"""What the server is told at its start: a TOML file, and the flags that override it."""

import dataclasses
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from gkv_jax.cache import CacheSpec
from gkv_jax.drafts.widths import Verify
from gkv_jax.engine import Loop, Quantization
from gkv_jax.errors import UserError
from grammar_host import Guide, GuideError
from grammar_host.call_forms import CallFormName

T = TypeVar("T")

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

ToolFormat = Literal["auto", CallFormName]
"""How calls of tools are written; ``auto`` is as the chat template writes them."""

AUTO, OFF = "auto", "off"
"""Settings of ``chat.reasoning`` that are no tags."""

USUAL_TAGS = "<think> </think>"

SHORTEST_KEY = 16
"""Characters of the shortest API key that is taken."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names by which programs of the same machine know it."""

_SLOTS = 1, 4096

_ORIGIN = re.compile(r"https?://[^/\s@?#]+")
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much one request may ask for, and how much of the server one client may hold.

    Attributes:
      body_bytes: largest request body; larger ones get HTTP 413.
      header_bytes: largest request line with headers; larger ones get HTTP 400.
      schema_bytes: largest JSON Schema, grammar or expression of a guide.
      prompt_tokens: longest prompt, chat template included.
      completion_tokens: largest ``max_completion_tokens``.
      default_completion_tokens: ``max_completion_tokens`` of a request that does not say.
      choices: largest ``n``; ``load_settings`` makes it as many as there are slots.
      answers: prompts times ``n``; fewer if not so many may run and wait.
      request_seconds: how long a request may wait for a slot and run, in total.
      body_seconds: how long headers may take to arrive, and then the body.
      connections: open connections; more get HTTP 503.

    Raises:
      UserError: a value that is no integer >= 1, naming the field.
    """

    body_bytes: int = 4 * 2**20
    header_bytes: int = 16 * 2**10
    schema_bytes: int = 2**20
    prompt_tokens: int = 32768
    completion_tokens: int = 32768
    default_completion_tokens: int = 1024
    choices: int = 8
    answers: int = 64
    request_seconds: int = 600
    body_seconds: int = 30
    connections: int = 512

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_integer(f"limits.{field.name}", getattr(self, field.name), 1, 2**31 - 1)
        if self.default_completion_tokens > self.completion_tokens:
            raise UserError(
                f"limits.default_completion_tokens is {self.default_completion_tokens}; it must be "
                f"at most limits.completion_tokens, {self.completion_tokens}"
            )


@dataclasses.dataclass(frozen=True)
class Chat:
    """How chats are read and told.

    Attributes:
      reasoning: what is told apart from the answer: ``auto``, the text between ``<think>`` and ``</think>``
        if the chat template mentions one of them; ``off``, nothing; or the two tags, with a blank between
        them.
      template_kwargs: variables for the chat template, where a request does not set them.
      tool_format: how the model writes calls of tools; ``auto`` is as its chat template writes them.

    Raises:
      UserError: values of the wrong type. What the template reads is known when it is there.
    """

    reasoning: str = AUTO
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tool_format: ToolFormat = "auto"

    def __post_init__(self) -> None:
        if self.tool_format not in get_args(ToolFormat):
            raise UserError(
                f"chat.tool_format is {self.tool_format!r}; choose from {get_args(ToolFormat)}"
            )
        _check_text("chat.reasoning", self.reasoning)
        if self.reasoning not in (AUTO, OFF):
            read_tags(self.reasoning)
        if not isinstance(self.template_kwargs, dict):
            raise UserError(f"chat.template_kwargs is {self.template_kwargs!r}; write a table")


@dataclasses.dataclass(frozen=True)
class Queue:
    """Requests that wait for a slot.

    Attributes:
      size: how many may wait; more get HTTP 429. With 0 none waits.

    Raises:
      UserError: no integer >= 0.
    """

    size: int = 256

    def __post_init__(self) -> None:
        _check_integer("queue.size", self.size, 0, 2**20)


@dataclasses.dataclass(frozen=True)
class Auth:
    """Where the API keys are. The keys themselves are in no setting, so that none is ever shown.

    Attributes:
      keys_file: a file with one key per line; empty lines and lines with # are skipped. None for none.
      keys_env: name of an environment variable with keys, separated by commas.
      metrics_open: whether ``/metrics`` is open to those who have no key.

    Raises:
      UserError: a value of the wrong type, naming the field.
    """

    keys_file: str | None = None
    keys_env: str = "GKV_API_KEYS"
    metrics_open: bool = False

    def __post_init__(self) -> None:
        if self.keys_file is not None:
            _check_text("auth.keys_file", self.keys_file)
        _check_text("auth.keys_env", self.keys_env)
        if not isinstance(self.metrics_open, bool):
            raise UserError(f"auth.metrics_open is {self.metrics_open!r}; write true or false")

    def read_keys(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        """The keys of file and environment; none if neither is there, and the server is open.

        Raises:
          UserError: an unreadable file, a source that is there but has no key, or a weak key; the
            message names its place and not the key.
        """
        keys: list[str] = []
        if self.keys_file is not None:
            keys += _keys(f"auth.keys_file {self.keys_file}", _read_text(self.keys_file))
        if self.keys_env in environment:
            keys += _keys(f"environment variable {self.keys_env}", environment[self.keys_env])
        return tuple(dict.fromkeys(keys))


@dataclasses.dataclass(frozen=True)
class Cors:
    """Pages of which other origins may use the server from a browser.

    Attributes:
      origins: such as ``https://example.org``; ``*`` is every page, and none by default.

    Raises:
      UserError: something that is no list of origins.
    """

    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.origins, list | tuple):
            raise UserError(f"cors.origins is {self.origins!r}; write a list of origins")
        for origin in self.origins:
            if not isinstance(origin, str) or (origin != "*" and not _ORIGIN.fullmatch(origin)):
                raise UserError(
                    f"cors.origins has {origin!r}; an origin is https://HOST or http://HOST:PORT "
                    "without a path, or '*' for every page"
                )
        object.__setattr__(self, "origins", tuple(self.origins))  # TOML has lists only


@dataclasses.dataclass(frozen=True)
class Log:
    """What is written to stderr.

    Attributes:
      format: ``text`` for people, ``json`` for programs: one object per line.
      level: the least that is written. At ``info`` each request but probes is a line.

    Raises:
      UserError: an unknown format or level.
    """

    format: LogFormat = "text"
    level: LogLevel = "info"

    def __post_init__(self) -> None:
        for name, kind in (("format", LogFormat), ("level", LogLevel)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise UserError(f"log.{name} is {value!r}; choose from {get_args(kind)}")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that ``python -m gkv_jax.serve`` can be told.

    Attributes:
      model: registry name, folder, GGUF file or Hugging Face id.
      model_name: what clients call the model; if None, its registry name or hub id, or the last part
        of its path.
      host: address to listen on.
      port: TCP port; 0 takes a free one.
      hosts: names by which clients may address the server, as they are in the header ``Host`` but without
        a port; ``*`` is any. If empty: any, but only ``LOOPBACK`` on such an address without keys.
      slots: requests decoded at once; more of them queue.
      loop: which driver runs the decode steps, as in ``Engine``.
      quantize: how weights are rounded when they are loaded, as in ``Engine.from_pretrained``.
      draft: the draft model, named as ``model`` is; None for none.
      verify: when drafts are verified, as in ``Engine``.
      compilation_cache: folder of JAX's compilation cache, which makes later starts faster; if None,
        ``xla`` in gkv_jax's own cache folder, and none if empty.
      drain_seconds: how long running requests may go on after the server was told to end.
      cache: size and policy of the cache of each slot.
      chat: how chats are read and told.
      limits: how much one request may ask for.
      queue: requests that wait for a slot.
      auth: where the API keys are.
      cors: pages that may use the server.
      log: what is written to stderr.

    Raises:
      UserError: a value that cannot be served, naming the field.
    """

    model: str
    model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    hosts: tuple[str, ...] = ()
    slots: int = 8
    loop: Loop = "device"
    quantize: Quantization | None = None
    draft: str | None = None
    verify: Verify = "faster"
    compilation_cache: str | None = None
    drain_seconds: int = 10
    cache: CacheSpec = dataclasses.field(default_factory=lambda: CacheSpec().with_drafts())
    chat: Chat = dataclasses.field(default_factory=Chat)
    limits: Limits = dataclasses.field(default_factory=Limits)
    queue: Queue = dataclasses.field(default_factory=Queue)
    auth: Auth = dataclasses.field(default_factory=Auth)
    cors: Cors = dataclasses.field(default_factory=Cors)
    log: Log = dataclasses.field(default_factory=Log)

    def __post_init__(self) -> None:
        for name in ("model", "host", "model_name", "draft"):
            value = getattr(self, name)
            if value is not None or name in ("model", "host"):
                _check_text(name, value)
        if not isinstance(self.compilation_cache, str | None):
            raise UserError(
                f"compilation_cache is {self.compilation_cache!r}; give a folder, or '' for none"
            )
        _check_integer("port", self.port, 0, 65535)
        _check_hosts(self.hosts)
        object.__setattr__(self, "hosts", tuple(self.hosts))  # TOML has lists only
        _check_integer("slots", self.slots, *_SLOTS)
        _check_integer("drain_seconds", self.drain_seconds, 0, 86400)
        if self.loop not in get_args(Loop):
            raise UserError(f"loop is {self.loop!r}; choose from {get_args(Loop)}")
        if self.quantize not in (None, *get_args(Quantization)):
            raise UserError(
                f"quantize is {self.quantize!r}; choose from {get_args(Quantization)}, or leave it out"
            )
        if self.verify not in get_args(Verify):
            raise UserError(f"verify is {self.verify!r}; choose from {get_args(Verify)}")


def read_tags(setting: str) -> tuple[str, str]:
    """Both tags that ``chat.reasoning`` names.

    Raises:
      UserError: they are not two, or no guide can be behind them.
    """
    tags = setting.split()
    if len(tags) != 2 or tags[0] == tags[1]:
        raise UserError(
            f"chat.reasoning is {setting!r}; write 'auto', 'off', or the two tags that the model writes, "
            f"as in {USUAL_TAGS!r}"
        )
    try:
        Guide.json().after_reasoning(tags[1], start=tags[0])
    except GuideError as error:
        raise UserError(
            f"chat.reasoning is {setting!r}: {error.param}: {error.reason}; name other tags"
        ) from error
    return tags[0], tags[1]


_TABLES: dict[str, Any] = {
    "cache": CacheSpec,
    "chat": Chat,
    "limits": Limits,
    "queue": Queue,
    "auth": Auth,
    "cors": Cors,
    "log": Log,
}


def load_settings(config: Path | None, flags: Mapping[str, Any]) -> Settings:
    """Settings from a TOML file and from flags, which win.

    Args:
      config: a file with the fields of ``Settings``; ``[cache]``, ``[limits]`` and so on are tables.
      flags: the same fields, the tables as mappings; values of None were not given.

    Raises:
      UserError: an unreadable file, an unknown key, or a value that cannot be served.
    """
    values = _read(config) if config else {}
    tables = {name: {**values.pop(name, {}), **_given(flags.get(name, {}))} for name in _TABLES}
    values |= _given({name: value for name, value in flags.items() if name not in _TABLES})
    if "model" not in values:
        raise UserError("no model; name one with --model or as 'model' in the --config file")
    cache = tables.pop("cache")
    # Whoever asks for kept tokens asks for the policy that selects them.
    cache.setdefault("policy", "snapkv" if cache.get("kept") else "window")
    spec = CacheSpec(**cache)
    if "slots" in values:
        _check_integer("slots", values["slots"], *_SLOTS)
        tables["limits"].setdefault("choices", values["slots"])
    built = {name: _TABLES[name](**table) for name, table in tables.items()}
    return Settings(**values, **built, cache=spec if "max_drafts" in cache else spec.with_drafts())


def _read(path: Path) -> dict[str, Any]:
    """The file's values by field, tables as dicts of known keys."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # invalid TOML or UTF-8
        raise UserError(f"config {path} is not valid TOML: {error}") from error
    _check_keys(path, "", values, [field.name for field in dataclasses.fields(Settings)])
    for name, kind in _TABLES.items():
        table = values.get(name, {})
        if not isinstance(table, dict):
            raise UserError(f"config {path}: {name} is {table!r}; write it as a table [{name}]")
        _check_keys(path, f"{name}.", table, [field.name for field in dataclasses.fields(kind)])
    return values


def _check_keys(path: Path, prefix: str, table: Mapping[str, Any], known: Any) -> None:
    for key in table:
        if key not in known:
            raise UserError(
                f"config {path}: unknown key {prefix + key!r}; known: {', '.join(known)}"
            )


def _given(flags: Mapping[str, T | None]) -> dict[str, T]:
    return {name: value for name, value in flags.items() if value is not None}


def _read_text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"auth.keys_file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"auth.keys_file {path} is not UTF-8 text; write a key per line") from error


def _keys(source: str, text: str) -> Iterator[str]:
    """The keys in a text, one per line or between commas."""
    count = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        for key in filter(None, map(str.strip, line.split(","))):
            # What a header can hold as one word.
            if len(key) < SHORTEST_KEY or not all("!" <= character <= "~" for character in key):
                raise UserError(
                    f"{source}, line {number}: a key has at least {SHORTEST_KEY} characters, all "
                    "printable ASCII without spaces; make one with `openssl rand -hex 32`"
                )
            count += 1
            yield key
    if count == 0:
        raise UserError(f"{source} has no key; write one, or leave the setting out")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise UserError(f"{name} is {value!r}; it must be a non-empty string")


def _check_hosts(hosts: object) -> None:
    if not isinstance(hosts, list | tuple):
        raise UserError(f"hosts is {hosts!r}; write a list of names")
    for host in hosts:
        if not isinstance(host, str) or (host != "*" and not _HOST.fullmatch(host)):
            raise UserError(
                f"hosts has {host!r}; write a name or an address without scheme, brackets and port, or "
                "'*' for any"
            )


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{name} is {value!r}; it must be an integer from {low} to {high}")
