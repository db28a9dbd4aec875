"""Exit code 0 if an address answers with 2xx within two seconds, else 1 and why: the image has no curl.

    python healthcheck.py http://127.0.0.1:8080/ready

An `https` address is asked without looking at its certificate: the caller is the same machine, and asks for life alone.
"""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request

#: Below the three seconds that the container engine gives it, so that the reason is said.
TIMEOUT_S = 2.0


def main() -> None:
    """The address is the argument."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith(("http://", "https://")):
        raise SystemExit("usage: healthcheck.py URL")
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified))
    try:
        urllib.request.build_opener(*handlers).open(sys.argv[1], timeout=TIMEOUT_S).close()
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise SystemExit(f"{sys.argv[1]}: {error}") from error


if __name__ == "__main__":
    main()
