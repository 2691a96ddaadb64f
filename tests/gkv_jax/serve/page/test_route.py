"""How the page's files are sent: types, caching, and what a browser may do with them."""

import gzip
import http.client
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest
from fastapi import FastAPI

from gkv_jax.serve.page.route import mount
from tests.gkv_jax.serve.page.unreliable import running

PARTS = ("page.js", "answer.js", "draw.js", "guides.js", "stream.js")
TYPES = {
    "/": "text/html; charset=utf-8",
    "/page/page.css": "text/css; charset=utf-8",
    "/page/examples.json": "application/json",
    "/page/favicon.svg": "image/svg+xml",
    **{f"/page/{name}": "text/javascript; charset=utf-8" for name in PARTS},
}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    app = FastAPI()
    mount(app)
    assert "/" not in app.openapi()["paths"]
    with running(app) as port:
        yield port


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def ask(port: int, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=named)
    response = connection.getresponse()
    answer = Answer(response.status, response.headers, response.read())
    connection.close()
    return answer


@pytest.mark.parametrize("path", TYPES)
def test_each_part_has_its_type_and_is_asked_for_again(port: int, path: str) -> None:
    whole = ask(port, path)
    assert whole.status == 200
    assert whole.headers["content-type"] == TYPES[path]
    assert whole.headers["cache-control"] == "no-cache"
    assert whole.headers["x-content-type-options"] == "nosniff"
    etag = whole.headers["etag"]
    known = ask(port, path, If_None_Match=f'"other", {etag}')
    assert (known.status, known.body) == (304, b"")
    assert known.headers["etag"] == etag
    assert ask(port, path, If_None_Match='"other"').status == 200
    head = ask(port, path, "HEAD")
    assert head.status == 200
    assert head.headers["content-length"] == whole.headers["content-length"]
    packed = ask(port, path, Accept_Encoding="gzip, br")
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["vary"] == "Accept-Encoding"
    assert gzip.decompress(packed.body) == whole.body


def test_the_page_is_small(port: int) -> None:
    sizes = [len(ask(port, path, Accept_Encoding="gzip").body) for path in TYPES]
    assert sum(sizes) < 40_000


def test_the_policy_allows_this_server_only(port: int) -> None:
    policy = ask(port, "/").headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    for name in ("script-src", "style-src", "connect-src"):
        assert rules[name] == "'self'"
    for name in ("base-uri", "form-action", "frame-ancestors"):
        assert rules[name] == "'none'"


def test_nothing_is_inline_and_nothing_from_elsewhere(port: int) -> None:
    html = ask(port, "/").body.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", html)
    links = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert links
    for link in links:
        assert link.startswith("#") or f"/{link}" in TYPES


@pytest.mark.parametrize(
    "path", ["/page/route.py", "/page/..%2fapp.py", "/page/index.html", "/page/"]
)
def test_other_files_are_not_served(port: int, path: str) -> None:
    assert ask(port, path).status == 404


def test_it_is_read_only(port: int) -> None:
    assert ask(port, "/", "POST").status == 405
