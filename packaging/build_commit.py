"""Build hook of hatchling: a wheel carries the commit that it is made from, as `gorgo/commit.txt`.

The commit is that of the clone, else the one that an sdist has in `packaging/commit.txt`, else `GORGO_COMMIT` of the
environment (a container is built without the clone's `.git`). Without any of them the build has the version alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_IN_SDIST = "packaging/commit.txt"


class CommitHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # its clone says it, also after the next commit
        root = Path(self.root)
        commit = _commit(root)
        if commit is None:
            return
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "commit.txt"
        path.write_text(f"{commit}\n", encoding="utf-8")
        build_data["force_include"][str(path)] = _IN_SDIST if self.target_name == "sdist" else "gorgo/commit.txt"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()


def _commit(root: Path) -> str | None:
    # By its path: the project is not importable while it is built.
    spec = importlib.util.spec_from_file_location("gorgo_version", root / "gorgo" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: str | None = module.commit_of_clone(root) or module.read_commit(root / _IN_SDIST)
    given = os.environ.get("GORGO_COMMIT", "")
    return found or (given if re.fullmatch(r"[0-9a-f]{40}", given) else None)
