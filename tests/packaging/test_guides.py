"""The first-hour guides: what can be said of them without an install, and the reading of one.

That they print what they say is test_guides_run.py's.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gorgo.config.load import load_config
from tests.packaging.commands import parsed
from tests.packaging.conftest import GUIDES, ROOT
from tests.packaging.guide import Step, agrees, free_ports, steps, with_ports

#: `gorgo WORDS`, up to whatever a shell would end it at; the 2 of `2>` is still on it.
_CALL = re.compile(r"(?:^|[;|{&(] *|\bdo )gorgo ([^|;&>\n]*)", re.MULTILINE)
_HERE_DOCUMENT = re.compile(r"^cat > (\S+) <<'END'\n(.*?)^END$", re.MULTILINE | re.DOTALL)


def typed(guide: Path) -> str:
    return "\n".join(step.typed for step in steps(guide.read_text()))


def test_there_is_one_for_each_of_the_three_users_and_one_behind_envoy() -> None:
    names = ["envoy", "operator", "platform", "researcher"]
    assert [guide.stem for guide in GUIDES] == [f"first-hour-{name}" for name in names]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_every_block_is_read_and_most_say_what_they_print(guide: Path) -> None:
    text, found = guide.read_text(), steps(guide.read_text())
    assert len(found) == text.count("```sh")
    assert sum(step.shown is not None for step in found) == text.count("```text") >= len(found) / 2


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_every_call_of_gorgo_is_one_that_the_command_line_takes(guide: Path) -> None:
    script = _HERE_DOCUMENT.sub("", typed(guide))
    lines = [re.sub(r" 2$", "", call).replace("$name", "us-ashburn-0") for call in _CALL.findall(script)]
    calls = [shlex.split(line, comments=True) for line in lines]
    assert len(calls) >= 6
    for words in calls:
        if words != ["--version"]:
            parsed(words)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_every_python_file_of_a_guide_compiles(guide: Path) -> None:
    files = _HERE_DOCUMENT.findall(typed(guide))
    assert files
    for name, text in files:
        if name.endswith(".py"):
            compile(text, name, "exec")


def test_the_operator_s_regions_yaml_is_accepted(tmp_path: Path) -> None:
    (operator,) = [guide for guide in GUIDES if guide.stem.endswith("operator")]
    (text,) = [text for name, text in _HERE_DOCUMENT.findall(typed(operator)) if name == "regions.yaml"]
    (tmp_path / "regions.yaml").write_text(text)
    assert len(load_config(tmp_path / "regions.yaml").replicas) == 3


def test_make_targets_that_guides_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {target for guide in GUIDES for target in re.findall(r"^make ([a-z-]+)", typed(guide), re.M)} <= targets


# -- reading and comparing


def test_what_is_typed_and_shown_is_read_with_its_line_and_its_needs() -> None:
    text = "# G\n\n```sh\na\n```\n\nwords\n\n```sh jq\nb\nc\n```\n\n```text\nshown\n```\n"
    assert steps(text) == [Step("a\n", None, (), 3), Step("b\nc\n", "shown\n", ("jq",), 9)]


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("p95 1,314 ms\n", "p95 12.5 ms\n"),
        ("a   b\n──\n", "\na b\n──────\n"),
        ("by …: first hour\n", "by root: first hour\n"),
        ("first\n…\nlast\n", "first\nlast\n"),
        ("first\n…\nlast\n", "first\n1\n\n2\nlast\n"),
        ("at 2026-11-21T23:03:57.194+00:00, seoul-0\n", "at 2027-01-02T03:04:05.006+00:00, seoul-0\n"),
        ("http://127.0.0.1:8080\n", "http://127.0.0.1:41234\n"),
    ],
)
def test_figures_blanks_and_what_is_left_out_may_differ(shown: str, printed: str) -> None:
    assert agrees(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("frozen\n", "not frozen\n"),
        ("a\n", "a\nb\n"),
        ("a\nb\n", "a\n"),
        ("p95 12 ms\n", "p95 - ms\n"),
        ("by …: first\n", "by root: second\n"),
        ("a.c\n", "abc\n"),
        ("ok\n", ""),
    ],
)
def test_words_may_not(shown: str, printed: str) -> None:
    assert not agrees(shown, printed)


def test_ports_are_replaced_and_nothing_else() -> None:
    text = "http://127.0.0.1:8080 18080 8080.5 127.0.0.1:30000"
    assert with_ports(text, {8080: 1111, 30000: 2222}) == "http://127.0.0.1:1111 18080 1111.5 127.0.0.1:2222"
    assert len(set(free_ports([1, 2, 3]).values())) == 3
