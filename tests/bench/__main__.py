"""`python -m tests.bench [NAME ...]`: run all benchmarks here, or those named. One is a module with `run()`."""

from __future__ import annotations

import sys
from importlib import import_module
from pkgutil import iter_modules

import tests.bench


def main(wanted: list[str]) -> int:
    names = [module.name for module in iter_modules(tests.bench.__path__) if not module.ispkg]
    names.remove("__main__")
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are: {', '.join(names)}", file=sys.stderr)
        return 2
    for name in wanted or names:
        run = getattr(import_module(f"tests.bench.{name}"), "run", None)
        if callable(run):
            print(f"== {name}")
            run()
            print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
