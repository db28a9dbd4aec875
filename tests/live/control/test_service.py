"""Who may change weights and when, what is kept, and that what is answered as done is."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gorgo.errors import StateError, WeightsError
from gorgo.live.control import service
from gorgo.live.control.state_file import PersistedState, StateFile
from gorgo.live.control.transactions import ChangeRequest
from tests.proxy.conftest import QUIET, Running, Start, config_for, until
from tests.proxy.fakes import DONE, answer, chat, delta, stream
from tests.proxy.followed import follow, regions
from tests.proxy.test_requests import checked

CHAT = "/v1/chat/completions"
GORGO = replace(QUIET, policy="gorgo")
WEIGHTS = "/admin/weights"


class Disk(StateFile):
    """Refuses while it is full, and waits while it is slow."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.full = False
        self.slow = threading.Event()
        self.slow.set()

    def write(self, kept: PersistedState) -> None:
        self.slow.wait()
        if self.full:
            raise StateError(f"the state file {self.path} cannot be written: No space left on device")
        super().write(kept)


async def proxy(start: Start, disk: StateFile | None = None, **changes: Any) -> Running:
    replicas = [await start.replica(stream(delta("a"), DONE)) for _ in range(2)]
    return await start.proxy(config_for(replicas, replace(GORGO, **changes)), replicas, state_file=disk)


async def shown(fleet: Running) -> Any:
    return (await fleet.admin.get(WEIGHTS)).json()


async def test_write_that_expects_another_version_is_refused_with_the_one_in_force(start: Start) -> None:
    fleet = await proxy(start)
    body = {"weights": {"w_rtt": 0.7}, "expected_version": 1}
    assert (await fleet.admin.put(WEIGHTS, json=body)).json()["version"] == 2
    for method, path, more in (
        ("PUT", WEIGHTS, {}),
        ("PUT", "/admin/policy", {"policy": "random", "weights": {}}),
        ("POST", "/admin/freeze", {}),
        ("POST", "/admin/unfreeze", {"weights": None}),
    ):
        sent = {key: value for key, value in (body | more).items() if value is not None}
        error = checked(await fleet.admin.request(method, path, json=sent), 409, "version_conflict", "version")
        assert error["version"] == 2
        assert "version 2 is in force, not 1" in error["message"]
    assert (await shown(fleet))["version"] == 2


async def test_of_two_tuners_that_saw_the_same_version_one_wins(start: Start) -> None:
    fleet = await proxy(start)
    bodies = [{"weights": {"w_rtt": 0.1 * number}, "expected_version": 1} for number in range(1, 9)]
    answers = await asyncio.gather(*(fleet.admin.put(WEIGHTS, json=body) for body in bodies))
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 7
    (won,) = [body["weights"] for body, answer in zip(bodies, answers, strict=True) if answer.status_code == 200]
    assert (await shown(fleet))["weights"]["w_rtt"] == won["w_rtt"]  # type: ignore[index]


async def test_box_is_widened_only_on_demand(start: Start) -> None:
    fleet = await proxy(start)
    body: dict[str, Any] = {"weights": {"w_queue": 0.0}}
    message = checked(await fleet.admin.put(WEIGHTS, json=body), 400, "invalid_request")["message"]
    assert "[0.02, 5]" in message
    answer = (await fleet.admin.put(WEIGHTS, json=body | {"allow_out_of_range": True})).json()
    assert (answer["weights"]["w_queue"], answer["out_of_range"]) == (0.0, ["w_queue"])
    # What another call does not name stays where it is, in range or not.
    assert (await fleet.admin.put(WEIGHTS, json={"weights": {"w_rtt": 1.0}})).json()["out_of_range"] == ["w_queue"]
    checked(
        await fleet.admin.put(WEIGHTS, json={"weights": {"w_rtt": -1}, "allow_out_of_range": True}),
        400,
        "invalid_request",
    )


