"""Outcomes on disk while a run goes on, so that the next run can resume it."""

import importlib.metadata
import json
from collections import Counter
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import grammar_host
from benchmarks.maskbench.judge import CRASH, Outcome
from benchmarks.maskbench.problems import Problem

_PACKAGES = ("numpy", "xgrammar", "llguidance", "outlines_core", "jsonschema_rs")


def circumstances(fingerprint: str) -> str:
    """Hexadecimal digest of what an outcome depends on besides problem and engine.

    Engine versions, the vocabulary's fingerprint, and `grammar_host` itself, whose version does not
    change with every edit.
    """
    digest = blake2b(fingerprint.encode(), digest_size=16)
    for package in _PACKAGES:
        digest.update(f"{package}={importlib.metadata.version(package)}\n".encode())
    for source in sorted(Path(grammar_host.__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


class Journal:
    """A JSON Lines file: one line when a problem begins, one with its outcome when it ends.

    An engine that brings the whole process down leaves a beginning without an end. So does a run
    that was killed; hence a problem counts as a crash only after two such beginnings.
    """

    def __init__(self, path: Path, circumstances: str, *, resume: bool) -> None:
        """Opens the file.

        Args:
            path: the file; its folder is made if need be.
            circumstances: outcomes that were recorded under others do not count.
            resume: keep what is there; otherwise start anew.
        """
        self._circumstances = circumstances
        self._begun: Counter[str] = Counter()
        self._outcomes: dict[str, Outcome] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            self._read(path.read_text(encoding="utf-8").splitlines())
        self._file = path.open("a" if resume else "w", encoding="utf-8")
        if self._file.tell():
            self._file.write("\n")  # behind a line that a killed run left unfinished

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def find(self, problem: Problem, backend: str) -> Outcome | None:
        """The outcome of an earlier run, if there is one."""
        key = self._key(problem, backend)
        if key not in self._outcomes and self._begun[key] >= 2:
            return Outcome(problem.name, code=CRASH, reason="the process died twice")
        return self._outcomes.get(key)

    def begin(self, problem: Problem, backend: str) -> None:
        """Records that the problem is being tried."""
        self._write({"key": self._key(problem, backend), "name": problem.name})

    def end(self, problem: Problem, backend: str, outcome: Outcome) -> None:
        """Records what became of it."""
        self._write({"key": self._key(problem, backend), "outcome": asdict(outcome)})

    def _key(self, problem: Problem, backend: str) -> str:
        return f"{backend}/{problem.name}/{problem.digest}/{self._circumstances}"

    def _read(self, lines: list[str]) -> None:
        for line in filter(None, lines):
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the last line of a killed run
            if "outcome" in entry:
                self._outcomes[entry["key"]] = Outcome.from_json(entry["outcome"])
            else:
                self._begun[entry["key"]] += 1

    def _write(self, entry: dict[str, object]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
