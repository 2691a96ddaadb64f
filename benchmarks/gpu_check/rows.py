"""What a section reports: rows, written one by one, so that a process that dies leaves the others."""

import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

Status = Literal["passed", "failed", "error", "skipped", "missing", "measured"]
BAD: tuple[Status, ...] = ("failed", "error")


class CheckFailed(Exception):
    """A result that is not what it should be."""


class Missing(Exception):
    """Something that this machine lacks, as a sentence."""


class NoTime(Exception):
    """There is no time left for a case."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One case of a section.

    Attributes:
      section: which section it belongs to, as ``check:bitmask`` or ``time:bitmask``.
      case: which case, unique within the section.
      status: ``measured`` and ``passed`` are good; ``skipped`` says that time was too short.
      figures: numbers by name.
      detail: an error, or why there are no figures.
    """

    section: str
    case: str
    status: Status
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    detail: str = ""


class Recorder:
    """Runs the cases of one section and writes a line of JSON for each."""

    def __init__(self, section: str, path: Path, until: float) -> None:
        """``until`` is a time as ``time.time()`` tells it: cases that would outlast it are skipped."""
        self._section, self._path, self._until = section, path, until
        self._longest = 0.0

    @property
    def seconds_left(self) -> float:
        return self._until - time.time()

    def run(
        self, case: str, function: Callable[[], Mapping[str, float]], good: Status = "passed"
    ) -> None:
        """Run a case, whatever it raises. It is skipped where the longest so far would not fit."""
        if self.seconds_left < self._longest:
            self.write(case, "skipped", detail="no time left")
            return
        began = time.perf_counter()
        try:
            figures = function()
        except CheckFailed as error:
            self.write(case, "failed", detail=str(error))
        except NoTime as error:
            self.write(case, "skipped", detail=str(error))
        except Missing as error:
            self.write(case, "missing", detail=str(error))
        except Exception as error:
            traceback.print_exc()
            self.write(case, "error", detail=_one_line(error))
        else:
            self.write(case, good, figures)
        self._longest = max(self._longest, time.perf_counter() - began)

    def write(
        self,
        case: str,
        status: Status,
        figures: Mapping[str, float] | None = None,
        detail: str = "",
    ) -> None:
        """Add a row."""
        row = Row(self._section, case, status, figures or {}, detail)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        print(row, file=sys.stderr, flush=True)


def read_rows(path: Path) -> list[Row]:
    """The rows that a section has written; a line that was cut off is dropped."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(Row(**json.loads(line)))
        except (TypeError, ValueError):
            continue
    return rows


def _one_line(error: BaseException, length: int = 300) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:length]