@pytest.mark.parametrize(
    "more",
    [{"expected_versoin": 1}, {"expected_version": "1"}, {"expected_version": 1.0}, {"reason": 5},
     {"allow_out_of_range": 1}, {"by": "x" * 2000}],
)  # fmt: skip
async def test_misspelt_or_mistyped_words_change_nothing(start: Start, more: dict[str, Any]) -> None:
    fleet = await proxy(start)
    response = await fleet.admin.put(WEIGHTS, json={"weights": {"w_rtt": 0.7}} | more)
    assert "expected" in checked(response, 400, "invalid_request")["message"]
    assert (await shown(fleet))["version"] == 1


async def test_frozen_weights_are_changed_by_nobody_and_each_is_told_why(start: Start) -> None:
    fleet = await proxy(start)
    answer = await fleet.admin.post("/admin/freeze", json={"reason": "held-out week", "by": "me"})
    frozen = answer.json()["frozen"]
    assert (frozen["reason"], frozen["by"]) == ("held-out week", "me")
    for method, path, body in (
        ("PUT", WEIGHTS, {"weights": {"w_rtt": 0.7}}),
        ("PUT", "/admin/policy", {"policy": "random"}),
        ("POST", "/admin/freeze", {"weights": {"w_rtt": 0.7}}),
        ("POST", "/admin/freeze", {"policy": "random"}),
    ):
        error = checked(await fleet.admin.request(method, path, json=body), 409, "frozen", "frozen")
        assert error["frozen"] == frozen
        assert f"frozen since {frozen['since']} by me (held-out week)" in error["message"]
    assert (await shown(fleet))["version"] == 1
    assert fleet.state.telemetry.metrics.registry.get_sample_value("gorgo_weights_frozen") == 1
    assert (await fleet.admin.get("/admin/fleet")).json()["routing"]["frozen"] == frozen
    # Routing, draining and all else go on.
    assert (await fleet.client.post(CHAT, content=chat(stream=True))).status_code == 200
    assert (await fleet.admin.post("/admin/replicas/r0/drain")).status_code == 200

    again = (await fleet.admin.post("/admin/freeze", json={"reason": "once more"})).json()
    assert again["frozen"] == frozen
    same = (await fleet.admin.post("/admin/freeze", json={"weights": {"w_rtt": 0.5}})).json()
    assert (same["frozen"], same["version"]) == (frozen, 1)

    for _ in range(2):
        assert (await fleet.admin.post("/admin/unfreeze")).json()["frozen"] is None
    assert (await fleet.admin.put(WEIGHTS, json={"weights": {"w_rtt": 0.7}})).json()["version"] == 2
    assert fleet.state.telemetry.metrics.registry.get_sample_value("gorgo_weights_frozen") == 0


async def test_freeze_can_bring_its_own_weights_and_policy(start: Start) -> None:
    fleet = await proxy(start)
    await fleet.admin.put(WEIGHTS, json={"weights": {"w_queue": 0.3}})
    one = (await fleet.admin.post("/admin/freeze", json={"weights": {"w_rtt": 0.9}})).json()
    assert (one["weights"], one["version"]) == ({"w_rtt": 0.9, "w_queue": 0.3}, 3)
    await fleet.admin.post("/admin/unfreeze")
    # With a policy's name the set is complete: what is not given is at its default.
    two = (await fleet.admin.post("/admin/freeze", json={"policy": "gorgo", "weights": {"w_rtt": 0.9}})).json()
    assert two["weights"] == {"w_rtt": 0.9, "w_queue": 0.1}
    await fleet.admin.post("/admin/unfreeze")
    three = (await fleet.admin.post("/admin/freeze", json={"policy": "prefix-threshold"})).json()
    assert (three["policy"], three["frozen"] is None) == ("prefix-threshold", False)
    checked(await fleet.admin.post("/admin/freeze", json={"policy": "nope"}), 400, "invalid_request")


