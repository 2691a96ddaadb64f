"""From answers to figures: tables, ratios beside their targets."""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from benchmarks.common import print_table, print_verdict
from benchmarks.drafts.documents import Answer, Answers, Document
from benchmarks.drafts.ours import baseline, plain
from benchmarks.drafts.peers import LLAMA_CPP, TRANSFORMERS
from grammar_host.schema.reading import validator_for

T = TypeVar("T")

LEAST_FORWARDS_SAVED = 0.3
"""Target for ``verify``: share of the forwards that it saves."""
LEAST_SPEEDUP = 1.3
"""Target for ``verify`` and ``force``: tokens/s to those without drafts."""
LEAST_TO_TRANSFORMERS = 4.0
"""Target for ``verify`` and ``force``: documents/s to the peer's."""
MOST_TO_LLAMA_CPP = {1: 1.3, 8: 1.0}
"""Target for ``verify`` and ``force`` by batch size: time to the peer's."""

_JUDGED = ("verify", "force", "lookup")


def report(
    documents: Sequence[Document], results: Mapping[int, Mapping[str, Answers]]
) -> dict[str, Any]:
    """Print tables and verdicts; return all figures, JSON-ready.

    Args:
      results: answers by batch size and way. Peers' are in the smallest batch size, and stand for all.
    """
    schemas = {document.name: document.schema for document in documents}
    base = results[min(results)]
    peers = {name: base[name] for name in (TRANSFORMERS, LLAMA_CPP) if name in base}
    figures = {
        batch: {name: summarize(each, _off(by_way, name), schemas) for name, each in by_way.items()}
        for batch, by_way in results.items()
    }
    ratios = {
        batch: {
            name: to_off(figures[batch][name], _off(figures[batch], name))
            | {f"to {peer}": to_peer(answers, theirs) for peer, theirs in peers.items()}
            for name, answers in by_way.items()
            if name not in peers
        }
        for batch, by_way in results.items()
    }
    for batch, by_name in figures.items():
        _print(batch, by_name)
    _print_ratios(ratios, [*peers])
    _print_verdicts(ratios)
    errors = {
        f"B={batch} {name}": {
            document: answer.error
            for document, answer in answers.items()
            if answer.error is not None
        }
        for batch, by_way in results.items()
        for name, answers in by_way.items()
    }
    for where, by_document in errors.items():
        if by_document:
            print(f"{where}: {len(by_document)} documents not served; its ratios leave them out")
    return {"documents": [*schemas], "figures": figures, "ratios": ratios, "errors": errors}


def summarize(answers: Answers, off: Answers, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of one way.

    Args:
      off: the answers without drafts.
      schemas: by document.

    Returns:
      Counts: ``documents``, ``finished`` (of them), ``valid`` (of these), ``same_tokens`` (as ``off``),
      ``tokens``, ``forwards``, ``drafts`` by source, ``spent`` seconds. Of these ``tokens_per_second``,
      ``documents_per_second`` and ``tokens_per_forward``. ``median`` over documents of ``tokens``,
      ``forwards``, ``seconds``, ``first_seconds``, ``decode_seconds`` (after the first tokens),
      ``tokens_per_second`` and ``decode_tokens_per_second``.
    """
    served = {name: answer for name, answer in answers.items() if answer.error is None}
    ended = {name: answer for name, answer in served.items() if answer.finished}
    drafts: dict[str, Counter[str]] = {}
    for answer in served.values():
        for source, counts in answer.drafts.items():
            drafts.setdefault(source, Counter()).update(counts)
    tokens = sum(len(answer.tokens) for answer in served.values())
    forwards = sum(answer.forwards for answer in served.values())
    spent = sum(answer.spent for answer in served.values())
    return {
        "documents": len(served),
        "finished": len(ended),
        "valid": sum(is_valid(answer.text, schemas[name]) for name, answer in ended.items()),
        "same_tokens": sum(_same(answer, off[name]) for name, answer in served.items()),
        "tokens": tokens,
        "forwards": forwards,
        "spent": spent,
        "tokens_per_second": _ratio(tokens, spent),
        "documents_per_second": _ratio(len(served), spent),
        "tokens_per_forward": _ratio(tokens, forwards),
        "drafts": {source: dict(counts) for source, counts in drafts.items()},
        "median": _medians([_of_document(answer) for answer in served.values()]),
    }


def is_valid(text: str, schema: Any) -> bool:
    """Whether the text is a JSON document that obeys the schema."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return validator_for(schema).is_valid(value)


def to_off(own: Mapping[str, Any], off: Mapping[str, Any]) -> dict[str, Any]:
    """A way's figures (of ``summarize``) to those without drafts."""
    decoding = "decode_tokens_per_second"
    return {
        "same_tokens": own["same_tokens"] / off["same_tokens"],
        "forwards_saved": 1.0 - own["forwards"] / off["forwards"],
        "tokens_per_second": own["tokens_per_second"] / off["tokens_per_second"],
        "median_decode_tokens_per_second": _ratio(own["median"][decoding], off["median"][decoding]),
    }


def to_peer(ours: Answers, theirs: Answers) -> dict[str, float]:
    """Time spent on the documents that both served, ours to theirs.

    ``spent`` on all documents together, ``median_spent`` of the median of the documents' ratios,
    ``spent_per_token``, because texts may differ in length.
    """
    named = [(ours[name], theirs[name]) for name in ours]
    pairs = [pair for pair in named if all(answer.error is None for answer in pair)]
    ratios = [_ratio(own.spent, other.spent) for own, other in pairs]
    time, their_time = (sum(pair[side].spent for pair in pairs) for side in (0, 1))
    tokens, their_tokens = (sum(len(pair[side].tokens) for pair in pairs) for side in (0, 1))
    return {
        "documents": len(pairs),
        "spent": _ratio(time, their_time),
        "median_spent": statistics.median(ratios) if ratios else 0.0,
        "spent_per_token": _ratio(time * their_tokens, their_time * tokens),
    }


def _off(by_way: Mapping[str, T], name: str) -> T:
    """That of the way without drafts, with the same weights as way ``name`` if that is ours."""
    return by_way.get(baseline(name)) or next(iter(by_way.values()))


def _same(answer: Answer, off: Answer) -> bool:
    return (list(answer.tokens), answer.finished) == (list(off.tokens), off.finished)


def _of_document(answer: Answer) -> dict[str, float]:
    count, decoding = len(answer.tokens), answer.seconds - answer.first_seconds
    return {
        "seconds": answer.seconds,
        "first_seconds": answer.first_seconds,
        "decode_seconds": decoding,
        "tokens": count,
        "forwards": answer.forwards,
        "tokens_per_second": _ratio(count, answer.seconds),
        "decode_tokens_per_second": _ratio(count - answer.first_tokens, decoding),
    }


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]} if rows else {}


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


