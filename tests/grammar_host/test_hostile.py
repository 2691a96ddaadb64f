"""Whatever a client sends, it gets a grammar or a named error, in time; and the process survives."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from grammar_host import (
    SERVED_BACKENDS,
    DeadEndError,
    GrammarCompiler,
    GrammarError,
    GrammarMatcher,
    Guide,
    GuideError,
    RefusedTokenError,
)
from grammar_host.schema import read_schema, validator_for
from tests.grammar_host.common import STOP, VOCAB_SIZE, accepts, bits, mask, tokenizer_info
from tests.grammar_host.hostile import CORPUS, Request
from tests.grammar_host.hostile_generator import generate
from tests.grammar_host.keyword_cases import D4

BACKENDS = ("auto", *SERVED_BACKENDS)

DEADLINE_S = 1.0
HANG_S = 120.0
"""Far above the deadline: this finds what never ends, on a machine that is slow or busy, too."""

STEPS = 24
AT_ONCE = 3
MAX_SHOWN = 20

CLOSING = {STOP, *b'"]}0:,a'}

MAX_MESSAGE_CHARACTERS = 600
_SOURCE = re.compile(
    r"\.(?:cc|cpp|h|rs|py):\d|/(?:project|root|home|usr|tmp)/|site-packages|0x[0-9a-f]{8}"
)


def require_clean(error: GrammarError) -> None:
    """A message that a server can answer with: one line, no sources; a code and what is to blame."""
    message = str(error)
    assert message.splitlines() == [message], message
    assert len(message) <= MAX_MESSAGE_CHARACTERS, message
    assert not _SOURCE.search(message), message
    assert re.fullmatch(r"[a-z_]+", error.code), error.code
    if isinstance(error, GuideError):
        assert error.param
        assert message.startswith(f"{error.param}: ")


def walk(matcher: GrammarMatcher, rng: random.Random, *, ends_with_stop: bool) -> bytes | None:
    """Some legal tokens, each beside an illegal one; then back to the beginning.

    Args:
        ends_with_stop: whether a stop token may be legal before the text is complete, because a
            tag ends with it.

    Returns:
        The text, if the walk came to an end.
    """
    first = mask(matcher)
    text = b""
    for _ in range(STEPS):
        legal = bits(mask(matcher)).tolist()
        assert not legal or legal[-1] < VOCAB_SIZE
        if not legal or matcher.is_terminated():
            break
        completed = matcher.is_completed()
        assert completed is (STOP in legal) or (ends_with_stop and not completed)
        illegal = rng.randrange(VOCAB_SIZE)
        if illegal not in legal:
            assert not matcher.accept_token(illegal)
        token = choose(legal, rng)
        assert matcher.accept_token(token)
        text += tokenizer_info().vocabulary[token]
    finished = matcher.is_terminated()
    copy = matcher.fork()
    assert np.array_equal(mask(copy), mask(matcher))
    matcher.rollback(matcher.num_accepted)
    assert np.array_equal(mask(matcher), first)
    return text if finished else None


def choose(legal: list[int], rng: random.Random) -> int:
    """A legal token, often one that brings the end nearer: most walks would never see one."""
    closing = [token for token in legal if token in CLOSING]
    return rng.choice(closing if closing and rng.random() < 0.6 else legal)


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise OverflowError(number)
    return value


def require_valid(guide: Guide, text: bytes) -> None:
    """What is finished is a document that the schema allows."""
    if guide.kind == "json_schema" and guide.reasoning_end is None:
        schema = read_schema(guide.document, strict=guide.strict)
        # JSON can write half a character, and numbers that no float holds.
        with contextlib.suppress(UnicodeEncodeError, OverflowError):
            value = json.loads(text, parse_float=_finite)
            assert validator_for(schema.document).is_valid(value), text
    elif guide.kind == "json" and guide.reasoning_end is None:
        assert isinstance(json.loads(text), dict), text
    elif guide.kind == "choice" and guide.reasoning_end is None:
        assert text.decode() in guide.document, text


def treat(request: Request, backend: str, compiler: GrammarCompiler, rng: random.Random) -> str:
    """What becomes of a request, in a word: how it is served, or the code of its error."""
    try:
        guide = request.build()
        grammar = compiler.submit(guide, backend).result(timeout=HANG_S)
        tag = guide.kind == "structural_tag"
        text = walk(grammar.matcher(), rng, ends_with_stop=tag)
    except (GuideError, DeadEndError, RefusedTokenError) as error:
        require_clean(error)
        return error.code
    if text is not None:
        require_valid(guide, text)
    return "exact" if grammar.exact else "gated"


def within(seconds: float, task: Callable[[], Any]) -> Any:
    """The task's result. A thread, because nothing else gives up on an engine that never returns."""
    results: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(task())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    assert not thread.is_alive(), f"not done after {seconds} s"
    return results[0]


