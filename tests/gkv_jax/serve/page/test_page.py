"""The page in Chromium, before the real server with a random tiny model."""

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.gkv_jax.serve.conftest import MODEL, Served, wait_for
from tests.gkv_jax.serve.page.conftest import Opener, Tab

# Finite languages, so that any model ends them.
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["km", "mile"]}, "length": {"type": "integer", "minimum": 0}},
    "required": ["unit", "length"],
    "additionalProperties": False,
}
SCHEMA["properties"]["length"]["maximum"] = 99
ENDLESS = json.dumps({"type": "string", "minLength": 15_000})
KINDS = ("text", "json_schema", "regex", "choice", "grammar", "lark")


@pytest.fixture
def tab(open_tab: Opener, served: Served) -> Tab:
    tab = open_tab(served.port)
    tab.open()
    return tab


def choose(tab: Tab, kind: str, guide: str | None = None) -> None:
    tab.page.locator("#kinds label", has=tab.page.locator(f"input[value={kind}]")).click()
    if guide is not None:
        tab.page.fill("#guide", guide)


def settings(tab: Tab, **values: str) -> None:
    tab.page.eval_on_selector("#settings", "box => { box.open = true; }")
    for name, value in values.items():
        tab.page.fill(f"#{name}", value)


def answer(tab: Tab) -> str:
    """The text of the answer, by the view that shows it as it is."""
    tab.page.locator("#views label", has_text="Text").click()
    text = tab.page.text_content("#plain")
    tab.page.locator("#views label", has_text="Tokens").click()
    return text


def numbers(tab: Tab) -> dict[str, str]:
    lines = tab.text("#numbers").splitlines()
    lines = [line for line in lines if line]
    return dict(zip(lines[::2], lines[1::2], strict=True))


def test_it_knows_the_server(tab: Tab, served: Served) -> None:
    assert tab.text("#model") == MODEL
    assert f"{served.engine.slots} slots" in tab.text("#facts")
    assert "window cache of 64 tokens" in tab.text("#facts")
    assert "float32" in tab.text("#facts")
    assert "0 of 64 tokens" in tab.text("#cache-text")


def test_an_answer_that_follows_a_schema(tab: Tab) -> None:
    choose(tab, "json_schema", json.dumps(SCHEMA, indent=1))
    tab.wait("#guide-status", "llguidance, enforced exactly")
    tab.run()
    value = json.loads(answer(tab))
    jsonschema.validate(value, SCHEMA)
    assert tab.text("#badge") == "valid JSON"
    assert "enforced by llguidance" in tab.text("#status")
    tab.page.locator("#views label", has_text="JSON").click()
    assert json.loads(tab.page.text_content("#plain")) == value
    shown = numbers(tab)
    assert int(shown["tokens"]) == tab.page.locator("#tokens .t").count()
    assert int(shown["forwards"]) >= 1
    accepted, proposed = shown["forced drafts"].split(" of ")
    assert 0 < int(accepted) <= int(proposed)
    assert tab.page.locator("#tokens .forced").count() == int(accepted)


def test_tokens_tell_what_was_legal(tab: Tab) -> None:
    choose(tab, "choice", "yes\nno")
    tab.run()
    text = answer(tab)
    assert text in ("yes", "no")
    tab.page.hover("#tokens .t:first-child")
    assert tab.text("#tip").splitlines() == [
        f'"{text[0]}" · token {ord(text[0]) - ord("!")}',
        "one of 2 legal tokens · sampled by the model",
    ]
    tab.page.hover("#tokens .t:nth-child(2)")
    assert "the only legal token" in tab.text("#tip")
    label = tab.page.get_attribute("#spark", "aria-label")
    assert "at most 2" in label
    # Over a column of the picture, too.
    tab.page.hover("#spark", position={"x": 3, "y": 20})
    assert "one of 2 legal tokens" in tab.text("#tip")


