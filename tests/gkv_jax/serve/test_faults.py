"""Clients that vanish, stall, and send rubbish; workers that die; a server that is told to end under load.

Whatever they do, afterwards no slot and no place in the queue is lost, and requests are served.
"""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gkv_jax.serve.conftest import MODEL, read_all, wait_for
from tests.gkv_jax.serve.stack import SLOTS, Answer, Stack, request_bytes, small, subprocess_of
from tests.gkv_jax.tiny import STOP

BODY_SECONDS = 1
BODY_BYTES = 50_000
CONNECTIONS = 40
LONG = 4_000
"""Tokens of an answer that takes some seconds."""
ENDLESS = 1_000_000
"""Of one that would still be written when these tests have given up."""

CHAT = "/v1/chat/completions"
ROUNDS = 3
MOST_GROWTH = 32 * 2**20
"""Bytes. What is kept of each of some hundred requests shows; what the allocator keeps does not."""


def asked(tokens: int = 4, **fields: Any) -> dict[str, Any]:
    """A chat that is answered with exactly so many tokens."""
    never = {"logit_bias": {str(STOP): -100}}
    messages = [{"role": "user", "content": "hi"}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, **never, **fields}


def head(**fields: Any) -> bytes:
    return request_bytes(CHAT, asked(**fields)).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def reset(client: socket.socket) -> None:
    """Close with a RST, as a process that is killed, or a router that forgets."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


# Faults: each is what a client does, and what it may expect ------------------------------------------


def leaves_at_once(stack: Stack) -> None:
    stack.connect().close()


def leaves_before_the_body(stack: Stack) -> None:
    with stack.connect() as client:
        client.sendall(head())


def leaves_in_the_body(stack: Stack) -> None:
    request = request_bytes(CHAT, asked())
    with stack.connect() as client:
        client.sendall(request[:-5])


def leaves_before_the_answer(stack: Stack) -> None:
    with stack.connect() as client:
        client.sendall(request_bytes(CHAT, asked(ENDLESS)))


def leaves_in_the_stream(stack: Stack) -> None:
    with stack.connect() as client:
        client.sendall(request_bytes(CHAT, asked(ENDLESS, stream=True)))
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def is_reset_in_the_stream(stack: Stack) -> None:
    client = stack.connect()
    client.sendall(request_bytes(CHAT, asked(ENDLESS, stream=True, n=2)))
    assert client.recv(100).startswith(b"HTTP/1.1 200")
    reset(client)


def is_reset_before_the_answer(stack: Stack) -> None:
    client = stack.connect()
    client.sendall(request_bytes(CHAT, asked(ENDLESS, n=SLOTS)))
    reset(client)


def leaves_while_its_grammar_compiles(stack: Stack) -> None:
    schema = {"enum": [f"{os.urandom(8).hex()}{number}" for number in range(1000)]}
    with stack.connect() as client:
        client.sendall(request_bytes(CHAT, asked(9, json_schema=schema)))


def stalls_in_the_headers(stack: Stack) -> None:
    with stack.connect() as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(15 * BODY_SECONDS):
                client.sendall(b"a")
                time.sleep(0.1)
        assert read_all(client) == b""


def stalls_in_the_body(stack: Stack) -> None:
    with stack.connect() as client:
        client.sendall(head())
        with contextlib.suppress(ConnectionError):
            for _ in range(15 * BODY_SECONDS):
                client.sendall(b" ")
                time.sleep(0.1)
        # It may have been reset for what it sent after the answer.
        assert read_all(client)[:12] in (b"HTTP/1.1 408", b"")


def sends_too_much(stack: Stack) -> None:
    with stack.connect() as client:
        client.sendall(request_bytes(CHAT, asked(user="x" * BODY_BYTES)))
        assert read_all(client).startswith(b"HTTP/1.1 413")


def sends_too_much_in_chunks(stack: Stack) -> None:
    lines = ["POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json"]
    with stack.connect() as client, contextlib.suppress(ConnectionError):
        client.sendall("\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode())
        for _ in range(BODY_BYTES // 1000 + 10):
            client.sendall(b"3e8\r\n" + bytes(1000) + b"\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 413")


RUBBISH = (
    b"", b"{", b"[]", b"null", b"1", b'"a"', b"\xff\xfe", b'{"model": }', b'{"a":' * 5000, b"[" * 40_000,
    b"\0" * 100, b'{"model": "\xed\xa0\x80"}', b'{"model": NaN}', b"1" * 5000, b"{}", b'{"messages": 1e999}',
)  # fmt: skip


def sends_rubbish(stack: Stack) -> None:
    for body in RUBBISH:
        answer = stack.send("POST", CHAT, body)
        assert answer.status == 400, body[:20]
        assert answer.error["type"] == "invalid_request_error"


def cannot_be_served(stack: Stack) -> None:
    """For reasons found at each stage."""
    for fields in (
        {"model": "other"}, {"temperature": -1}, {"max_tokens": ENDLESS + 1},
        {"json_schema": {"type": "strin"}}, {"messages": [{"role": "user", "content": "x" * 20_000}]},
        {"response_format": {"type": "x"}}, {"n": 1000}, {"cache": {"window": 1}}, {"stop": [""]},
        {"logit_bias": {"100000": 1}},
    ):  # fmt: skip
        answer = stack.post(CHAT, asked() | fields)
        assert answer.status in (400, 404), answer.body
        assert answer.error["code"]


def runs_out_of_time(stack: Stack) -> None:
    answer = stack.post(CHAT, asked(ENDLESS, timeout=0.05))
    assert (answer.status, answer.error["code"]) == (504, "request_timeout")
    events = stack.post(CHAT, asked(ENDLESS, timeout=0.05, stream=True)).events
    assert events[-1]["error"]["code"] == "request_timeout"


FAULTS: dict[str, Callable[[Stack], None]] = {
    fault.__name__: fault
    for fault in (
        leaves_at_once, leaves_before_the_body, leaves_in_the_body, leaves_before_the_answer,
        leaves_in_the_stream, is_reset_in_the_stream, is_reset_before_the_answer,
        leaves_while_its_grammar_compiles, stalls_in_the_headers, stalls_in_the_body, sends_too_much,
        sends_too_much_in_chunks, sends_rubbish, cannot_be_served, runs_out_of_time,
    )
}  # fmt: skip


def settings(**changes: Any) -> Any:
    limits = {
        "body_seconds": BODY_SECONDS,
        "body_bytes": BODY_BYTES,
        "connections": CONNECTIONS,
        "completion_tokens": ENDLESS,
    }
    return small(limits=limits, **changes)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with subprocess_of(settings()) as (running, process):
        yield running
        assert process.poll() is None, "it ended on its own"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_nobody_else_anything(stack: Stack, name: str) -> None:
    FAULTS[name](stack)
    stack.assert_idle()


def memory(pid: int) -> int:
    """Bytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_memory_does_not_grow_with_faults(stack: Stack) -> None:
    """All of them at once, again and again."""
    assert stack.pid is not None
    sizes = []
    with concurrent.futures.ThreadPoolExecutor(len(FAULTS)) as pool:
        for _ in range(ROUNDS):
            for future in [pool.submit(survives, fault, stack) for fault in FAULTS.values()]:
                future.result()
            stack.assert_idle()
            sizes.append(memory(stack.pid))
    assert sizes[-1] - sizes[0] < MOST_GROWTH, sizes


