"""``python -m tests.grammar_host.keywords --write``: measures docs/schema-keywords.md.

Every case of `keyword_cases` under every engine: is the schema served, by the engine's grammar alone or
with the completion gate, and does each document get the right verdict?
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grammar_host import SERVED_BACKENDS, GrammarCompiler, Guide, GuideError
from tests.grammar_host.common import accepts, tokenizer_info
from tests.grammar_host.keyword_cases import CASES, Case

PAGE = Path(__file__).parents[2] / "docs" / "schema-keywords.md"
BACKENDS = ("auto", *sorted(SERVED_BACKENDS))
TIMEOUT_S = 30.0
_MAX_CHARACTERS = 110

_INTRODUCTION = """\
# JSON Schema keywords

What each engine does with each keyword of JSON Schema, measured on the schemas of
`tests/grammar_host/keyword_cases.py` ({cases} schemas, {documents} documents). `auto` is what a guide gets
that asks for no engine: for each schema the first engine, and the first form of the schema, that work.

- **exact**: the engine's grammar says everything the schema says. No token is legal that no valid document
  could contain there.
- **gate**: the grammar allows more; a part of the document is validated at the token that would complete
  it, which is illegal while the part is invalid (`grammar.exact` is false). No invalid document is ever
  completed, but a model may write itself into a dead end.
- **refused**: a named error, before any token.

Two of them in one field: it depends on the rest of the schema. A star: a valid document is rejected, see
the end of the page. No engine completed an invalid document. Properties are expected in the order of the
schema, others behind them: engines let a model write no other order.

This page is written by `python -m tests.grammar_host.keywords --write`.
"""


@dataclass(frozen=True)
class Result:
    """What an engine made of a case.

    Attributes:
        served: `"exact"`, `"gate"` or `"refused"`.
        code: of the refusal.
        rejected: valid documents that were rejected.
        accepted: invalid documents that were accepted.
    """

    case: Case
    served: str
    code: str | None = None
    rejected: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()


@functools.cache
def results(backend: str) -> tuple[Result, ...]:
    """All cases under an engine."""
    compiler = GrammarCompiler(tokenizer_info(), timeout_s=TIMEOUT_S, cache_limit_bytes=0)
    with contextlib.closing(compiler):
        return tuple(_judge(case, backend, compiler) for case in CASES)


def _judge(case: Case, backend: str, compiler: GrammarCompiler) -> Result:
    try:
        grammar = compiler.compile(Guide.json_schema(case.schema), backend)
    except GuideError as error:
        return Result(case, "refused", error.code)
    return Result(
        case,
        "exact" if grammar.exact else "gate",
        rejected=tuple(text for text in case.valid if not accepts(grammar.matcher(), text)),
        accepted=tuple(text for text in case.invalid if accepts(grammar.matcher(), text)),
    )


def page() -> str:
    """The text of docs/schema-keywords.md."""
    documents = sum(len(case.valid) + len(case.invalid) for case in CASES)
    lines = [_INTRODUCTION.format(cases=len(CASES), documents=documents)]
    lines.append("| keyword | " + " | ".join(BACKENDS) + " |")
    lines.append("|---" * (1 + len(BACKENDS)) + "|")
    for keyword in dict.fromkeys(case.keyword for case in CASES):
        cells = (_cell([r for r in results(b) if r.case.keyword == keyword]) for b in BACKENDS)
        lines.append(f"| `{keyword}` | " + " | ".join(cells) + " |")
    lines += ["", "## What `auto` refuses", "", *_refused()]
    lines += ["", "## Valid documents that are rejected", "", *_too_strict()]
    return "\n".join(lines) + "\n"


def _cell(found: Sequence[Result]) -> str:
    served = Counter(result.served for result in found)
    words = [word for word in ("exact", "gate", "refused") if served[word]]
    return ", ".join(words) + ("*" if any(result.rejected for result in found) else "")


def _refused() -> Iterator[str]:
    found = [result for result in results("auto") if result.served == "refused"]
    yield from (f"- `{_short(r.case.schema)}` (`{r.code}`)" for r in found)
    if not found:
        yield "None of these schemas."


def _too_strict() -> Iterator[str]:
    for backend in BACKENDS:
        found = [result for result in results(backend) if result.rejected]
        yield f"- {backend}: " + ("none" if not found else f"{len(found)} schemas")
        for result in found:
            texts = ", ".join(f"`{text[:40]}`" for text in result.rejected)
            yield f"    - `{_short(result.case.schema)}`: {texts}"


def _short(schema: object) -> str:
    text = json.dumps(schema, ensure_ascii=False)
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 1] + "…"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure docs/schema-keywords.md.")
    parser.add_argument("--write", action="store_true", help="write the page; default: print it")
    write = parser.parse_args().write
    lax = [(b, r.case.schema, r.accepted) for b in BACKENDS for r in results(b) if r.accepted]
    if lax:  # the page says that there is none
        raise SystemExit(f"invalid documents were completed: {lax}")
    if write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())


if __name__ == "__main__":
    main()