@pytest.mark.parametrize(
    ("kind", "guide", "pattern"),
    [
        ("regex", "[a-c]{3}-\\d{2}", r"[a-c]{3}-\d{2}"),
        ("choice", "positive\nnegative", "positive|negative"),
        ("grammar", 'root ::= "x" [0-9]{2} "\\n"', r"x\d\d\n"),
        ("lark", "start: /[é☃]{2}/", "[é☃]{2}"),
    ],
)
def test_each_kind_of_guide(tab: Tab, kind: str, guide: str, pattern: str) -> None:
    choose(tab, kind, guide)
    tab.wait("#guide-status", "✓")
    tab.run()
    text = answer(tab)
    assert re.fullmatch(pattern, text)
    tokens = tab.page.text_content("#tokens").replace("·", "")
    assert tokens == text  # characters of several tokens are put together
    assert tab.text("#badge") in ("matches", "complete")


def test_every_example_is_served(tab: Tab) -> None:
    for kind in KINDS[1:]:
        choose(tab, kind)
        count = tab.page.locator("#example option").count()
        assert count > 2
        for index in range(count - 1):
            tab.page.select_option("#example", str(index))
            tab.page.click("#check")
            tab.page.locator('#guide-status[data-state="good"]').wait_for()


def test_a_guide_that_cannot_be_enforced_is_explained(open_tab: Opener, served: Served) -> None:
    tab = open_tab(served.port, complains=True)  # Chromium reports the status itself
    tab.open()
    choose(tab, "json_schema", '{"properties": {"a": {"type": "strin"}}}')
    tab.wait("#guide-status", "/properties/a")
    tab.page.click("#run")
    tab.wait("#notice", "Invalid schema for response_format")
    assert "HTTP 400 · param response_format" in tab.text("#notice-more")
    assert "code invalid_json_schema" in tab.text("#notice-more")


def test_free_text_has_no_grammar(tab: Tab) -> None:
    choose(tab, "text")
    settings(tab, max="30", seed="4")
    tab.run()
    assert tab.page.is_hidden("#guide-box")
    assert tab.page.is_hidden("#spark")
    tab.page.hover("#tokens .t:first-child")
    assert "no grammar" in tab.text("#tip")


def test_a_seed_repeats_an_answer(tab: Tab) -> None:
    choose(tab, "regex", "[a-z]{40}")
    settings(tab, seed="7")
    texts = []
    for _ in range(2):
        tab.run()
        texts.append(answer(tab))
    assert texts[0] == texts[1]


def test_a_turning_cache_counts_what_it_evicts(tab: Tab, served: Served) -> None:
    choose(tab, "regex", "[a-z]{100}")
    tab.page.fill("#prompt", "x" * 20)
    tab.run()
    prompt, written = 22, 100  # <user> and <model> around the prompt
    assert numbers(tab)["prompt tokens"] == str(prompt)
    spec = served.engine.spec
    evicted = prompt + written - spec.sinks - spec.window
    assert tab.text("#cache-text") == f"64 of 64 tokens · {evicted} evicted"


@pytest.mark.parametrize("way", ["key", "button"])
def test_stopping_frees_the_slot(tab: Tab, served: Served, way: str) -> None:
    choose(tab, "json_schema", ENDLESS)
    settings(tab, max="20000")
    tab.page.click("#run")
    tab.page.locator("#tokens .t").nth(5).wait_for()
    assert served.free_slots < served.engine.slots
    assert tab.page.evaluate("document.activeElement.id") == "stop"
    if way == "key":
        tab.page.keyboard.press("Escape")
    else:
        tab.page.click("#stop")
    tab.wait("#status", "Stopped")
    assert tab.text("#badge") == "stopped"
    wait_for(lambda: served.free_slots == served.engine.slots)
    assert tab.page.evaluate("document.activeElement.id") == "run"


