"""Chromium, and a page in it that must not complain nor ask anybody else."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

# Headless, as root in a container as well, and nothing to do but what it is told.
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser. Until it is closed, an event loop runs in this thread: others must not need one."""
    found = [shutil.which(name) for name in ("chromium", "google-chrome")]
    path = next((path for path in found if path), None)
    if path is None:
        pytest.skip("no Chromium on PATH: run `make chromium`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


@dataclasses.dataclass
class Tab:
    """A tab of the browser.

    Attributes:
      page: Playwright's page.
      url: where the page is served.
      complaints: errors and warnings of the console, and uncaught exceptions.
      requests: all requests that it made.
    """

    page: Any
    url: str
    complaints: list[str] = dataclasses.field(default_factory=list)
    requests: list[Any] = dataclasses.field(default_factory=list)

    def open(self, fragment: str = "") -> None:
        """Load the page, and wait until it knows the server and its examples."""
        self.page.goto("about:blank")  # another fragment alone would load nothing
        self.page.goto(f"{self.url}/{fragment}")
        self.page.wait_for_selector('#server[data-state="up"]')
        self.page.wait_for_function("() => document.querySelectorAll('#example option').length > 1")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def wait(self, selector: str, text: str) -> None:
        """Wait until an element is seen that contains a text."""
        self.page.locator(selector, has_text=text).wait_for()

    def run(self, done: str = "Done") -> None:
        """Run, and wait for the end."""
        self.page.click("#run")
        self.wait("#status", done)


Opener = Callable[..., Tab]


@pytest.fixture
def open_tab(chromium: Any) -> Iterator[Opener]:
    """Opens a tab at a port of this machine. At its end it must have complained about nothing
    (unless ``complains``) and have asked nobody but that port."""
    contexts: list[Any] = []
    tabs: list[tuple[Tab, bool]] = []

    def new(port: int, *, complains: bool = False, **options: Any) -> Tab:
        options = {"viewport": {"width": 1280, "height": 900}} | options
        context = chromium.new_context(**options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        tab = Tab(context.new_page(), f"http://127.0.0.1:{port}")
        tab.page.on(
            "console",
            lambda said: said.type in ("error", "warning") and tab.complaints.append(said.text),
        )
        tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.page.on("request", lambda request: tab.requests.append(request))
        tabs.append((tab, complains))
        return tab

    yield new
    for context in contexts:
        context.close()
    for tab, complains in tabs:
        asked = {urlsplit(request.url)[:2] for request in tab.requests}
        assert asked <= {urlsplit(tab.url)[:2], ("about", ""), ("data", "")}
        assert complains or tab.complaints == []