def _print(batch: int, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Two tables of one batch size."""
    columns = [
        f"B={batch}", "documents", "finished, %", "valid of these, %", "same as off", "tokens",
        "tokens / forward", "drafts accepted",
    ]  # fmt: skip
    rows = [
        [
            name, str(each["documents"]), _percent(each["finished"], each["documents"]),
            _percent(each["valid"], each["finished"]), str(each["same_tokens"]),
            str(each["tokens"]), f"{each['tokens_per_forward']:.2f}",
            " ".join(
                f"{source} {counts['accepted']}/{counts['proposed']}"
                for source, counts in each["drafts"].items()
            ),
        ]
        for name, each in figures.items()
    ]  # fmt: skip
    print_table("documents", columns, rows)
    columns = [
        f"B={batch}", "documents/s", "tokens/s, all", "tokens/s", "decoding", "forwards", "tokens",
        "s", "s to first", "s decoding",
    ]  # fmt: skip
    rows = [
        [
            name, f"{each['documents_per_second']:.3f}", f"{each['tokens_per_second']:.1f}",
            f"{each['median']['tokens_per_second']:.1f}",
            f"{each['median']['decode_tokens_per_second']:.1f}",
            f"{each['median']['forwards']:.0f}", f"{each['median']['tokens']:.0f}",
            f"{each['median']['seconds']:.2f}", f"{each['median']['first_seconds']:.2f}",
            f"{each['median']['decode_seconds']:.2f}",
        ]
        for name, each in figures.items()
        if each["documents"]
    ]  # fmt: skip
    print_table("speed; from the third figure on, medians over documents", columns, rows)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _print_ratios(
    ratios: Mapping[int, Mapping[str, Mapping[str, Any]]], peers: Sequence[str]
) -> None:
    """A table of ratios to ``OFF``, and one for each peer."""
    ways = {
        f"B={batch} {name}": each
        for batch, by_way in ratios.items()
        for name, each in by_way.items()
    }
    columns = ["to off", "forwards saved, %", "tokens/s, all", "tokens/s, decoding, median"]
    rows = [
        [
            name, f"{100 * each['forwards_saved']:.1f}", f"{each['tokens_per_second']:.2f}",
            f"{each['median_decode_tokens_per_second']:.2f}",
        ]
        for name, each in ways.items()
    ]  # fmt: skip
    print_table("ratios", columns, rows)
    for peer in peers:
        columns = [f"to {peer}", "documents", "time", "time, median", "time per token"]
        rows = [
            [
                name, str(each["documents"]), f"{each['spent']:.2f}",
                f"{each['median_spent']:.2f}", f"{each['spent_per_token']:.2f}",
            ]
            for name, each in ((name, each[f"to {peer}"]) for name, each in ways.items())
        ]  # fmt: skip
        print_table("ratios, of the documents that both serve", columns, rows)


def _print_verdicts(ratios: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> None:
    for batch, by_way in ratios.items():
        for name in (name for name in by_way if plain(name) in _JUDGED):
            each, where = by_way[name], f"{name}, B={batch}"
            if plain(name) == "verify":
                print_verdict(f"same tokens as off, {where}", each["same_tokens"], least=1)
                print_verdict(
                    f"forwards saved, {where}", each["forwards_saved"], least=LEAST_FORWARDS_SAVED
                )
            print_verdict(
                f"tokens/s to off, {where}", each["tokens_per_second"], least=LEAST_SPEEDUP
            )
            if (peer := each.get(f"to {TRANSFORMERS}")) is not None:
                faster = _ratio(1.0, peer["spent"])
                what = f"documents/s to {TRANSFORMERS}, {where}"
                print_verdict(what, faster, least=LEAST_TO_TRANSFORMERS)
            if (peer := each.get(f"to {LLAMA_CPP}")) is not None and batch in MOST_TO_LLAMA_CPP:
                what = f"time to {LLAMA_CPP}, {where}"
                print_verdict(what, peer["spent"], most=MOST_TO_LLAMA_CPP[batch])