def test_an_answer_cut_off_says_so(tab: Tab) -> None:
    choose(tab, "json_schema", ENDLESS)
    settings(tab, max="10")
    tab.run()
    assert tab.text("#badge") == "cut off"
    assert "raise max. tokens" in tab.text("#status")


def test_more_tokens_than_the_server_allows(tab: Tab) -> None:
    settings(tab, max="20001")
    tab.page.click("#run")
    tab.wait("#notice", "from 1 to 20,000")


@pytest.mark.parametrize("seed", ["1e3", "1.5"])
def test_a_seed_that_is_no_whole_number_is_not_left_out(tab: Tab, seed: str) -> None:
    settings(tab, seed=seed)
    tab.page.click("#run")
    tab.wait("#notice", "whole number")


def test_leaving_the_editor_does_not_stop_the_answer(tab: Tab) -> None:
    choose(tab, "json_schema", ENDLESS)
    settings(tab, max="20000")
    tab.page.click("#run")
    tab.page.locator("#tokens .t").nth(5).wait_for()
    tab.page.focus("#guide")
    tab.page.keyboard.press("Escape")
    count = tab.page.locator("#tokens .t").count()
    tab.page.locator("#tokens .t").nth(count + 20).wait_for()
    tab.page.click("#stop")
    tab.wait("#status", "Stopped")


def test_keyboard_alone(tab: Tab) -> None:
    """From the top of the page to the tokens of an answer; nothing needs a mouse."""
    keyboard = tab.page.keyboard
    tab.page.evaluate("document.activeElement.blur()")
    order = []
    for _ in range(12):
        keyboard.press("Tab")
        name = tab.page.evaluate(
            "(one => one.id || one.name || one.className || one.tagName)(document.activeElement)"
        )
        order.append(name)
        outline = tab.page.evaluate(
            """(one => getComputedStyle(one.name === "kind" ? one.parentElement : one).outlineStyle)
            (document.activeElement)"""
        )
        assert outline == "solid" or name == "skip", name
        if name == "guide":  # where Tab writes
            keyboard.press("Escape")
    assert order == [
        *("skip", "theme", "prompt", "SUMMARY", "kind", "example", "guide"),
        *("check", "strict", "backend", "SUMMARY", "run"),
    ]

    tab.page.focus("input[name=kind]:checked")
    keyboard.press("ArrowRight")
    assert tab.page.is_checked("input[value=regex]")
    tab.page.focus("#guide")
    keyboard.press("Control+a")
    keyboard.type("ab{2}")
    keyboard.press("Control+Enter")
    tab.wait("#status", "Done")
    assert tab.page.evaluate("document.activeElement.id") == "guide"

    tab.page.focus("#copy")
    keyboard.press("Tab")
    for key, text in [(None, "a"), ("ArrowRight", "b"), ("End", "b"), ("Home", "a")]:
        if key:
            keyboard.press(key)
        assert tab.page.evaluate("document.activeElement.textContent") == text
        assert f'"{text}"' in tab.text("#tip")


def test_tab_indents_in_the_editor_until_escape(tab: Tab) -> None:
    keyboard = tab.page.keyboard
    tab.page.fill("#guide", "")
    tab.page.focus("#guide")
    keyboard.type("{")
    keyboard.press("Enter")
    keyboard.type('"a":')
    keyboard.press("Tab")
    keyboard.type("1")
    keyboard.press("Enter")
    keyboard.type("}")
    assert tab.page.input_value("#guide") == '{\n  "a":  1\n  }'
    keyboard.press("Control+z")
    assert tab.page.input_value("#guide") != '{\n  "a":  1\n  }'
    keyboard.press("Escape")
    keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.id") == "check"


