"""Which tree a relay under test runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.relay.targets import Place, UnavailableError, other_gorgo


def test_another_tree_may_be_a_folder_or_a_commit(tmp_path: Path) -> None:
    tree, folder = tmp_path / "compiled", tmp_path / "folder"
    tree.mkdir()
    folder.mkdir()
    place = Place(port=1, replicas=[2], folder=folder)
    assert other_gorgo(str(tree))(place).tree == tree
    with pytest.raises(UnavailableError, match="no-such-commit"):
        other_gorgo("no-such-commit")(place)