async def test_history_says_where_each_version_came_from_and_is_bounded(start: Start) -> None:
    fleet = await proxy(start)
    await fleet.admin.put(WEIGHTS, json={"weights": {"w_rtt": 0.7}, "reason": "generation 3", "by": "tuner"})
    history = (await shown(fleet))["history"]
    assert [(row["version"], row["source"], row["reason"]) for row in history] == [
        (1, "configuration", None),
        (2, "admin", "generation 3"),
    ]
    assert (history[1]["weights"]["w_rtt"], history[1]["by"], history[1]["policy"]) == (0.7, "tuner", "gorgo")
    for number in range(120):
        await fleet.admin.put(WEIGHTS, json={"weights": {"w_rtt": 0.1 + number / 1000}})
    assert [row["version"] for row in (await shown(fleet))["history"]] == list(range(23, 123))


async def test_without_a_file_nothing_claims_to_last(start: Start, tmp_path: Path) -> None:
    assert (await shown(await proxy(start)))["durable"] is False
    assert (await shown(await proxy(start, Disk(tmp_path / "state"))))["durable"] is True


async def test_full_disk_refuses_the_change_and_routing_goes_on(start: Start, tmp_path: Path) -> None:
    disk = Disk(tmp_path / "state")
    fleet = await proxy(start, disk)
    before = await shown(fleet)
    disk.full = True
    for method, path, body in (
        ("PUT", WEIGHTS, {"weights": {"w_rtt": 0.7}}),
        ("PUT", "/admin/policy", {"policy": "random"}),
        ("POST", "/admin/freeze", {}),
    ):
        error = checked(await fleet.admin.request(method, path, json=body), 507, "state_not_written")
        assert "No space left on device; nothing changed, and routing continues" in error["message"]
    assert await shown(fleet) == before
    assert {view.state for view in fleet.state.routing.router.view.snapshots(now=0.0)} == {"healthy"}
    assert (await fleet.client.post(CHAT, content=chat(stream=True))).status_code == 200
    assert (
        fleet.state.telemetry.metrics.registry.get_sample_value("gorgo_state_writes_total", {"result": "failed"}) == 3
    )
    disk.full = False
    assert (await fleet.admin.post("/admin/freeze")).json()["frozen"] is not None
    disk.full = True
    checked(await fleet.admin.post("/admin/unfreeze"), 507, "state_not_written")
    assert (await shown(fleet))["frozen"] is not None


async def test_drain_works_on_a_full_disk_says_that_it_does_not_last_and_the_next_change_writes_it(
    start: Start, tmp_path: Path
) -> None:
    disk = Disk(tmp_path / "state")
    fleet = await proxy(start, disk)
    disk.full = True
    answered = await fleet.admin.post("/admin/replicas/r0/drain")
    assert (answered.status_code, answered.json()["durable"]) == (200, False)
    assert fleet.state.routing.router.view.draining() == {"r0"}
    disk.full = False
    assert (await fleet.admin.put(WEIGHTS, json={"weights": {"w_rtt": 0.7}})).status_code == 200
    kept = disk.read()
    assert kept is not None
    assert kept.draining == {"r0"}
    disk.full = True
    assert (await fleet.admin.post("/admin/replicas/r0/drain", json={"drain": False})).json()["durable"] is False
    assert fleet.state.routing.router.view.draining() == frozenset()


