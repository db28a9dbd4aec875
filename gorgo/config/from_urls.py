"""A regions.yaml from the URLs of replicas: what `gorgo serve --replica` runs, and prints for a user who needs a file.

`URL` is a replica in the region `local`, where the proxy is, and `REGION=URL` one in another. Names are the region and
a number. A `/v1` at the end, as clients of OpenAI write it, is left out.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from gorgo.config.addresses import URL_EXPECTED, checked_url
from gorgo.config.replica_advice import without_api_path
from gorgo.errors import ConfigError

LOCAL = "local"

#: Set, it holds the API key of every replica that is given by its URL.
KEY_VARIABLE = "GORGO_REPLICA_API_KEY"

_NAMED = re.compile(r"(?P<region>[A-Za-z0-9][A-Za-z0-9._-]{0,62})=(?P<url>.*)", re.DOTALL)


def config_text(
    urls: Sequence[str], *, engine: str, proxy: Mapping[str, str | None], environ: Mapping[str, str]
) -> str:
    """Return the file. Raises `ConfigError` for a URL that is none, and for one that is given twice.

    Parameters
    ----------
    urls:
        `URL` or `REGION=URL` of each replica.
    engine:
        Of all replicas.
    proxy:
        Further keys of `proxy`; `None` leaves one out.
    environ:
        May hold a key for the replicas, which the file names and does not contain.

    Example
    -------
    >>> print(config_text(["http://a:30000"], engine="auto", proxy={}, environ={}))
    proxy:
      region: "local"
    regions:
      - name: "local"
    replicas:
      - name: "local-0"
        region: "local"
        url: "http://a:30000"
        engine: "auto"
    <BLANKLINE>
    """
    replicas = [_region_and_url(text) for text in urls]
    twice = [url for url, n in Counter(url.rstrip("/") for _, url in replicas).items() if n > 1]
    if twice:
        raise ConfigError(f"--replica {twice[0]}: given twice; expected each replica once")
    lines = ["proxy:", f"  region: {_scalar(LOCAL)}"]
    lines += [f"  {key}: {_scalar(value)}" for key, value in proxy.items() if value is not None]
    lines += ["regions:", *(f"  - name: {_scalar(name)}" for name in dict.fromkeys([LOCAL, *dict(replicas)]))]
    lines.append("replicas:")
    numbers: Counter[str] = Counter()
    for region, url in replicas:
        lines += [f"  - name: {_scalar(f'{region}-{numbers[region]}')}", f"    region: {_scalar(region)}"]
        lines += [f"    url: {_scalar(url)}", f"    engine: {_scalar(engine)}"]
        if environ.get(KEY_VARIABLE):
            lines.append(f"    api_key_env: {_scalar(KEY_VARIABLE)}")
        numbers[region] += 1
    return "\n".join(lines) + "\n"


def _region_and_url(text: str) -> tuple[str, str]:
    named = _NAMED.fullmatch(text)
    region, url = (LOCAL, text) if named is None else (named["region"], named["url"])
    try:
        return region, without_api_path(checked_url(url))
    except ValueError:
        shown = "text with '@', not shown because it may hold a password" if "@" in text else ascii(text[:100])
        raise ConfigError(f"--replica: {shown}; expected URL or REGION=URL with {URL_EXPECTED}") from None


def _scalar(text: str) -> str:
    """Return the text as YAML, in which nothing is a reference to a variable."""
    return json.dumps(text.replace("$", "$$"))
