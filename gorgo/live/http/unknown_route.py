"""The 404 of a path without a route: it names the nearest route and lists all of them."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Route

from gorgo.errors import closest
from gorgo.live.http.errors import HttpError

#: Methods that the framework adds itself.
_IMPLIED = frozenset({"HEAD", "OPTIONS"})


def unknown_route(path: str, routes: Iterable[BaseRoute]) -> HttpError:
    """Return the error for `path`, which it does not repeat.

    A path that ends in a route's path, or has only its end, is most similar to it: a client's base URL is often off by
    `/v1`.
    """
    known = [route for route in routes if isinstance(route, Route)]
    paths = sorted({route.path.replace(":path}", "}") for route in known})
    bare = path[:200].rstrip("/")
    near = next((one for one in paths if bare and (one.endswith(bare) or bare.endswith(one))), None)
    hint = closest(bare, paths) if near is None else f" (did you mean {near!r}?)"
    return HttpError(404, "not_found", f"no such route{hint}; there are: {', '.join(map(_shown, known))}")


def _shown(route: Route) -> str:
    methods = sorted((route.methods or set()) - _IMPLIED)
    path = route.path.replace(":path}", "}")
    return f"{'/'.join(methods)} {path}" if methods else path