def survives(fault: Callable[[Stack], None], stack: Stack) -> None:
    """A fault among others, which may fill the queue: then it is refused, which is no fault."""
    with contextlib.suppress(AssertionError, ConnectionError):
        fault(stack)


def test_a_slow_reader_holds_no_slot_and_nobody_up(stack: Stack) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the least that there is
        client.connect(("127.0.0.1", stack.port))
        client.sendall(request_bytes(CHAT, asked(LONG, stream=True)))
        assert client.recv(1) == b"H"
        assert stack.post(CHAT, asked()).status == 200
        wait_for(lambda: stack.gauge("gkv_active_slots") == 0, 60)
        stack.assert_idle()
        # And it gets all of it.
        received = b"H" + read_until(client, b"data: [DONE]")
    events = Answer(200, {}, received.partition(b"\r\n\r\n")[2]).events
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def read_until(client: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received[-200:]:
        data = client.recv(65536)
        assert data, received[-200:]
        received += data
    return received


def test_those_who_wait_may_leave(stack: Stack) -> None:
    """The slots are taken; those behind leave before it is their turn."""
    with stack.connect() as busy:
        busy.sendall(request_bytes(CHAT, asked(ENDLESS, n=SLOTS, stream=True)))
        wait_for(lambda: stack.gauge("gkv_active_slots") == SLOTS)
        for _ in range(3 * stack.settings.queue.size):
            with stack.connect() as client:
                client.sendall(request_bytes(CHAT, asked(stream=True)))
        wait_for(lambda: stack.gauge("gkv_queue_length") == 0)
    stack.assert_idle()


def test_too_many_answers_are_refused_until_there_is_room(stack: Stack) -> None:
    with stack.connect() as busy:
        fields = {"model": MODEL, "prompt": ["a"] * stack.places, "max_tokens": ENDLESS}
        never = {"logit_bias": {str(STOP): -100}}
        busy.sendall(request_bytes("/v1/completions", fields | never))
        wait_for(lambda: stack.gauge("gkv_active_slots") == SLOTS)
        answer = stack.post(CHAT, asked())
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
    stack.assert_idle()


def test_too_many_connections_are_refused_until_there_is_room(stack: Stack) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(CONNECTIONS):
            held.enter_context(stack.connect())
        assert stack.send("GET", "/health").status == 503
    wait_for(lambda: stack.send("GET", "/health").status == 200)
    stack.assert_idle()


# Workers ------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """Processes whose parent is this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("who", ["workers", "their parent"])
def test_a_compilation_whose_worker_is_killed_disturbs_nobody(stack: Stack, who: str) -> None:
    assert stack.pid is not None
    stack.assert_idle()  # there are workers
    parents = children(stack.pid)
    workers = [worker for parent in parents for worker in children(parent)]
    assert workers
    # Seconds of work, and other names each time: nothing is cached.
    names = [os.urandom(8).hex() for _ in range(500)]
    slow = asked(9, backend="xgrammar", json_schema={"enum": names})
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(stack.post, CHAT, slow)
        wait_for(lambda: any(map(is_busy, workers)) or answer.done())
        assert not answer.done()
        for pid in workers if who == "workers" else parents:
            os.kill(pid, signal.SIGKILL)
        told = answer.result()
    if who == "workers":  # a system out of memory kills so
        assert (told.status, told.error["code"]) == (400, "grammar_too_complex")
    else:  # the guide is not to blame: other workers compile it
        assert told.status == 200, told.body
    stack.assert_idle()
    for _ in workers:
        name = os.urandom(4).hex()
        after = stack.post(CHAT, asked(30, json_schema={"const": name}))
        assert json.loads(after.json["choices"][0]["message"]["content"]) == name


def is_busy(pid: int) -> bool:
    """Whether a process runs just now."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    except (FileNotFoundError, ProcessLookupError):
        return False


# The end ------------------------------------------------------------------------------------------


def test_sigterm_under_load() -> None:
    """Short answers are finished, long ones end in an error that says why; nobody is just cut off."""
    with (
        subprocess_of(settings(drain_seconds=1)) as (stack, process),
        concurrent.futures.ThreadPoolExecutor(32) as pool,
    ):
        short = [pool.submit(stack.post, CHAT, asked(200, stream=True)) for _ in range(2)]
        endless = [pool.submit(stack.post, CHAT, asked(ENDLESS, stream=True)) for _ in range(4)]
        whole = [pool.submit(stack.post, CHAT, asked(ENDLESS)) for _ in range(4)]
        waiting = [pool.submit(stack.post, CHAT, asked(stream=True)) for _ in range(4)]
        wait_for(lambda: stack.gauge("gkv_active_slots") == SLOTS)
        with contextlib.ExitStack() as idle:
            for part in (b"", b"POST / HTTP/1.1\r\n", head()):
                idle.enter_context(stack.connect()).sendall(part)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        for future in short + endless + waiting:
            ends_properly(future.result())
        for future in whole:
            answer = future.result()
            assert (answer.status, answer.error["code"]) == (503, "shutting_down")
        assert any("error" in future.result().events[-1] for future in endless)


def ends_properly(answer: Answer) -> None:
    """A stream with its end, an error in it, or an error instead of it."""
    if answer.status != 200:
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    elif b"data: [DONE]" not in answer.body:
        assert answer.events[-1]["error"]["code"] == "shutting_down"
