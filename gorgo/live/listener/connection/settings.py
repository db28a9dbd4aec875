"""What the connections of one listener share: the application, hypercorn's configuration, the sum of incomplete heads.

hypercorn's public `Config` gives timeouts, bounds, own headers and the log; its server is `hypercorn_server`'s.
"""

from __future__ import annotations

from time import time
from typing import Any

from hypercorn.config import Config

from gorgo.live.listener.heads import PartialHeads


class ServerSettings:
    """Settings of one listener.

    Parameters
    ----------
    app:
        The ASGI application.
    config:
        Its timeouts, bounds, root path, log, and the headers that it adds to each response.
    heads:
        Bytes of incomplete heads, of all connections in sum.
    """

    def __init__(self, app: Any, config: Config, heads: PartialHeads) -> None:
        self.app = app
        self.heads = heads
        self.keep_alive_s = float(config.keep_alive_timeout)
        self.requests_per_connection: int = config.keep_alive_max_requests
        self.root_path: str = config.root_path
        self.log = config.log
        self._config = config
        self._own_headers = b""
        self._made_s = -1

    def own_headers(self) -> bytes:
        """Return the lines of `date`, `server` and `alt-svc` as configured, made once per second."""
        now_s = int(time())
        if now_s != self._made_s:
            pairs = self._config.response_headers("h11")
            self._own_headers = b"".join(b"%b: %b\r\n" % pair for pair in pairs)
            self._made_s = now_s
        return self._own_headers