async def test_start_says_what_it_sets_aside_and_what_frozen_weights_gain(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    disk = Disk(tmp_path / "state")
    first = await proxy(start, disk)
    await first.admin.post("/admin/freeze", json={"weights": {"w_rtt": 0.7}})
    await first.admin.post("/admin/replicas/r0/drain")
    await first.stop()
    newer = json.loads(disk.path.read_text())
    newer["weights"] = {"w_rtt": 0.7, "w_later": 3.0}
    newer["added_later"] = {"x": 1}
    disk.path.write_text(json.dumps(newer))
    second = await proxy(start, disk)
    assert second.state.routing.control.frozen is not None
    assert second.state.routing.router.view.draining() == {"r0"}
    said = {record.getMessage(): getattr(record, "fields", {}) for record in caplog.records}
    assert said["state_set_aside"]["unknown"] == ["added_later", "weights.w_later"]
    assert json.loads(Path(said["state_set_aside"]["copy"]).read_text()) == newer
    assert (said["weights_gained"]["weights"], said["weights_gained"]["frozen"]) == ({"w_queue": 0.1}, True)
    (row,) = (await shown(second))["history"]
    assert row["reason"] == (
        "unknown to this version and set aside: added_later, weights.w_later; "
        "new in this version, with their defaults: w_queue 0.1"
    )


async def test_nothing_is_in_force_or_answered_before_it_is_written_and_no_stream_waits(
    start: Start, tmp_path: Path
) -> None:
    disk = Disk(tmp_path / "state")
    fleet = await proxy(start, disk)
    disk.slow.clear()
    freezing = asyncio.create_task(fleet.admin.post("/admin/freeze", json={"weights": {"w_rtt": 0.7}}))
    try:
        await until(lambda: fleet.state.routing.control.busy)
        assert (await fleet.client.post(CHAT, content=chat(stream=True))).status_code == 200
        assert (await shown(fleet))["version"] == 1
        assert not freezing.done()
    finally:
        disk.slow.set()
    assert (await freezing).json()["version"] == 2


async def test_caller_who_leaves_does_not_part_the_writing_from_the_doing(start: Start, tmp_path: Path) -> None:
    disk = Disk(tmp_path / "state")
    fleet = await proxy(start, disk)
    disk.slow.clear()
    order = fleet.state.routing.control.drain("r0", True)
    caller = asyncio.create_task(order)
    try:
        await until(lambda: fleet.state.routing.control.busy)
        caller.cancel()
        await asyncio.wait((caller,))
    finally:
        disk.slow.set()
    await fleet.state.routing.control.aclose()
    kept = disk.read()
    assert kept is not None
    assert kept.draining == {"r0"}
    assert [view.state for view in fleet.state.routing.router.view.snapshots(now=0.0)] == ["draining", "healthy"]


async def test_file_that_cannot_be_made_ends_the_start(start: Start, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="No such file or directory"):
        await proxy(start, StateFile(tmp_path / "nowhere" / "state"))


async def test_disk_that_filled_up_does_not_keep_a_frozen_proxy_from_starting(start: Start, tmp_path: Path) -> None:
    disk = Disk(tmp_path / "state")
    first = await proxy(start, disk)
    await first.admin.post("/admin/freeze", json={"weights": {"w_rtt": 0.7}})
    await first.stop()
    disk.full = True
    second = await proxy(start, disk)
    found = await shown(second)
    assert (found["weights"]["w_rtt"], found["version"], found["frozen"] is None) == (0.7, 2, False)
    assert found["history"][0]["source"] == "state"


async def test_reload_does_not_touch_frozen_weights_and_unfreezing_brings_the_last_edit(
    start: Start, tmp_path: Path
) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    proxy = {"policy": "gorgo", "weights": {"w_rtt": 0.5, "w_queue": 0.1}}
    disk = Disk(tmp_path / "state")
    followed = await follow(start, tmp_path, regions({"a": a}, proxy=proxy), [a], state_file=disk)
    await followed.fleet.admin.post("/admin/freeze", json={"weights": {"w_rtt": 0.7}})
    for changed in ({"policy": "gorgo", "weights": {"w_rtt": 0.6}}, {"policy": "random"}):
        await followed.rewrite(regions({"a": a}, proxy=changed))
        found = await shown(followed.fleet)
        assert (found["policy"], found["weights"]["w_rtt"], found["version"]) == ("gorgo", 0.7, 2)
    assert followed.count("applied") == 2
    await followed.fleet.admin.post("/admin/unfreeze")
    found = await shown(followed.fleet)
    assert (found["policy"], found["version"], found["frozen"]) == ("random", 3, None)
    kept = disk.read()
    assert kept is not None
    assert (kept.policy, kept.configured.policy) == ("random", "random")


async def test_weights_outside_the_box_that_a_file_brought_do_not_stop_reloads(start: Start, tmp_path: Path) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    proxy = {"policy": "gorgo", "weights": {"w_rtt": 900.0}}
    followed = await follow(start, tmp_path, regions({"a": a}, proxy=proxy), [a])
    await followed.rewrite(regions({"a": a}, proxy=proxy, limits={"max_attempts": 2}))
    assert followed.count("applied") == 1
    await followed.rewrite(regions({"a": a}, proxy={"policy": "gorgo", "weights": {"w_rtt": 1000.0}}))
    assert (followed.count("applied"), followed.count("refused")) == (1, 1)


async def test_reload_is_kept_too_and_a_full_disk_does_not_stop_it(start: Start, tmp_path: Path) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    disk = Disk(tmp_path / "state")
    followed = await follow(start, tmp_path, regions({"a": a}, proxy={"policy": "gorgo"}), [a], state_file=disk)
    await followed.rewrite(regions({"a": a}, proxy={"policy": "gorgo", "weights": {"w_rtt": 0.6}}))
    await until(lambda: (found := disk.read()) is not None and found.weights["w_rtt"] == 0.6)
    found = disk.read()
    assert found is not None
    assert (found.version, found.configured.weights) == (2, {"w_rtt": 0.6})
    history = (await shown(followed.fleet))["history"]
    assert [row["source"] for row in history] == ["configuration", "reload"]
    disk.full = True
    await followed.rewrite(regions({"a": a}, proxy={"policy": "gorgo", "weights": {"w_rtt": 0.8}}))
    assert (await shown(followed.fleet))["weights"]["w_rtt"] == 0.8
    disk.full = False
    await followed.fleet.admin.put(WEIGHTS, json={"weights": {"w_queue": 0.2}})
    found = disk.read()
    assert found is not None
    assert (found.version, found.weights["w_rtt"], found.configured.weights) == (4, 0.8, {"w_rtt": 0.8})


async def test_drain_of_a_replica_that_is_not_there_is_not_written(start: Start, tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.json")
    fleet = await proxy(start, file)
    before = file.path.read_bytes()
    checked(await fleet.admin.post("/admin/replicas/nobody/drain"), 404, "replica_not_found")
    assert file.path.read_bytes() == before


async def test_restart_goes_on_with_weights_policy_version_and_drain_marks(start: Start, tmp_path: Path) -> None:
    disk = Disk(tmp_path / "state")
    replicas = [await start.replica(stream(delta("a"), DONE)) for _ in range(2)]
    config = config_for(replicas, GORGO)
    first = await start.proxy(config, replicas, state_file=disk)
    await first.admin.put("/admin/policy", json={"policy": "gorgo-ms", "weights": {"m_rtt": 2.0}})
    await first.admin.put(WEIGHTS, json={"weights": {"m_queue": 0.5}})
    await first.admin.post("/admin/replicas/r0/drain")
    before = await shown(first)
    await first.stop()
    second = await start.proxy(config, replicas, state_file=disk)
    after = await shown(second)
    for key in ("policy", "weights", "version", "frozen"):
        assert after[key] == before[key], key
    assert [view.state for view in second.state.routing.router.view.snapshots(now=0.0)] == ["draining", "healthy"]
    assert (await second.admin.put(WEIGHTS, json={"weights": {"m_rtt": 1.0}})).json()["version"] == 4


async def test_the_last_hundred_versions_are_remembered_with_who_set_them(start: Start) -> None:
    fleet = await proxy(start)
    control = fleet.state.routing.control
    (first,) = control.history
    assert (first.version, first.source, first.reason, first.by) == (1, "configuration", None, None)
    for number in range(100):
        await control.set_weights({"w_rtt": 0.1 + number / 100}, ChangeRequest(reason=f"r{number}", by="me"))
    history = control.history
    assert [row.version for row in history] == list(range(2, 102))
    assert (history[-1].source, history[-1].reason, history[-1].by) == ("admin", "r99", "me")
    assert history[-1].weights["w_rtt"] == pytest.approx(1.09)


async def test_weights_that_a_freeze_puts_in_force_are_its_own_in_the_history(start: Start) -> None:
    control = (await proxy(start)).state.routing.control
    await control.freeze({"w_rtt": 0.7}, ChangeRequest(reason="week", by="me"))
    assert [(row.version, row.source, row.reason, row.by) for row in control.history[1:]] == [
        (2, "freeze", "week", "me")
    ]


async def test_another_policy_s_weights_are_within_its_box_unless_said(start: Start) -> None:
    control = (await proxy(start)).state.routing.control
    with pytest.raises(WeightsError):
        await control.set_policy("gorgo", {"w_queue": 0.0}, ChangeRequest())
    await control.set_policy("gorgo", {"w_queue": 0.0}, ChangeRequest(allow_out_of_range=True))
    assert control.history[-1].weights["w_queue"] == 0.0


async def test_a_second_policy_that_learns_is_refused_and_nothing_is_written(start: Start, tmp_path: Path) -> None:
    proxy = replace(QUIET, policy="random", shadow_policy="gorgo-residual")
    replica = await start.replica(answer(200))
    file = StateFile(tmp_path / "state.json")
    fleet = await start.proxy(config_for([replica], proxy), [replica], state_file=file)
    refused = await fleet.admin.put("/admin/policy", json={"policy": "gorgo-residual"})
    assert refused.status_code == 400
    assert "a router trains one model" in refused.json()["error"]["message"]
    persisted = file.read()
    assert persisted is not None
    assert (fleet.state.routing.router.settings.policy.name, persisted.policy) == ("random", "random")


async def test_a_change_of_weights_reads_drain_marks_without_a_view_of_the_whole_fleet(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The view of 500 replicas takes milliseconds, in which no event of a stream passes."""
    disk = StateFile(tmp_path / "state")
    fleet = await proxy(start, disk)
    router = fleet.state.routing.router
    router.replicas.drain("r1", now=fleet.state.routing.clock())

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the whole view was built")

    monkeypatch.setattr(type(router.view), "snapshots", refuse)
    assert (await fleet.admin.put(WEIGHTS, json={"weights": {"w_rtt": 0.7}})).json()["version"] == 2
    assert (await fleet.admin.post("/admin/freeze", json={})).status_code == 200
    monkeypatch.undo()
    written = disk.read()
    assert written is not None
    assert written.draining == {"r1"}


PHOTO = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


def with_photo() -> dict[str, Any]:
    content = [{"type": "text", "text": "what is this?"}, PHOTO]
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


async def lengths_learned(start: Start, disk: Disk) -> tuple[Running, Any]:
    usage = {"prompt_tokens": 3000, "completion_tokens": 5, "total_tokens": 3005}
    said = json.dumps({"choices": [{"message": {"content": "a cat"}}], "usage": usage}).encode()
    replicas = [await start.replica(answer(200, said))]
    fleet = await start.proxy(config_for(replicas, GORGO), replicas, state_file=disk)
    assert (await fleet.client.post(CHAT, json=with_photo())).status_code == 200
    await fleet.idle()
    return fleet, fleet.state.routing.router.learned_tokens()


async def test_restart_goes_on_with_what_reports_taught_of_the_lengths_of_images(start: Start, tmp_path: Path) -> None:
    disk = Disk(tmp_path / "state")
    first, learned = await lengths_learned(start, disk)
    assert learned["media"]
    await first.stop()
    second = await start.proxy(first.state.config, first.replicas, state_file=disk)
    assert second.state.routing.router.learned_tokens() == learned


async def test_what_is_learned_is_saved_without_a_change_and_a_full_disk_is_said_and_does_no_harm(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "SAVE_INTERVAL_S", 0.005)
    disk = Disk(tmp_path / "state")
    fleet, learned = await lengths_learned(start, disk)
    await until(lambda: (kept := disk.read()) is not None and kept.learned == learned)
    disk.full = True
    assert (await fleet.client.post(CHAT, json=with_photo())).status_code == 200
    await until(lambda: "state_not_written" in caplog.text)
    assert (await fleet.client.post(CHAT, json=with_photo())).status_code == 200
