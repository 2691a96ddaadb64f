"""What a guided evaluation found: figures, every answer, a table and a picture."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from gkv_jax.errors import UserError
from gkv_jax.evaluate.plot_kept import check_format
from gkv_jax.request import FinishReason

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Mode = Literal["guided", "free"]
"""Whether the grammar rules the output, or only judges it."""

# Of Okabe and Ito's palette, which the colour-blind can tell apart.
_COLOURS = {"valid": "#009E73", "exact": "#0072B2", "field_accuracy": "#E69F00"}
_LABELS = {"valid": "valid", "exact": "exact match", "field_accuracy": "field accuracy"}
_MOST_COLUMNS = 8  # of fields in a table; a schema with more would make it too wide


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer: of one engine, in one mode, to one document.

    Attributes:
      engine, mode: whose it is.
      index: of the document in the dataset.
      text: as the model wrote it.
      valid, exact, fields, problem: see ``gkv_jax.evaluate.judge.Verdict``.
      finish_reason: see ``gkv_jax.Result``.
      tokens: of the output.
      error: why, where ``finish_reason`` is ``error``.
    """

    engine: str
    mode: Mode
    index: int
    text: str
    valid: bool
    exact: bool
    fields: Mapping[str, tuple[int, int]]
    problem: str | None
    finish_reason: FinishReason
    tokens: int
    error: str | None


@dataclasses.dataclass(frozen=True)
class DocumentError:
    """A document that cannot be evaluated, or a request that failed.

    Attributes:
      index: of the document in the dataset.
      message: why.
      engine, mode: of the request that failed; None where the document itself is at fault.
    """

    index: int
    message: str
    engine: str | None = None
    mode: Mode | None = None

    def __str__(self) -> str:
        where = "" if self.engine is None else f" ({self.engine}, {self.mode})"
        return f"document {self.index}{where}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Score:
    """All answers of one engine in one mode, taken together.

    Attributes:
      engine, mode: whose they are.
      documents: answers that the rates are of.
      valid: share of answers that are valid.
      exact: share of answers that are the expected value.
      field_accuracy: share of the leaves of all expected values that the answers have right.
      fields: the same for each field, by its JSON pointer, ``*`` for the index of an array's item.
      finish_reasons: how many answers ended in which way.
      tokens: of all answers.
      forwards: passes of the model that rows took part in, summed over the answers.
      seconds: wall time of all answers together, with queueing and the reading of prompts; programs and
        grammars are compiled before.
      tokens_per_second: ``tokens / seconds``.
      cache_bytes: of the engine's whole cache.
    """

    engine: str
    mode: Mode
    documents: int
    valid: float
    exact: float
    field_accuracy: float
    fields: Mapping[str, float]
    finish_reasons: Mapping[FinishReason, int]
    tokens: int
    forwards: int
    seconds: float
    tokens_per_second: float
    cache_bytes: int


@dataclasses.dataclass(frozen=True)
class GuidedEvaluation:
    """Result of ``gkv_jax.evaluate.guided``; ``print`` shows it as a table.

    Attributes:
      documents: in the dataset, those that could not be evaluated included.
      scores: one for each engine and mode, in the order asked for.
      answers: all of them, in the order of ``scores``, then of the dataset.
      errors: documents that could not be evaluated, then requests that failed.
    """

    documents: int
    scores: tuple[Score, ...]
    answers: tuple[Answer, ...]
    errors: tuple[DocumentError, ...]

    def score(self, mode: Mode, engine: str | None = None) -> Score:
        """The score of one mode; ``engine`` may be None where there is but one.

        Raises:
          UserError: it was not evaluated, or several engines were.
        """
        found = [s for s in self.scores if s.mode == mode and engine in (None, s.engine)]
        if len(found) != 1:
            have = ", ".join(f"{score.engine} {score.mode}" for score in self.scores)
            raise UserError(f"score: {engine or 'engine'} {mode} is not one of {have}; name one")
        return found[0]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can say it."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    def to_json(self, path: str | Path) -> Path:
        """Write ``to_dict`` to a file, whose folder is made if need be; returns its path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", "utf-8")
        return path

    def plot(self, target: "str | Path | Axes | None" = None) -> "Figure":
        """Draw the rates as bars.

        Args:
          target: where to write the picture, in the format of the suffix (``.png``, ``.svg``,
            ``.pdf``), its folder made if need be; or matplotlib axes to draw into; None for neither.

        Returns:
          The matplotlib figure. It belongs to no window and to no global state.

        Raises:
          UserError: matplotlib is not installed, or it cannot write such a file.
        """
        path = target if isinstance(target, str | Path) else None
        check_format(path)
        from matplotlib.axes import Axes
        from matplotlib.figure import Figure

        if target is None or path is not None:
            width = max(4.5, 1.8 + 1.4 * len(self.scores))
            figure = Figure(figsize=(width, 3.4), dpi=150, layout="constrained")
            axes = figure.add_subplot()
        elif isinstance(target, Axes):
            axes, figure = target, cast("Figure", target.figure)
        else:
            raise UserError(f"target is {target!r}; give a path, matplotlib axes or None")
        self._draw(axes)
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
        return figure

    def _draw(self, axes: "Axes") -> None:
        width = 0.8 / len(_LABELS)
        for place, (name, label) in enumerate(_LABELS.items()):
            at = [index + (place - 1) * width for index in range(len(self.scores))]
            values = [100 * getattr(score, name) for score in self.scores]
            bars = axes.bar(at, values, width, label=label, color=_COLOURS[name])
            axes.bar_label(bars, fmt="%.0f", fontsize=8)
        axes.set_xticks(range(len(self.scores)), self._names("\n"))
        axes.set_ylim(0, 112)  # room for the figures above full bars
        axes.set_ylabel(f"% of {self.scores[0].documents} documents")
        axes.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=8
        )
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)

    def _names(self, joint: str = " ") -> list[str]:
        alone = len({score.engine for score in self.scores}) == 1
        return [s.mode if alone else f"{s.engine}{joint}{s.mode}" for s in self.scores]

    def __str__(self) -> str:
        fields = self.scores[0].fields
        if not 1 < len(fields) <= _MOST_COLUMNS:
            fields = {}
        rows = [["", "valid", "exact", "fields", *fields, "tokens", "tok/s", "cache", "ended by"]]
        for name, score in zip(self._names(), self.scores, strict=True):
            shares = [score.valid, score.exact, score.field_accuracy]
            shares += [score.fields[field] for field in fields]
            ends = ", ".join(f"{reason} {n}" for reason, n in score.finish_reasons.items())
            rows.append(
                [
                    name,
                    *(f"{100 * share:.1f} %" for share in shares),
                    str(score.tokens),
                    f"{score.tokens_per_second:.0f}",
                    f"{score.cache_bytes / 2**20:.1f} MiB",
                    ends,
                ]
            )
        judged = self.scores[0].documents
        left_out = f" of {self.documents}" if judged < self.documents else ""
        lines = [f"{judged}{left_out} documents", *_aligned(rows), *map(str, self.errors)]
        return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns to the right, but for the first and last."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0], cells[-1] = row[0].ljust(widths[0]), row[-1]
        lines.append("  ".join(cells).rstrip())
    return lines
