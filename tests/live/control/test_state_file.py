"""Changes one at a time, each written before it is in force, and the state file that they are written to."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.config import atomic
from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, ProxyConfig, RegionConfig
from gorgo.core.limits import BufferBudget
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.errors import ConfigError, StateError
from gorgo.live.control.state_file import (
    MAX_VERSION,
    ConfigSnapshot,
    Frozen,
    InitialState,
    PersistedState,
    StateFile,
    encode_state,
    initial_state,
    parse_state,
)
from gorgo.live.control.transactions import ChangeQueue, ChangeRequest, PlannedChange, WeightsChange
from gorgo.live.telemetry.metrics import Metrics
from gorgo.policies.registry import make_policy

# --- The state file: read back as written, damaged ones refused, writes that happen whole or not at all.


KEPT = PersistedState(
    policy="gorgo",
    weights={"w_rtt": 0.7, "w_queue": 0.1},
    version=7,
    frozen=Frozen("2026-04-01T12:00:00.000+00:00", "held-out week", "me"),
    draining=frozenset({"r1"}),
    configured=ConfigSnapshot("gorgo", {"w_rtt": 0.5}, frozenset({"r2"})),
)
TEXTS = st.text(max_size=20)
NAMES = st.frozensets(st.text(max_size=8), max_size=4)
WEIGHTS = st.dictionaries(TEXTS, st.floats(allow_nan=False, allow_infinity=False), max_size=4)


@given(
    kept=st.builds(
        PersistedState,
        policy=st.text(min_size=1, max_size=20),
        weights=WEIGHTS,
        version=st.integers(1, MAX_VERSION),
        frozen=st.none() | st.builds(Frozen, st.text(min_size=1), st.none() | TEXTS, st.none() | TEXTS),
        draining=NAMES,
        configured=st.builds(ConfigSnapshot, st.text(min_size=1, max_size=20), WEIGHTS, NAMES),
    )
)
def test_what_is_written_is_read(kept: PersistedState) -> None:
    assert parse_state(encode_state(kept), source="state") == kept


def test_what_was_learned_of_lengths_is_read_as_written() -> None:
    learned = {"text": [["m", 9000.0, 3000.0]], "media": [[None, "image", 20, 3.0, 3000.0, 6000.0]]}
    kept = replace(KEPT, learned=learned)
    assert parse_state(encode_state(kept), source="state") == kept
    assert "learned" not in json.loads(encode_state(KEPT))


def test_missing_file_is_a_fresh_start(tmp_path: Path) -> None:
    assert StateFile(tmp_path / "state").read() is None


def test_file_is_replaced_whole_for_its_owner_alone(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state")
    (tmp_path / ".state.new").write_text("what a killed process left")
    for version in (7, 8):
        file.write(replace(KEPT, version=version))
    found = file.read()
    assert found is not None
    assert found.version == 8
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "volume" / "state")
    StateFile(tmp_path / "state").write(KEPT)
    assert (tmp_path / "state").is_symlink()
    assert StateFile(tmp_path / "volume" / "state").read() == KEPT


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_disk_that_fails_leaves_the_old_file_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    file = StateFile(tmp_path / "state")
    file.write(KEPT)

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_write_synced", full) if call == "write" else patch.setattr(os, call, full)
        with pytest.raises(StateError, match=r"state file .*/state cannot be written: No space left on device"):
            file.write(replace(KEPT, version=9))
    assert file.read() == KEPT
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def document(**changes: Any) -> bytes:
    return json.dumps(json.loads(encode_state(KEPT)) | changes).encode()


def test_every_shorter_file_is_damaged() -> None:
    text = encode_state(KEPT).rstrip()
    for length in range(len(text)):
        with pytest.raises(ConfigError, match="the state file is damaged"):
            parse_state(text[:length], source="state")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"\xff", "not JSON"),
        (b"[]", "has no key gorgo_state"),
        (b"{}", "has no key gorgo_state"),
        (b"[" * 50_000, "not JSON"),
        (b" " * (2 << 20), "larger than"),
        (document(gorgo_state=True), "has no key gorgo_state"),
        (document(version=0), "version is '0'; expected a whole number from 1"),
        (document(version=True), "version is 'True'"),
        (document(policy=""), "policy is ''; expected text"),
        (document(version=1 << 60), "version is .*; expected a whole number from 1 to"),
        (document(weights={"w_rtt": "1"}), "weights is .*; expected finite numbers by name"),
        (document(weights={"w_rtt": 10**400}), "weights is .*; expected finite numbers by name"),
        (document(weights={"w_rtt": float("nan")}), "weights is .*; expected finite numbers by name"),
        (document(frozen={}), "frozen does not have exactly the keys"),
        (document(frozen={"since": 1, "reason": None, "by": None}), "since is '1'; expected text"),
        (document(frozen={"since": "x", "reason": 1, "by": None}), r"frozen\.reason is '1'; expected text or null"),
        (document(draining="r1"), "draining is 'r1'; expected a list of names"),
        (document(configured=None), "configured does not have exactly the keys"),
        (document(learned=[]), r"learned is .*; expected lists by name"),
        (document(learned={"text": [["m", 0, 5]]}), r"learned\.text is .*expected what a process has learned"),
        (document(learned={"media": [["m", "image", 20, 1]]}), r"learned\.media is .*expected lists of 6 values"),
    ],
)
def test_damaged_file_is_an_error_with_place_and_advice(text: bytes, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^state: the state file is damaged: .*{expected}") as caught:
        parse_state(text, source="state")
    assert "move it away to start from the configuration" in str(caught.value)


def test_file_of_a_newer_form_is_not_read() -> None:
    with pytest.raises(ConfigError, match="format 2 is of a newer GORGO; this one reads up to 1"):
        parse_state(document(gorgo_state=2, future=1), source="state")


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "state"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="the state file is damaged"):
        StateFile(pipe).read()


def test_what_is_no_file_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the state file cannot be read: Is a directory"):
        StateFile(tmp_path).read()


@pytest.mark.parametrize(("more", "read"), [(0, True), (1, False)])
def test_a_state_file_may_be_a_mebibyte(more: int, read: bool) -> None:
    text = encode_state(KEPT)
    text += b" " * (1_048_576 - len(text) + more)
    if read:
        assert parse_state(text, source="state") == KEPT
        return
    with pytest.raises(ConfigError, match="is larger than 1048576 bytes"):
        parse_state(text, source="state")


@pytest.mark.parametrize(("version", "read"), [(1, True), (2**53, True), (2**53 + 1, False), (0, False)])
def test_versions_are_those_that_every_reader_of_json_can_count(version: int, read: bool) -> None:
    if read:
        assert parse_state(document(version=version), source="state").version == version
        return
    with pytest.raises(ConfigError, match="expected a whole number from 1 to 9007199254740992"):
        parse_state(document(version=version), source="state")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("[]")
    with pytest.raises(ConfigError, match=rf"^{tmp_path / 'state'}: the state file is damaged"):
        StateFile(tmp_path / "state").read()


def test_a_freeze_is_without_reason_and_operator_unless_given() -> None:
    assert Frozen("x").as_dict() == {"since": "x", "reason": None, "by": None}


FROZEN = Frozen("2026-04-01T12:00:00+00:00")


def config(policy: str = "gorgo", weights: dict[str, float] | None = None, draining: str = "") -> Config:
    rows = tuple(ReplicaConfig(name=name, region="x", url="http://h", draining=name in draining) for name in "abc")
    proxy = ProxyConfig(region="x", policy=policy, weights=weights or {})
    return Config(proxy=proxy, regions=(RegionConfig(name="x"),), replicas=rows, limits=LimitsConfig())


def kept(before: Config, **changes: Any) -> PersistedState:
    """As a proxy that ran by `before` left it."""
    same = PersistedState(
        policy="gorgo",
        weights={"w_rtt": 0.7, "w_queue": 0.2},
        version=9,
        frozen=None,
        draining=frozenset(),
        configured=ConfigSnapshot.by(before),
    )
    return replace(same, **changes)


def started(found: PersistedState | None, now: Config) -> InitialState:
    policy = make_policy(now.proxy.policy)
    return initial_state(
        found, now, policy, Weights.of(policy.weight_specs, now.proxy.weights, version=1), source="state"
    )


def test_without_a_state_the_configuration_holds() -> None:
    start = started(None, config(weights={"w_rtt": 0.6}, draining="b"))
    assert (start.weights["w_rtt"], start.weights.version, start.draining) == (0.6, 1, frozenset("b"))
    assert (start.frozen, start.source) == (None, "configuration")


def test_what_was_set_live_holds_while_the_configuration_says_the_same() -> None:
    start = started(kept(config()), config())
    assert (dict(start.weights), start.weights.version) == ({"w_rtt": 0.7, "w_queue": 0.2}, 9)
    assert start.source == "state"


def test_defaults_spelt_out_are_no_edit() -> None:
    assert started(kept(config()), config(weights={"w_rtt": 0.5, "w_queue": 0.1})).source == "state"


@pytest.mark.parametrize("edited", [config(weights={"w_rtt": 0.6}), config("nearest")])
def test_edited_configuration_holds_under_a_new_version(edited: Config) -> None:
    start = started(kept(config()), edited)
    assert (start.policy.name, start.weights.version, start.source) == (edited.proxy.policy, 10, "configuration")


def test_edit_to_what_is_in_force_needs_no_new_version() -> None:
    start = started(kept(config()), config(weights={"w_rtt": 0.7, "w_queue": 0.2}))
    assert start.weights.version == 9


def test_frozen_weights_hold_whatever_the_configuration_says() -> None:
    for now in (config(), config(weights={"w_rtt": 0.6}), config("nearest")):
        start = started(kept(config(), frozen=FROZEN), now)
        assert (start.policy.name, start.weights["w_rtt"], start.weights.version) == ("gorgo", 0.7, 9)
        assert start.frozen == FROZEN


def test_weights_that_were_set_outside_the_box_come_back() -> None:
    assert started(kept(config(), weights={"w_rtt": 9.0, "w_queue": 0.0}), config()).weights["w_rtt"] == 9.0


def test_weight_that_the_policy_got_since_is_at_its_default() -> None:
    assert started(kept(config(), weights={"w_rtt": 0.7}), config()).weights["w_queue"] == 0.1


def test_each_drain_mark_holds_until_the_configuration_changes_its_own() -> None:
    left = kept(config(draining="c"), draining=frozenset({"a", "gone"}))  # live: a marked, c's mark taken off
    assert started(left, config(draining="c")).draining == {"a"}
    assert started(left, config(draining="ac")).draining == {"a"}
    assert started(left, config(draining="b")).draining == {"a", "b"}
    assert started(left, config()).draining == {"a"}


def test_downgrade_keeps_freeze_drains_and_known_weights_and_says_what_it_sets_aside() -> None:
    """It refused to start, and without the file the freeze and the drains were lost."""
    left = kept(config(), frozen=FROZEN, weights={"w_rtt": 0.7, "w_new": 1.0}, draining=frozenset({"a"}))
    found = started(left, config())
    assert (found.frozen, found.draining, found.source) == (FROZEN, frozenset({"a"}), "state")
    assert (found.weights["w_rtt"], found.set_aside, found.gained) == (0.7, ("weights.w_new",), {"w_queue": 0.1})
    assert "w_new" not in found.weights


def test_downgrade_from_an_unknown_policy_runs_that_of_the_file_and_keeps_freeze_and_drains() -> None:
    left = kept(config(), frozen=FROZEN, policy="gone", weights={"w": 1.0}, draining=frozenset({"a"}), version=7)
    found = started(left, config())
    assert (found.frozen, found.draining, found.source) == (FROZEN, frozenset({"a"}), "configuration")
    assert (found.policy.name, found.weights.version) == (config().proxy.policy, 8)
    assert found.set_aside == ("policy gone", "weights.w")


def test_frozen_weights_never_gain_a_term_unsaid() -> None:
    found = started(kept(config(), frozen=FROZEN, weights={"w_rtt": 0.7}), config())
    assert found.gained == {"w_queue": found.weights["w_queue"]}
    assert started(kept(config(), frozen=FROZEN), config()).gained == {}


def test_keys_of_a_newer_version_are_no_damage_and_are_named() -> None:
    found = parse_state(document(added_later={"a": 1}), source="state")
    assert found.unknown_keys == ("added_later",)
    assert replace(found, unknown_keys=()) == KEPT


def test_copy_is_kept_of_what_another_version_wrote(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state")
    file.path.write_bytes(document(added_later=1))
    copy = file.keep_copy()
    assert copy == tmp_path / "state.set-aside"
    assert copy is not None
    assert copy.read_bytes() == document(added_later=1)
    assert copy.stat().st_mode & 0o777 == 0o600


# --- Changes one at a time, each written before it is in force.


class Disk(StateFile):
    """Notes each write; waits while it is slow, fails while it is full."""

    def __init__(self) -> None:
        super().__init__(Path("state.json"))
        self.versions: list[int] = []
        self.full = False
        self.slow = threading.Event()
        self.slow.set()

    def write(self, kept: PersistedState) -> None:
        self.slow.wait(10)
        if self.full:
            raise StateError("no space")
        self.versions.append(kept.version)


def state(version: int) -> PersistedState:
    nothing: frozenset[str] = frozenset()
    configured = ConfigSnapshot("random", {}, nothing)
    return PersistedState(
        policy="random", weights={}, version=version, frozen=None, draining=nothing, configured=configured
    )


class Rig:
    def __init__(self, disk: Disk | None) -> None:
        router = Router([], make_policy("random"), rng=np.random.default_rng(0), boot_id="test")
        self.metrics = Metrics(router, lambda: 0.0, BufferBudget(1))
        self.queue = ChangeQueue(disk, self.metrics)
        self.applied: list[int] = []

    async def change(self, version: int) -> None:
        await self.queue.execute(lambda: PlannedChange(state(version), lambda: self.applied.append(version)))

    def writes(self, result: str) -> float:
        return self.metrics.registry.get_sample_value("gorgo_state_writes_total", {"result": result}) or 0.0


async def test_change_is_in_force_after_it_is_written_and_not_before() -> None:
    disk = Disk()
    rig = Rig(disk)
    disk.slow.clear()
    changing = asyncio.create_task(rig.change(2))
    await asyncio.sleep(0.02)
    assert (rig.applied, disk.versions, rig.queue.busy) == ([], [], True)
    disk.slow.set()
    await changing
    assert (rig.applied, disk.versions, rig.queue.busy) == ([2], [2], False)
    assert (rig.writes("written"), rig.writes("failed")) == (1.0, 0.0)


async def test_change_that_cannot_be_written_is_refused_and_the_next_one_is_not() -> None:
    disk = Disk()
    rig = Rig(disk)
    disk.full = True
    with pytest.raises(StateError):
        await rig.change(2)
    disk.full = False
    await rig.change(3)
    assert (rig.applied, disk.versions) == ([3], [3])
    assert (rig.writes("written"), rig.writes("failed")) == (1.0, 1.0)


async def test_change_goes_on_when_its_caller_leaves_and_the_end_waits_for_it() -> None:
    disk = Disk()
    rig = Rig(disk)
    disk.slow.clear()
    changing = asyncio.create_task(rig.change(2))
    await asyncio.sleep(0.02)
    changing.cancel()
    closing = asyncio.create_task(rig.queue.aclose())
    await asyncio.sleep(0)
    disk.slow.set()
    await closing
    assert (rig.applied, changing.cancelled()) == ([2], True)


async def test_end_waits_for_a_change_that_fails_too() -> None:
    disk = Disk()
    rig = Rig(disk)
    disk.slow.clear()
    disk.full = True
    changing = asyncio.create_task(rig.change(2))
    await asyncio.sleep(0.02)
    closing = asyncio.create_task(rig.queue.aclose())
    await asyncio.sleep(0)
    disk.slow.set()
    await closing
    with pytest.raises(StateError):
        await changing


async def test_nothing_else_is_changed_while_a_reload_has_its_turn() -> None:
    disk = Disk()
    rig = Rig(disk)
    async with rig.queue.paused(lambda: state(7)):
        changing = asyncio.create_task(rig.change(2))
        await asyncio.sleep(0.02)
        assert (rig.applied, disk.versions) == ([], [])
    await changing
    assert (rig.applied, disk.versions) == ([2], [7, 2])


async def test_turn_of_a_reload_ends_well_where_the_disk_refuses(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    rig = Rig(disk)
    disk.full = True
    async with rig.queue.paused(lambda: state(7)):
        pass
    assert [(record.getMessage(), record.levelname) for record in caplog.records] == [("state_not_written", "ERROR")]
    assert "no space" in str(caplog.records[0].__dict__)
    assert rig.writes("failed") == 1.0


async def test_without_a_file_changes_are_in_force_and_nothing_is_written() -> None:
    rig = Rig(None)
    await rig.change(2)
    assert (rig.applied, rig.queue.durable, rig.writes("written")) == ([2], False, 0.0)
    assert Rig(Disk()).queue.durable


def test_a_change_without_options_is_the_operator_s_under_any_version_and_within_the_range() -> None:
    assert asdict(ChangeRequest()) == {
        "expected_version": None,
        "allow_out_of_range": False,
        "reason": None,
        "by": None,
        "source": "admin",
    }
    change = WeightsChange(3, "gorgo", {"w_rtt": 0.5}, "2026-05-01T00:00:00+00:00", "admin")
    assert change.as_dict() == {
        "version": 3,
        "policy": "gorgo",
        "weights": {"w_rtt": 0.5},
        "at": "2026-05-01T00:00:00+00:00",
        "source": "admin",
        "reason": None,
        "by": None,
    }
