"""MaskBench problems: JSON Schemas, each with instances that are valid and instances that are not."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gkv_jax.errors import UserError

WHERE_TO_GET = (
    "MaskBench is the folder maskbench/data of https://github.com/guidance-ai/jsonschemabench; "
    "name it with --data or $GKV_MASKBENCH"
)


@dataclass(frozen=True)
class Instance:
    """A JSON value that a schema must accept or must refuse."""

    description: str
    valid: bool
    data: Any

    @property
    def text(self) -> str:
        """The document as a model would write it: one blank after commas and colons."""
        return json.dumps(self.data, ensure_ascii=False)


@dataclass(frozen=True)
class Problem:
    """A schema and its instances."""

    name: str
    schema: Any
    instances: tuple[Instance, ...]

    @property
    def digest(self) -> str:
        """Hexadecimal digest of schema and instances; names alone may repeat between folders."""
        content = [self.schema, [(each.valid, each.data) for each in self.instances]]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def load_problems(path: Path) -> list[Problem]:
    """Read all problems of a file or folder.

    Args:
        path: a ``.jsonl`` or ``.jsonl.gz`` file with one ``{"name", "schema", "tests"}`` a line; or
            a folder of MaskBench files: ``*.json``, each ``{"schema", "tests", ...}``, named by
            their path. A test is ``{"valid", "data"}`` with an optional ``"description"``.

    Raises:
        UserError: nothing there, or not in this format; the message names file and line.
    """
    if not path.exists():
        raise UserError(f"--data {path} does not exist; {WHERE_TO_GET}")
    problems = list(_from_folder(path) if path.is_dir() else _from_lines(path))
    if not problems:
        raise UserError(f"--data {path} holds no problem; {WHERE_TO_GET}")
    return problems


def _from_folder(folder: Path) -> Iterator[Problem]:
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        try:
            yield _problem(path.read_bytes(), str(path), name)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error


def _from_lines(path: Path) -> Iterator[Problem]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _problem(line, f"{path}, line {number}", None)
    except (OSError, EOFError, zlib.error) as error:  # a damaged archive raises any of them
        raise UserError(f"{path}: cannot be read ({error})") from error


def _problem(text: bytes, where: str, name: str | None) -> Problem:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: a problem is a JSON object")
    name = value.get("name") if name is None else name
    tests = value.get("tests")
    if not isinstance(name, str) or "schema" not in value or not isinstance(tests, list):
        raise UserError(f"{where}: a problem has a name, a schema and a list of tests")
    return Problem(name, value["schema"], tuple(_instance(test, where) for test in tests))


def _instance(test: Any, where: str) -> Instance:
    if not isinstance(test, dict) or type(test.get("valid")) is not bool or "data" not in test:
        raise UserError(f"{where}: a test has data and valid (true or false)")
    return Instance(str(test.get("description", "")), test["valid"], test["data"])
