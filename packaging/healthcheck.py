"""Exit code 0 if an address answers well within two seconds, else 1 and why: the image has no curl and no gRPC probe.

    python healthcheck.py http://127.0.0.1:8080/ready
    python healthcheck.py grpc://127.0.0.1:9002/readiness

Well is 2xx, or SERVING by the health service of gRPC. With `https` and `grpcs` the certificate is not checked: the
caller is the same machine, and asks for life alone.
"""

from __future__ import annotations

import socket
import ssl
import sys
import urllib.error
import urllib.request
from urllib.parse import urlsplit

#: Below the three seconds that the container engine gives it, so that the reason is said.
TIMEOUT_S = 2.0
#: `HealthCheckResponse` with the status SERVING, behind the prefix of a message: not compressed, two bytes.
_SERVING = b"\x00\x00\x00\x00\x02\x08\x01"
_MAX_ANSWER_BYTES = 64 * 1024


def main() -> None:
    """The address is the argument."""
    schemes = {"http": _http, "https": _http, "grpc": _grpc, "grpcs": _grpc}
    url = sys.argv[1] if len(sys.argv) == 2 else ""
    check = schemes.get(urlsplit(url).scheme)
    if check is None or not urlsplit(url).netloc:
        raise SystemExit("usage: healthcheck.py http[s]://HOST:PORT/PATH|grpc[s]://HOST:PORT/SERVICE")
    try:
        check(url)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise SystemExit(f"{url}: {error}") from error


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _http(url: str) -> None:
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_unverified()))
    urllib.request.build_opener(*handlers).open(url, timeout=TIMEOUT_S).close()


def _grpc(url: str) -> None:
    """Call `Check` of the health service. Raises `ValueError` for any answer but SERVING."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 9002), timeout=TIMEOUT_S) as connection:
        if parts.scheme == "grpc":
            answer = _called(connection, parts.netloc, parts.path.strip("/"))
        else:
            context = _unverified()
            context.set_alpn_protocols(["h2"])
            with context.wrap_socket(connection) as secured:
                answer = _called(secured, parts.netloc, parts.path.strip("/"))
    if answer != _SERVING:
        raise ValueError("not serving, or no such service")


def _called(connection: socket.socket, authority: str, service: str) -> bytes:
    """Return the body of the answer."""
    from h2.connection import H2Connection
    from h2.events import ConnectionTerminated, DataReceived, StreamEnded, StreamReset
    from h2.exceptions import ProtocolError

    message = b"\x0a" + bytes((len(service),)) + service.encode()
    client = H2Connection()
    client.initiate_connection()
    path = "/grpc.health.v1.Health/Check"
    head = [(":method", "POST"), (":scheme", "http"), (":authority", authority), (":path", path)]
    client.send_headers(1, [*head, ("content-type", "application/grpc"), ("te", "trailers")])
    client.send_data(1, len(message).to_bytes(5) + message, end_stream=True)
    body = bytearray()
    while len(body) <= _MAX_ANSWER_BYTES:
        connection.sendall(client.data_to_send())
        received = connection.recv(_MAX_ANSWER_BYTES)
        try:
            events = client.receive_data(received)
        except ProtocolError as error:
            raise ValueError(f"no HTTP/2: {error}") from error
        body += b"".join(event.data for event in events if isinstance(event, DataReceived))
        if not received or any(isinstance(one, StreamEnded | StreamReset | ConnectionTerminated) for one in events):
            break
    return bytes(body)


if __name__ == "__main__":
    main()
