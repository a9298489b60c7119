"""Visits of the page of a server, in a browser."""

from contextlib import contextmanager

from live_server import live

from browser import Window
from vit_memory import Bundle
from vit_memory.serving.app import create_app
from vit_memory.serving.settings import Settings


@contextmanager
def serving(folder, tasks, branches, **settings):
    """A server of a bundle with these tasks; its address."""
    app = create_app(Bundle.create(folder, tasks[0].backbone, tasks, branches), Settings(**settings))
    with live(app) as address:
        try:
            yield f"{address}/"
        finally:
            app.state.server.stopping = True  # as the command does on SIGTERM: streams of events end


class Visit(Window):
    """The page of a server in a browser window of its own."""

    def card(self, name):
        return self.page.locator(f'#cards [data-task="{name}"]')

    def wait_for_answer(self, name="pets"):
        self.card(name).locator(".bars, .values").wait_for()
        self.page.locator("#answers:not([aria-busy])").wait_for()
