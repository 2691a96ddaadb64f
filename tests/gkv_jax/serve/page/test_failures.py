"""The page in Chromium, where the server fails it; and the parts that need no model."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gkv_jax.serve.page.conftest import Opener
from tests.gkv_jax.serve.page.unreliable import (
    ANSWER,
    PIECES,
    THOUGHT,
    running,
    unreliable_app,
)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running(unreliable_app()) as port:
        yield port


def test_a_busy_server_says_when_to_come_back(open_tab: Opener, port: int) -> None:
    tab = open_tab(port, complains=True)  # Chromium reports the status itself
    tab.open()
    tab.page.fill("#prompt", "busy")
    tab.page.click("#run")
    tab.wait("#notice", "too many requests wait")
    assert "try again in 3 s" in tab.text("#notice-more")
    assert "HTTP 429 · code queue_full" in tab.text("#notice-more")
    tab.page.fill("#prompt", "hello")
    tab.page.click("#again")
    tab.wait("#status", "Done")
    assert tab.page.is_hidden("#notice")


def test_a_stream_that_breaks_off_is_no_answer(open_tab: Opener, port: int) -> None:
    tab = open_tab(port)
    tab.open()
    tab.page.fill("#prompt", "break")
    tab.page.click("#run")
    tab.wait("#notice", "ended before the answer did")
    assert tab.page.locator("#tokens .t").count() == 7
    assert tab.page.is_hidden("#badge")
    assert tab.page.is_visible("#run")


def test_a_key_is_asked_for_and_stays_in_the_tab(open_tab: Opener, port: int) -> None:
    tab = open_tab(port, complains=True)
    tab.open()
    tab.page.fill("#prompt", "locked")
    tab.page.click("#run")
    tab.wait("#notice", "the API key is wrong")
    tab.page.fill("#key", "open")
    tab.page.click("#again")
    tab.wait("#status", "Done")
    tab.page.wait_for_function("() => location.hash.includes('locked')")
    assert "open" not in tab.page.evaluate("location.href")
    assert tab.page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    tab.page.reload()
    assert tab.page.input_value("#key") == "open"
    other = open_tab(port)
    other.open()
    assert other.page.input_value("#key") == ""


def test_a_server_that_is_away_is_found_again(open_tab: Opener) -> None:
    with running(unreliable_app()) as port:
        tab = open_tab(port, complains=True)
        tab.open()
    tab.page.click("#run")
    tab.wait("#notice", "The server cannot be reached")
    assert tab.page.get_attribute("#server", "data-state") == "down"
    with running(unreliable_app(), port):
        tab.page.wait_for_selector('#server[data-state="up"]')
        tab.run()


@pytest.mark.parametrize("prompt", ["hello", "byte by byte"])
def test_tokens_of_the_answer_however_it_is_cut(open_tab: Opener, port: int, prompt: str) -> None:
    tab = open_tab(port)
    tab.open()
    tab.page.fill("#prompt", prompt)
    tab.run()
    tokens = tab.page.eval_on_selector_all("#tokens .t", "all => all.map(one => one.textContent)")
    shown = [text for text, _, _ in PIECES]
    shown[4:6] = ["·", "é"]  # a character in two tokens
    assert tokens == shown
    tab.page.check("input[value=plain]", force=True)
    assert tab.page.text_content("#plain") == ANSWER
    tab.page.check("input[value=json]", force=True)
    assert json.loads(tab.page.text_content("#plain")) == json.loads(ANSWER)


def test_tokens_of_an_answer_behind_reasoning(open_tab: Opener, port: int) -> None:
    """Characters in several tokens are found, though tags and blanks are written nowhere."""
    tab = open_tab(port)
    tab.open()
    tab.page.fill("#prompt", "think")
    tab.run()
    tokens = tab.page.eval_on_selector_all("#tokens .t", "all => all.map(one => one.textContent)")
    shown = [text for text, _, _ in THOUGHT]
    shown[4:6] = shown[9:11] = ["·", "é"]
    assert tokens == shown
    assert tab.page.locator("#tokens .t.thought").count() == sum(bool(each[1]) for each in THOUGHT)
    tab.page.check("input[value=plain]", force=True)
    assert tab.page.text_content("#plain") == "".join(text for _, _, text in THOUGHT)


def test_sources_are_told_apart(open_tab: Opener, port: int) -> None:
    tab = open_tab(port)
    tab.open()
    tab.run()
    for source in ("forced", "sampled", "lookup", "model"):
        expected = sum(named == source for _, _, named in PIECES)
        assert tab.page.locator(f"#tokens .t.{source}").count() == expected
    legend = tab.text("#legend")
    assert "forced by the grammar" in legend
    assert "drafted by lookup" in legend
    tab.page.hover("#tokens .t:nth-child(12)")
    assert tab.text("#tip").splitlines() == [
        '"Lis" · token 1011',
        "one of 3 legal tokens · sampled by the model",
    ]
    numbers = tab.text("#numbers").splitlines()
    assert numbers[numbers.index("forced drafts") + 1] == "10 of 10"
    assert numbers[numbers.index("lookup drafts") + 1] == "1 of 4"
    assert numbers[numbers.index("cache") + 1] == "48.3 MB"


def test_markup_in_an_answer_is_text(open_tab: Opener, port: int) -> None:
    tab = open_tab(port)
    tab.open()
    result = tab.page.evaluate(
        """async () => {
          const { Answer } = await import("/page/answer.js");
          const box = Object.fromEntries(
            ["tokens", "spark", "tip", "legend"].map((id) => [id, document.getElementById(id)]));
          const answer = new Answer(box);
          const text = "<img src=x onerror=alert(1)>";
          answer.add(text, [{ token: 1, text, legal: 1, source: "sampled" }]);
          answer.flush(true);
          return [box.tokens.querySelectorAll("img").length, box.tokens.textContent];
        }"""
    )
    assert result == [0, "<img src=x onerror=alert(1)>"]


def test_events_may_be_cut_anywhere(open_tab: Opener, port: int) -> None:
    tab = open_tab(port)
    tab.open()
    found = tab.page.evaluate(
        """async () => {
          const { events } = await import("/page/stream.js");
          const text = ": ping\\r\\n\\r\\ndata: é1\\r\\n\\r\\ndata:a\\r\\ndata: b\\r\\nid: 4\\n\\n"
            + "data: 🌊\\r\\rdata: lost";
          const bytes = new TextEncoder().encode(text);
          const seen = new Set();
          for (let first = 0; first <= bytes.length; first++) {
            for (const second of [first, first + 1, first + 2, bytes.length]) {
              const stream = new ReadableStream({
                start(controller) {
                  for (const [from, to] of [[0, first], [first, second], [second, bytes.length]]) {
                    controller.enqueue(bytes.slice(from, to));
                  }
                  controller.close();
                },
              });
              const all = [];
              for await (const data of events(stream)) all.push(data);
              seen.add(JSON.stringify(all));
            }
          }
          return [...seen];
        }"""
    )
    assert [json.loads(one) for one in found] == [["é1", "a\nb", "🌊"]]


def _held(
    policy: str, sinks: int, kept: int, window: int, prompt: int, position: int
) -> dict[str, Any]:
    """What a cache holds after ``position`` tokens, written one after the other."""
    ring: list[int | None] = [None] * window
    left, of_prompt = 0, 0  # tokens that left the window, and those before the answer began
    for token in range(sinks, position):
        cell = (token - sinks) % window
        left += ring[cell] is not None
        ring[cell] = token
        of_prompt = left if token < prompt else of_prompt
    taken = min(kept, left if policy == "h2o" else of_prompt)
    return {
        "sinks": min(position, sinks),
        "kept": taken,
        "ring": sum(token is not None for token in ring),
        "head": max(0, position - sinks) % window,
        "evicted": left - taken,
        "answer": [token is not None and token >= prompt for token in ring],
    }


def test_occupancy_is_that_of_a_cache_written_token_by_token(open_tab: Opener, port: int) -> None:
    tab = open_tab(port)
    tab.open()
    cases = [
        (policy, sinks, kept, window, prompt, position)
        for policy, sinks, kept, window in [
            ("window", 4, 0, 8),
            ("window", 0, 0, 5),
            ("snapkv", 2, 3, 7),
            ("h2o", 2, 3, 7),
        ]
        for prompt in (1, 6, 20)
        for position in range(prompt, 40, 3)
    ]
    found = tab.page.evaluate(
        """async (cases) => {
          const { occupancy } = await import("/page/draw.js");
          return cases.map(([policy, sinks, kept, window, prompt, position]) => {
            const held = occupancy({ policy, sinks, kept, window }, prompt, position);
            const cells = [...Array(window).keys()];
            return { ...held, answer: cells.map((cell) => cell < held.ring && held.isAnswer(cell)) };
          });
        }""",
        [list(case) for case in cases],
    )
    for case, held in zip(cases, found, strict=True):
        assert {name: held[name] for name in _held(*case)} == _held(*case), case


def test_link_restores_what_it_says_and_holds_no_key(open_tab: Opener, port: int) -> None:
    tab = open_tab(port)
    tab.open()
    tab.page.check("input[value=regex]", force=True)
    tab.page.fill("#guide", "[0-9]{3}&é#\\d")
    tab.page.fill("#prompt", "three digits")
    tab.page.click("#settings summary")
    tab.page.fill("#seed", "9007199254740993")
    tab.page.fill("#key", "secret")
    tab.page.check("#lookup")
    tab.page.wait_for_function("() => location.hash.includes('lookup')")
    fragment = tab.page.evaluate("location.hash")
    assert "secret" not in fragment

    other = open_tab(port)
    other.open(fragment)
    assert other.page.is_checked("input[value=regex]")
    assert other.page.input_value("#guide") == "[0-9]{3}&é#\\d"
    assert other.page.input_value("#prompt") == "three digits"
    assert other.page.is_checked("#lookup")
    other.run()
    (sent,) = [request for request in other.requests if request.url.endswith("/completions")]
    body = sent.post_data
    assert '"seed":9007199254740993' in body  # with all of its digits
    assert json.loads(body)["structured_outputs"] == {"regex": "[0-9]{3}&é#\\d"}


def test_schema_goes_to_the_server_as_it_is_written(open_tab: Opener, port: int) -> None:
    tab = open_tab(port)
    tab.open()
    schema = '{"properties": {"2": {}, "1": {"maximum": 12345678901234567890.5}}, "type": "object"}'
    tab.page.fill("#guide", schema)
    tab.run()
    (sent,) = [request for request in tab.requests if request.url.endswith("/completions")]
    assert schema in sent.post_data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "type": object\n}', "Line 2, column 11: "),
        ('{"type": "object"', "Line 1, column 18: here should be a comma or }"),
        ('{"type": "object",}', "Line 1, column 19: here should be a name in double quotes"),
        ('{"a": [1, 02]}', "Line 1, column 11: here should be a JSON value"),
        ("[1]", "A schema is an object, or true or false."),
        ("  ", "It is empty."),
    ],
)
def test_malformed_schemas_are_noticed_at_once(
    open_tab: Opener, port: int, text: str, message: str
) -> None:
    tab = open_tab(port)
    tab.open()
    tab.page.fill("#guide", text)
    tab.wait("#guide-status", message)
    assert tab.page.get_attribute("#guide", "aria-invalid") == "true"
    tab.page.click("#run")
    tab.wait("#notice", message)
    assert not [request for request in tab.requests if request.url.endswith("/completions")]
    assert tab.page.evaluate("document.activeElement.id") == "guide"
