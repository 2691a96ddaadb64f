"""Results on disk as they come, a line of JSON each, so that a run that was broken off can go on."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.compile_matrix.cases import Case
from benchmarks.compile_matrix.jobs import Result


class Journal:
    """The first line says what the results hold for; a file with another one is begun anew."""

    def __init__(self, path: Path, circumstances: str, *, resume: bool) -> None:
        self._path = path
        self._results: dict[str, Result] = {}
        if resume and path.exists():
            self._results = dict(_read(path, circumstances))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(circumstances) + "\n", encoding="utf-8")
        for name, result in self._results.items():
            self._append(name, result)

    def find(self, case: Case) -> Result | None:
        """What became of a case in the run that is resumed, if it compiled."""
        return self._results.get(case.name)

    def add(self, case: Case, result: Result) -> None:
        self._append(case.name, result)

    def _append(self, name: str, result: Result) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, dataclasses.asdict(result)]) + "\n")


def _read(path: Path, circumstances: str) -> Iterator[tuple[str, Result]]:
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    if json.loads(first) != circumstances:
        return
    for line in lines:
        try:
            name, values = json.loads(line)
        except json.JSONDecodeError:  # the last line of a run that was killed
            return
        result = Result.from_json(values)
        if result.status == "compiled":  # the others may have been mended since
            yield name, result
