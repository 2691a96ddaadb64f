"""What the server is told at its start: a TOML file, and the flags that override it."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from gkv_jax.cache import CacheSpec
from gkv_jax.drafts.widths import Verify
from gkv_jax.engine import Loop, Quantization
from gkv_jax.errors import UserError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much one request may ask for.

    Attributes:
      body_bytes: largest request body; larger ones get HTTP 413.
      prompt_tokens: longest prompt, chat template included.
      completion_tokens: largest ``max_completion_tokens``.
      default_completion_tokens: ``max_completion_tokens`` of a request that does not say.

    Raises:
      UserError: a value that is no integer >= 1, naming the field.
    """

    body_bytes: int = 4 * 2**20
    prompt_tokens: int = 32768
    completion_tokens: int = 32768
    default_completion_tokens: int = 1024

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_integer(f"limits.{field.name}", getattr(self, field.name), 1, 2**31 - 1)
        if self.default_completion_tokens > self.completion_tokens:
            raise UserError(
                f"limits.default_completion_tokens is {self.default_completion_tokens}; it must be "
                f"at most limits.completion_tokens, {self.completion_tokens}"
            )


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that ``python -m gkv_jax.serve`` can be told.

    Attributes:
      model: registry name, folder, GGUF file or Hugging Face id.
      host: address to listen on.
      port: TCP port; 0 takes a free one.
      slots: requests decoded at once; more of them queue.
      loop: which driver runs the decode steps, as in ``Engine``.
      quantize: how weights are rounded when they are loaded, as in ``Engine.from_pretrained``.
      draft: the draft model, named as ``model`` is; None for none.
      verify: when drafts are verified, as in ``Engine``.
      cache: size and policy of the cache of each slot.
      limits: how much one request may ask for.

    Raises:
      UserError: a value that cannot be served, naming the field.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    slots: int = 8
    loop: Loop = "device"
    quantize: Quantization | None = None
    draft: str | None = None
    verify: Verify = "faster"
    cache: CacheSpec = dataclasses.field(default_factory=lambda: CacheSpec().with_drafts())
    limits: Limits = dataclasses.field(default_factory=Limits)

    def __post_init__(self) -> None:
        names = ["model", "host"] if self.draft is None else ["model", "host", "draft"]
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise UserError(f"{name} is {value!r}; it must be a non-empty string")
        _check_integer("port", self.port, 0, 65535)
        _check_integer("slots", self.slots, 1, 4096)
        if self.loop not in get_args(Loop):
            raise UserError(f"loop is {self.loop!r}; choose from {get_args(Loop)}")
        if self.quantize not in (None, *get_args(Quantization)):
            raise UserError(
                f"quantize is {self.quantize!r}; choose from {get_args(Quantization)}, or leave it out"
            )
        if self.verify not in get_args(Verify):
            raise UserError(f"verify is {self.verify!r}; choose from {get_args(Verify)}")


def load_settings(config: Path | None, flags: Mapping[str, Any]) -> Settings:
    """Settings from a TOML file and from flags, which win.

    Args:
      config: a file with the fields of ``Settings``, ``[cache]`` and ``[limits]`` as tables.
      flags: the same fields; ``cache`` is a mapping, and values of None were not given.

    Raises:
      UserError: an unreadable file, an unknown key, or a value that cannot be served.
    """
    values = _read(config) if config else {}
    cache = {**values.pop("cache", {}), **_given(flags.get("cache", {}))}
    values |= _given({name: value for name, value in flags.items() if name != "cache"})
    if "model" not in values:
        raise UserError("no model; name one with --model or as 'model' in the --config file")
    # Whoever asks for kept tokens asks for the policy that selects them.
    cache.setdefault("policy", "snapkv" if cache.get("kept") else "window")
    spec = CacheSpec(**cache)
    return Settings(**values, cache=spec if "max_drafts" in cache else spec.with_drafts())


def _read(path: Path) -> dict[str, Any]:
    """The file's values by field, ``cache`` as a dict of known keys, ``limits`` built."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # invalid TOML or UTF-8
        raise UserError(f"config {path} is not valid TOML: {error}") from error
    _check_keys(path, "", values, [field.name for field in dataclasses.fields(Settings)])
    for name, kind in {"cache": CacheSpec, "limits": Limits}.items():
        table = values.get(name, {})
        if not isinstance(table, dict):
            raise UserError(f"config {path}: {name} is {table!r}; write it as a table [{name}]")
        _check_keys(path, f"{name}.", table, [field.name for field in dataclasses.fields(kind)])
    if "limits" in values:
        values["limits"] = Limits(**values["limits"])
    return values


def _check_keys(path: Path, prefix: str, table: Mapping[str, Any], known: Any) -> None:
    for key in table:
        if key not in known:
            raise UserError(
                f"config {path}: unknown key {prefix + key!r}; known: {', '.join(known)}"
            )


def _given(flags: Mapping[str, T | None]) -> dict[str, T]:
    return {name: value for name, value in flags.items() if value is not None}


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{name} is {value!r}; it must be an integer from {low} to {high}")
