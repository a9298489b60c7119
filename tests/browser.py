"""Pages in a browser window of their own: what they ask for, what they complain about, and whether they fit."""

import shutil
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

# Words of tables that stand on more than one line; names of files and digests may.
BROKEN_WORDS = """
[...document.querySelectorAll("th, td")].flatMap(cell => {
  const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), broken = [], range = document.createRange();
  for (let text; (text = texts.nextNode()); )
    for (const word of text.data.matchAll(/[A-Za-z]{2,15}/g)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(box => box.top)).size > 1) broken.push(word[0]);
    }
  return broken;
})
"""
WAIT_MS = 20_000  # the machine may be busy
WIDTHS = (1280, 400)
ARGUMENTS = [
    *("--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking"),
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),  # a camera that shows a moving disc
]


@contextmanager
def open_browser():
    """Chromium; skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        browser.close()


class Window:
    """A page in a browser window of its own, with all that it asked for and complained about."""

    def __init__(self, browser, url, width=1280, scheme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.errors, self.requests, self.host = [], [], urlsplit(url).netloc
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def check(self):
        """Nothing was asked of another host, nothing failed, nothing is wider than the window, no word is broken."""
        hosts = {urlsplit(address).netloc for address in self.requests if not address.startswith(("blob:", "data:"))}
        assert hosts == {self.host}
        assert self.errors == []
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert self.page.evaluate(BROKEN_WORDS) == []
