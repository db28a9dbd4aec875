"""An authority of a test, made by the `openssl` program, and an engine that shows one of its certificates."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="needs the openssl program to make certificates")
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """Makes pairs in a folder: `NAME.crt` and `NAME.key`, signed by `ca.crt`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = str(folder / "ca.crt")
        key = str(folder / "ca.key")
        self._openssl("req", "-x509", *NEW_KEY, "-keyout", key, "-out", self.ca, "-subj", "/CN=authority", "-days", "2")

    def pair(self, name: str) -> tuple[str, str]:
        cert, key, ask, more = (str(self.folder / f"{name}.{kind}") for kind in ("crt", "key", "csr", "ext"))
        Path(more).write_text("subjectAltName=IP:127.0.0.1\n")
        self._openssl("req", *NEW_KEY, "-keyout", key, "-out", ask, "-subj", f"/CN={name}")
        signing = ("-CA", self.ca, "-CAkey", str(self.folder / "ca.key"), "-CAcreateserial", "-extfile", more)
        self._openssl("x509", "-req", "-in", ask, "-out", cert, "-days", "2", *signing)
        return cert, key

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca)

    @staticmethod
    def _openssl(*arguments: str) -> None:
        assert OPENSSL is not None
        subprocess.run((OPENSSL, *arguments), check=True, capture_output=True)


@asynccontextmanager
async def engine(pair: tuple[str, str], ca: str | None) -> AsyncIterator[str]:
    """An engine behind TLS, which asks for a certificate of `ca` where one is given."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
    context.load_cert_chain(*pair)
    context.verify_mode = ssl.CERT_NONE if ca is None else ssl.CERT_REQUIRED

    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"safe": True})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
