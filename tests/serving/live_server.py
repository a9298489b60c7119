"""A server on a real port of this machine, in a thread."""

import threading
import time
from contextlib import contextmanager

import uvicorn


@contextmanager
def live(app, **options):
    """The address of a server that runs an application until the block ends; `options` are uvicorn's."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="on", log_config=None, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < until
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
