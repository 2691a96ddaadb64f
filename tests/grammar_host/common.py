"""A small vocabulary that behaves like a real one, and the helpers that several tests share."""

from __future__ import annotations

import functools
import itertools
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from grammar_host import (
    SERVED_BACKENDS,
    GrammarCompiler,
    GrammarMatcher,
    Guide,
    TokenizerInfo,
    allocate_token_bitmask,
)
from grammar_host.backends.base import Backend, CompiledGuide
from grammar_host.backends.scripted import Script, ScriptedBackend
from grammar_host.guide import GuideKind

PIECES = (
    b'{"',
    b'":',
    b'": "',
    b'",',
    b'"}',
    b"true",
    b"false",
    b"null",
    b"name",
    b"age",
    b" the",
    b"  ",
    b"\n  ",
    b"12",
    b"34",
    b"ab",
    b"abc",
    "é".encode(),
    "😀".encode(),
    "😀".encode()[:2],
    "日本".encode()[2:],
)
STOP = 256
TOOL = 257
VOCAB_SIZE = 300  # not a multiple of 32, with unused ids at the end
SPECIAL_TOKENS = {STOP: "<|end|>", TOOL: "<|tool|>", 258: "<|pad|>"}


def byte_vocabulary(size: int) -> list[bytes]:
    """All single bytes, special tokens at 256.., multi-byte pieces, then words, then unused ids."""
    tokens = [bytes([byte]) for byte in range(256)] + [b""] * len(SPECIAL_TOKENS) + list(PIECES)
    words = map("".join, itertools.product(string.ascii_lowercase, repeat=4))
    tokens += [word.encode() for word in itertools.islice(words, max(0, size - len(tokens) - 20))]
    return tokens + [b""] * (size - len(tokens))


@functools.cache
def tokenizer_info(size: int = VOCAB_SIZE) -> TokenizerInfo:
    return TokenizerInfo.from_vocabulary(
        byte_vocabulary(size), [STOP], special_tokens=SPECIAL_TOKENS
    )


@functools.cache
def compiler(size: int = VOCAB_SIZE, backend: str = "auto") -> GrammarCompiler:
    return GrammarCompiler(tokenizer_info(size), backend, cache_limit_bytes=10**8, isolation="none")


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a/b", 'q"q', "back\\slash", "é", "😀"]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

GUIDES = {
    "json": Guide.json(),
    "schema": Guide.json_schema(PERSON),
    "regex": Guide.regex(r"(ab|abc)+[0-9]{2,4}( the)?"),
    "text": Guide.regex(r"[\s\S]*"),
    "grammar": Guide.grammar('root ::= "(" root ")" root | "x" | ""'),
    "lark": Guide.lark('start: "a" /b+/ [tail]\ntail: "é" | start'),
    "choice": Guide.choice(["ab", "abc", "déjà 😀", "line\nbreak", 'quo"te']),
    "tag": Guide.structural_tag(
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<f="],
                "tags": [
                    {
                        "type": "tag",
                        "begin": "<f=x>",
                        "content": {"type": "json_schema", "json_schema": PERSON},
                        "end": "</f>",
                    }
                ],
            },
        }
    ),
}

SCRIPT = Script.of([{97, 98}, {97}, set(range(32, 127)), {299, 0}, {98, 99}])


def scripted_matcher(
    script: Script, stop_token_ids: Iterable[int] = (), size: int = VOCAB_SIZE
) -> GrammarMatcher:
    """A generation under a script; skips the compiler, so that even position 0 may fail."""
    stops = frozenset({STOP, *stop_token_ids})
    engine = ScriptedBackend(script).compile(Guide.json()).new_matcher(stops)
    return GrammarMatcher(engine, size, stops)


ENGINES: Mapping[str, frozenset[str]] = {
    "llguidance": frozenset(get_args(GuideKind)) - {"structural_tag"},
    "xgrammar": frozenset(get_args(GuideKind)),
    "outlines": frozenset({"choice", "regex"}),  # no numbers in schemas: see its own tests
}
"""The kinds of guides that each engine serves. An engine joins the suite by one line here."""


@functools.cache
def engine(name: str, size: int = VOCAB_SIZE) -> Backend:
    return SERVED_BACKENDS[name](tokenizer_info(size))


@functools.cache
def compiled(engine_name: str, guide: Guide, size: int = VOCAB_SIZE) -> CompiledGuide:
    return engine(engine_name, size).compile(guide)


def engine_matcher(
    engine_name: str, guide: Guide, stop_token_ids: Iterable[int] = (), size: int = VOCAB_SIZE
) -> GrammarMatcher:
    """A generation inside one engine, with nothing between it and the matcher."""
    stops = frozenset({STOP, *stop_token_ids})
    return GrammarMatcher(compiled(engine_name, guide, size).new_matcher(stops), size, stops)


ENGINE_MATCHERS: dict[str, Callable[[], GrammarMatcher]] = {
    f"{name}-{key}": functools.partial(engine_matcher, name, guide)
    for name, kinds in ENGINES.items()
    for key, guide in GUIDES.items()
    if guide.kind in kinds
} | {"scripted": lambda: scripted_matcher(SCRIPT)}
"""A matcher of every engine and every kind of guide that it serves: what holds for all."""

MATCHERS: dict[str, Callable[[], GrammarMatcher]] = {
    key: functools.partial(
        engine_matcher, next(name for name in ENGINES if guide.kind in ENGINES[name]), guide
    )
    for key, guide in GUIDES.items()
} | {"scripted": lambda: scripted_matcher(SCRIPT)}
"""One matcher of every kind of guide, for the tests of what does not depend on the engine."""


def mask(matcher: GrammarMatcher) -> NDArray[np.int32]:
    """The matcher's mask row, written over garbage so that every unwritten word shows."""
    rows = allocate_token_bitmask(3, matcher.vocab_size)
    rows[:] = 0x5A5A5A5A
    matcher.fill_next_token_bitmask(rows, 1)
    assert np.all(rows[[0, 2]] == 0x5A5A5A5A)
    return rows[1]


def bits(row: NDArray[np.int32]) -> NDArray[np.int64]:
    """The token ids whose bits are set, bits above V included."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def legal(matcher: GrammarMatcher) -> list[int]:
    return [int(token) for token in bits(mask(matcher))]


def walk(matcher: GrammarMatcher, choices: Sequence[int]) -> list[int]:
    """Accepts one legal token per choice, until termination; returns the tokens."""
    tokens = []
    for choice in choices:
        options = legal(matcher)
        if matcher.is_terminated() or not options:
            break
        tokens.append(options[choice % len(options)])
        assert matcher.accept_token(tokens[-1])
    return tokens


def tokenize(text: str | bytes, info: TokenizerInfo | None = None) -> list[int]:
    """Greedy longest match over the vocabulary."""
    info = info or tokenizer_info()
    data = text.encode() if isinstance(text, str) else text
    ids = {token: index for index, token in reversed(list(enumerate(info.vocabulary))) if token}
    longest = max(map(len, ids))
    tokens = []
    while data:
        size = next(n for n in range(min(longest, len(data)), 0, -1) if data[:n] in ids)
        tokens.append(ids[data[:size]])
        data = data[size:]
    return tokens


def accepts(matcher: GrammarMatcher, text: str | bytes) -> bool:
    """Whether the whole text, and a stop after it, is accepted."""
    return all(matcher.accept_token(token) for token in [*tokenize(text), STOP])