def require_survival(
    requests: Mapping[str, Request], backend: str, compiler: GrammarCompiler
) -> Counter[str]:
    """Treats all requests, some at once; reports the failures of all of them together."""

    def try_one(name: str) -> tuple[str, str | None]:
        request = requests[name]
        task = partial(treat, request, backend, compiler, random.Random(name))
        try:
            outcome = within(2 * HANG_S, task)
        except Exception as error:
            outcome = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            if request.code in (None, outcome):
                return outcome, None
        return "failure", f"{name} ({backend}): {repr(request)[:300]}: {outcome}"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(try_one, requests))
    outcomes = Counter(outcome for outcome, _ in results)
    failures = [failure for _, failure in results if failure is not None]
    if backend == "auto" and outcomes["grammar_compile_crash"]:
        failures.append("auto has other engines to ask than one that crashes")
    assert not failures, "\n".join([f"{len(failures)} failures", *failures[:MAX_SHOWN]])
    return outcomes


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer_info(), timeout_s=DEADLINE_S, cache_limit_bytes=0)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_corpus(backend: str, compiler: GrammarCompiler, capfd: Any) -> None:
    require_survival(CORPUS, backend, compiler)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "count", [100, pytest.param(2500, marks=pytest.mark.full)], ids=["short", "long"]
)
def test_generated_guides(backend: str, count: int, compiler: GrammarCompiler, capfd: Any) -> None:
    """The long size is 10 000 guides: every engine gets others."""
    first = BACKENDS.index(backend) * count
    requests = {f"seed {seed}": generate(seed) for seed in range(first, first + count)}
    outcomes = require_survival(requests, backend, compiler)
    assert capfd.readouterr() == ("", "")
    assert outcomes.total() == count
    with capfd.disabled():
        print(f"\n{backend}: {dict(outcomes.most_common())}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("pattern", "text"), [("a$b", "ab"), ("a^b", "ab"), (r"a\bb", "ab"), ("a.c", "a\nc")]
)
def test_no_regex_is_read_as_another(
    pattern: str, text: str, backend: str, compiler: GrammarCompiler
) -> None:
    """An engine may refuse a regex, but not ignore a part of it. These mean the same everywhere."""
    try:
        grammar = compiler.compile(Guide.regex(pattern), backend)
    except GuideError as error:
        require_clean(error)
    else:
        assert not accepts(grammar.matcher(), text)


@pytest.fixture
def fetched() -> Iterator[tuple[str, list[str]]]:
    """The address of a web server on this machine, and the paths that were asked of it."""
    paths: list[str] = []

    class Recorder(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Recorder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", paths
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_address_is_ever_fetched(
    backend: str, compiler: GrammarCompiler, fetched: tuple[str, list[str]]
) -> None:
    """Or a client could have the server ask other machines behind its firewall."""
    address, paths = fetched
    schemas = {
        "schema": {"$schema": f"{address}/meta"},
        "nested schema": {"properties": {"a": {"$schema": f"{address}/meta", "$id": "urn:a"}}},
        "ref": {"$ref": f"{address}/ref"},
        "relative": {"$id": f"{address}/a/b", "$ref": "c"},
        "nested id": {"$defs": {"a": {"$id": f"{address}/x", "$ref": "y"}}, "$ref": "#/$defs/a"},
        "dynamic": {"$dynamicRef": f"{address}/dynamic#a"},
        "vocabulary": {"$vocabulary": {f"{address}/vocabulary": True}, "type": "null"},
        "not": {"type": "null", "not": {"$ref": f"{address}/not"}},
        "unused": {"type": "null", "$defs": {"a": {"$ref": f"{address}/unused"}}},
        "draft 4": {"$schema": D4, "id": f"{address}/a", "properties": {"a": {"$ref": "b"}}},
    }
    require_survival(
        {name: Request("json_schema", schema) for name, schema in schemas.items()},
        backend,
        compiler,
    )
    assert paths == []