@pytest.mark.parametrize("width", [360, 700, 1280])
def test_nothing_is_wider_than_the_screen(open_tab: Opener, served: Served, width: int) -> None:
    tab = open_tab(served.port, viewport={"width": width, "height": 740}, has_touch=width < 700)
    tab.open()
    settings(tab, max="150")
    choose(tab, "regex", "[a-z]{120}")
    tab.run()
    tab.page.hover("#tokens .t:last-child")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    columns = tab.page.evaluate(
        "getComputedStyle(document.querySelector('main')).gridTemplateColumns"
    )
    assert len(columns.split()) == (1 if width < 900 else 2)
    boxes = tab.page.locator("#tip, #tokens, #run").evaluate_all(
        "all => all.map(one => [one.getBoundingClientRect().left, one.getBoundingClientRect().right])"
    )
    assert all(0 <= left <= right <= width for left, right in boxes)


def test_a_phone_sees_the_answer_come_and_can_stop_it(open_tab: Opener, served: Served) -> None:
    phone: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "has_touch": True}
    tab = open_tab(served.port, reduced_motion="reduce", **phone)
    tab.open()
    choose(tab, "json_schema", ENDLESS)
    settings(tab, max="20000")
    tab.page.tap("#run")
    first = tab.page.locator("#tokens .t").first
    first.wait_for()
    assert 0 <= first.bounding_box()["y"] < 740
    assert first.evaluate("one => getComputedStyle(one).animationName") == "none"
    tab.page.tap("#stop")
    tab.wait("#status", "Stopped")
    first.tap()
    assert "legal token" in tab.text("#tip")


def test_dark_follows_the_system_and_can_be_switched(open_tab: Opener, served: Served) -> None:
    tab = open_tab(served.port, color_scheme="dark")
    tab.open()
    background = "getComputedStyle(document.body).backgroundColor"
    dark = tab.page.evaluate(background)
    tab.page.click("#theme")
    light = tab.page.evaluate(background)
    assert luminance(light) > 0.8 > 0.05 > luminance(dark)
    tab.page.emulate_media(color_scheme="light")
    tab.page.click("#theme")
    assert tab.page.evaluate(background) == dark


def luminance(color: str) -> float:
    """WCAG's relative luminance of ``rgb(...)``."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_what_wcag_asks_for(open_tab: Opener, served: Served, scheme: str) -> None:
    tab = open_tab(served.port, color_scheme=scheme)
    tab.open()

    def contrast(front: str, back: str) -> float:
        shades = tab.page.evaluate(
            """names => names.map(name => {
              const probe = document.body.appendChild(document.createElement("i"));
              probe.style.color = `var(--${name})`;
              const { color } = getComputedStyle(probe);
              probe.remove();
              return color;
            })""",
            [front, back],
        )
        bright, dim = sorted(map(luminance, shades), reverse=True)
        return (bright + 0.05) / (dim + 0.05)

    softs = [f"{name}-soft" for name in ("forced", "lookup", "draft", "prediction", "custom")]
    texts = [("ink", back) for back in ("bg", "card", "field", "soft", "empty", *softs)]
    texts += [("muted", back) for back in ("bg", "card", "field", "empty", "forced-soft")]
    texts += [("bad", "card"), ("bad", "bad-soft"), ("ink", "bad-soft"), ("good", "card")]
    texts += [
        ("good", "good-soft"),
        ("warn", "warn-soft"),
        ("on-accent", "accent"),
        ("card", "ink"),
    ]
    assert {pair: contrast(*pair) for pair in texts if contrast(*pair) < 4.5} == {}
    marks = (
        "accent",
        "sampled",
        "forced",
        "lookup",
        "draft",
        "prediction",
        "custom",
        "sink",
        "head",
    )
    assert {mark: contrast(mark, "card") for mark in marks if contrast(mark, "card") < 3} == {}


def test_no_field_is_without_a_name(tab: Tab) -> None:
    nameless = tab.page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button, canvas, [role=group]")]
          .filter(one => !one.labels?.length && !one.getAttribute("aria-label")
            && !one.getAttribute("aria-labelledby") && !one.textContent.trim())
          .map(one => one.id || one.outerHTML)"""
    )
    assert nameless == []
