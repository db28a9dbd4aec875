"""The first-hour guides: what can be said of them without an install, and each typed from its first line to its
last.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from gorgo.config.load import load_config
from tests.packaging.commands import parsed
from tests.packaging.conftest import GUIDES, ROOT
from tests.packaging.guide import Step, agrees, run, steps, with_ports

# --- The first-hour guides: what can be said of them without an install, and the reading of one.
#
# That they print what they say is tested below, behind the install.


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


def test_a_guide_may_be_typed_after_another_one_in_the_same_clone() -> None:
    """Whoever reads two of them begins each in a folder that is not there yet."""
    folders = [found for guide in GUIDES for found in re.findall(r"^mkdir (\.\./\S+)", guide.read_text(), re.MULTILINE)]
    assert len(folders) == len(set(folders)) == len(GUIDES)


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


# --- Each first-hour guide, typed from its first line to its last: a fresh clone, an empty folder, a clean
# environment.
#
# Needs the package index for the installs, and minutes; steps that name a program are left out, loudly, where it is
# not.


#: The longest runs a campaign of two generations on an hour's traffic, on two cores that may be busy.
TIMEOUT_S = 1500


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What git knows of this tree and nothing else, as a clone with one commit: a wheel made in it says which."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("GUIDES NOT RUN: needs git, and a clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    folder = tmp_path / "gorgo"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    author = ("-c", "user.name=reader", "-c", "user.email=reader@localhost", "-c", "commit.gpgsign=false")
    for words in (("init", "--quiet"), ("add", "--force", "."), (*author, "commit", "--quiet", "--message", "Clone")):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)
    return folder


def environment() -> dict[str, str]:
    """A newcomer's: nothing of this one's, no colours, an empty configuration of terraform."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "LANG", "TMPDIR") if name in os.environ}
    path = os.pathsep.join(part for part in kept["PATH"].split(os.pathsep) if "/.venv/" not in f"{part}/")
    return kept | {"PATH": path, "TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1", "TERM": "dumb"}


@pytest.mark.system
@pytest.mark.filterwarnings("default:NOT RUN")
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_prints_what_it_says(guide: Path, clone: Path, tmp_path: Path) -> None:
    todo = steps(guide.read_text())
    left_out = [step for step in todo if step.missing()]
    for step in left_out:
        warnings.warn(f"NOT RUN: {guide.name}, line {step.line} needs {', '.join(step.missing())}", stacklevel=1)
    (tmp_path / "records").mkdir()
    done = run(
        [step for step in todo if step not in left_out],
        clone=clone,
        records=tmp_path / "records",
        environ=environment(),
        timeout_s=TIMEOUT_S,
    )
    assert [fault for one in done if (fault := one.fault())] == []


# --- The reader of command lines, which other tests rely on to refuse what the command line would.


def test_words_become_the_command_s_own_values() -> None:
    name, values = parsed(["engine", "--replica", "a", "--port", "0"])
    assert (name, values["replica"], values["port"], values["config"]) == ("engine", "a", 0, Path("regions.yaml"))


def test_a_command_of_two_words_is_found() -> None:
    assert parsed(["datasets", "describe", "chat-small"])[0] == "datasets describe"


@pytest.mark.parametrize(
    "words",
    [
        ["server"],
        ["serve", "--listen", "x"],
        ["engine"],
        ["engine", "--replica", "a", "--port", "seven"],
        ["engine", "--replica", "a", "--port", "70000"],
        ["datasets", "lists"],
    ],
)
def test_what_the_command_line_would_refuse_is_refused(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing|should be"):
        parsed(words)
