"""Visits of the page of a server, in a browser."""

from contextlib import contextmanager
from urllib.parse import urlsplit

from live_server import live

from vit_memory import Bundle
from vit_memory.serving.app import create_app
from vit_memory.serving.settings import Settings

_WAIT_MS = 20_000  # the machine may be busy


@contextmanager
def serving(folder, tasks, branches, **settings):
    """A server of a bundle with these tasks; its address."""
    app = create_app(Bundle.create(folder, tasks[0].backbone, tasks, branches), Settings(**settings))
    with live(app) as address:
        try:
            yield f"{address}/"
        finally:
            app.state.server.stopping = True  # as the command does on SIGTERM: streams of events end


class Visit:
    """A page in a browser window of its own, with all that it asked for and complained about."""

    def __init__(self, browser, url, width=1280, scheme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(_WAIT_MS)
        self.errors, self.requests, self.host = [], [], urlsplit(url).netloc
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def card(self, name):
        return self.page.locator(f'#cards [data-task="{name}"]')

    def wait_for_answer(self, name="pets"):
        self.card(name).locator(".bars, .values").wait_for()
        self.page.locator("#answers:not([aria-busy])").wait_for()

    def check(self):
        """Nothing was asked of another host, nothing failed, and nothing is wider than the window."""
        hosts = {urlsplit(address).netloc for address in self.requests if not address.startswith(("blob:", "data:"))}
        assert hosts == {self.host}
        assert self.errors == []
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
