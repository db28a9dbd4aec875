"""Training beside the event loop, with a real process: it learns, and routing goes on whatever becomes of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any, cast

import numpy as np
import pytest

from gorgo.config.model import LearningConfig
from gorgo.core.policy.weights import Weights
from gorgo.core.training.learning import TrainingSpec
from gorgo.core.training.outcomes import OUTCOMES
from gorgo.learning.model_file import load, save
from gorgo.learning.trainer import fit
from gorgo.live.helper_worker import frame, pickled
from gorgo.live.training import service as service_module
from gorgo.live.training.messages import Outcomes, Settings
from gorgo.live.training.service import MAX_ROWS, NICENESS
from gorgo.live.training.worker import PAUSE_S, SLICE_S, pace
from gorgo.live.training_status import TrainingState, model_line
from gorgo.policies.registry import make_policy
from tests.core.learners import LeastPredicted
from tests.learning.extra import needs_lightgbm
from tests.learning.outcomes import NAMES, numbered, training_rows
from tests.live.training.bench import LONG, SMALL, Bench, eventually, quick
from tests.proxy.fakes import DONE, USAGE, FakeReplica, chat, delta, running, stream
from tests.proxy.followed import regions
from tests.proxy.served import TOKEN, Served, gorgo, served

__all__ = ["quick"]


# --- Training beside the event loop, with a real process: it learns, and routing goes on whatever becomes of it.


#: A model of a thousand outcomes.
MANY = replace(SMALL, first_samples=500, round_samples=100, fifo=5000)


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, object]]:
    return [vars(record) for record in caplog.records if record.getMessage() == name]


@pytest.mark.usefixtures("quick")
async def test_outcomes_become_a_model_that_the_router_adopts_and_a_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.service.start()
    bench.run(12)
    await bench.service.step()
    assert bench.version() is None
    assert bench.service.as_dict()["training"]["state"] == "waiting"
    bench.run(30)
    await bench.service.step()
    assert bench.version() == 1
    stored = load(bench.file)
    shown = bench.service.as_dict()
    assert (stored.version, shown["model"]["version"], shown["model"]["file"]) == (1, 1, str(bench.file))
    assert bench.file.stat().st_mode & 0o777 == 0o600
    model = cast(LeastPredicted, bench.router.settings.policy).model
    assert model is not None
    (predicted,) = model.ttft_s(np.array([[1000.0, 0.0, 0.0]], dtype=np.float32))
    assert predicted == pytest.approx(1.0, rel=0.2)
    bench.run(20)
    await bench.service.step()
    assert bench.version() == 2
    assert bench.counted("gorgo_training_rounds_total", result="adopted") == 2
    assert bench.counted("gorgo_training_outcomes_total", result="taken") == 62
    assert bench.counted("gorgo_model_writes_total", result="written") == 2
    # The outcomes that came between two rounds are what the first model is measured by.
    assert bench.counted("gorgo_model_error_ratio_count", target="ttft") == 20
    await bench.service.aclose()


@pytest.mark.usefixtures("quick")
async def test_a_model_of_one_worker_is_that_of_the_others(tmp_path: Path) -> None:
    """One trains, with the outcomes of both, and the other one uses its models and writes no file."""
    leader, other = Bench(tmp_path), Bench(tmp_path / "none")
    models: list[bytes] = []
    leader.service.on_adopted = models.append
    await leader.service.start()
    leader.run(12)
    other.run(12)
    rows = other.router.learning.outcomes
    own = leader.router.learning.outcomes
    assert rows is not None
    assert own is not None
    own.extend(rows.since(0))
    await leader.service.step()
    assert (leader.version(), other.version(), len(models)) == (1, None, 1)
    await other.service.take_model(models[0])
    assert other.version() == 1
    assert other.router.learning.model_digest == leader.router.learning.model_digest
    await other.service.aclose(save=False)
    assert not (tmp_path / "none").exists()
    await leader.service.aclose()


@pytest.mark.usefixtures("quick")
async def test_a_model_survives_a_restart_and_the_next_round_counts_on(tmp_path: Path) -> None:
    first = Bench(tmp_path)
    await first.service.start()
    first.run(30)
    await first.service.step()
    await first.service.aclose()
    second = Bench(tmp_path)
    await second.service.start()
    assert second.version() == 1
    second.run(30)
    await second.service.step()
    assert second.version() == 2
    await second.service.aclose()


@pytest.mark.usefixtures("quick")
async def test_a_restart_goes_on_with_the_outcomes_of_the_process_before(tmp_path: Path) -> None:
    """A model of some hundred outcomes does not replace one of a thousand: the next round has them all."""
    first = Bench(tmp_path, MANY)
    await first.service.start()
    first.run(1000)
    await first.service.step()
    assert first.version() == 1
    assert load(first.file).samples == pytest.approx(900, abs=40)
    first.run(57)
    await first.service.aclose()
    second = Bench(tmp_path, MANY)
    await second.service.start()
    ring = second.router.learning.outcomes
    assert ring is not None
    assert (len(ring), ring.next_seq, second.version()) == (1057, 1057, 1)
    second.run(107)
    await second.service.step()
    assert second.service.as_dict()["training"]["taken"] == 1164
    assert load(second.file).samples > 1000
    await second.service.aclose()


@pytest.mark.usefixtures("quick")
async def test_without_its_outcomes_a_restart_does_not_replace_the_model_by_one_of_few(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gorgo")
    first = Bench(tmp_path, MANY)
    await first.service.start()
    first.run(1000)
    await first.service.step()
    await first.service.aclose()
    outcomes = first.store.outcomes_path("least-predicted")
    assert outcomes is not None
    outcomes.write_bytes(b"cut")
    second = Bench(tmp_path, replace(MANY, first_samples=90))
    await second.service.start()
    assert len(events(caplog, "outcomes_not_loaded")) == 1
    second.run(107)
    await second.service.step()
    assert (second.version(), second.service.as_dict()["training"]["refused"]) == (1, 1)
    assert second.counted("gorgo_training_rounds_total", result="refused") == 1
    (said,) = events(caplog, "model_refused")
    assert "version 1 has" in str(said)
    assert load(second.file).version == 1
    await second.service.aclose()


@pytest.mark.usefixtures("quick")
async def test_outcomes_of_more_than_one_message_make_one_round(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MANY)
    await bench.service.start()
    bench.run(2 * MAX_ROWS + 10)
    for _ in range(2):
        await bench.service.step()
        assert bench.version() is None, "the process has a part of the ring"
    await bench.service.step()
    assert bench.version() == 1
    await bench.service.aclose()


@pytest.mark.usefixtures("quick")
async def test_answers_in_one_piece_alone_make_a_model(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.service.start()
    bench.run(40, streamed=False)
    await bench.service.step()
    assert bench.version() == 1
    training = bench.service.as_dict()["training"]
    assert (training["first_tokens"], training["whole_answers"], training["censored"]) == (0, 40, 0)
    bench.run(10, streamed=False)
    await bench.service.step()
    assert bench.counted("gorgo_model_error_ratio_count", target="e2e") == 10
    assert bench.counted("gorgo_model_error_ratio_count", target="ttft") == 0
    await bench.service.aclose()


@pytest.mark.usefixtures("quick")
async def test_a_process_that_is_killed_in_a_round_is_replaced_and_routing_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, LONG)
    await bench.service.start()
    bench.run(300)
    step = await bench.training()
    bench.run(10)  # routing does not wait for the round
    killed = bench.pid
    os.kill(killed, signal.SIGKILL)
    await step
    assert bench.version() is None
    assert bench.service.as_dict()["training"] | {"settings": None} == {
        "state": "failed", "taken": 300, "lost": 0, "first_tokens": 300, "whole_answers": 0, "censored": 0,
        "refused": 0, "failures": 1,
        "failure": "the training process ended",
        "pid": None, "settings": None,
    }  # fmt: skip
    assert len(events(caplog, "training_failed")) == 1
    bench.run(10)
    # The next process gets all that the ring has, and by other settings its round is short.
    bench.service.configure(LearningConfig(epochs=1))
    await bench.service.step()
    assert bench.version() == 1
    assert bench.router.learning.learner is not None
    assert bench.router.learning.learner.training.epochs == 1
    assert bench.pid != killed
    assert bench.service.as_dict()["training"]["failure"] is None
    await bench.service.aclose()


@pytest.mark.usefixtures("quick")
async def test_after_failures_the_next_process_waits_longer_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.live.training.service.FIRST_RETRY_S", 1.0)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    bench = Bench(tmp_path)
    now = 100.0
    monkeypatch.setattr(bench.service, "_clock", lambda: now)
    await bench.service.start()
    bench.run(5)
    starts = []
    for _ in range(400):
        failures = bench.service.as_dict()["training"]["failures"]
        await bench.service.step()
        if bench.service.as_dict()["training"]["failures"] > failures:
            starts.append(now)
        now += 0.5
    waits = np.diff(starts)
    assert waits.tolist() == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


@pytest.mark.system
@pytest.mark.usefixtures("quick")
async def test_a_stopped_process_is_replaced_as_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.helper_process.CHECK_S", 0.4)
    bench = Bench(tmp_path, LONG)
    await bench.service.start()
    bench.run(300)
    step = await bench.training()
    os.kill(bench.pid, signal.SIGSTOP)
    await step
    assert bench.service.as_dict()["training"]["failure"] == "the training process used no processor time for 2 s"
    await bench.service.aclose()


@pytest.mark.usefixtures("quick")
async def test_a_freeze_stops_learning_and_the_model_stays(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.service.start()
    bench.run(30)
    await bench.service.step()
    bench.router.settings.frozen = True
    bench.run(100)
    await bench.service.step()
    assert bench.version() == 1
    assert bench.service.as_dict()["training"]["state"] == "frozen"
    assert bench.service.as_dict()["training"]["pid"] is None
    bench.router.settings.frozen = False
    await bench.service.step()
    assert bench.version() == 2
    await bench.service.aclose()


@pytest.mark.system
@pytest.mark.usefixtures("quick")
async def test_a_freeze_in_a_round_ends_it_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, LONG)
    await bench.service.start()
    bench.run(300)
    step = await bench.training()
    pid = bench.pid
    bench.router.settings.frozen = True
    await step
    assert not Path(f"/proc/{pid}").exists()
    await bench.service.step()
    assert bench.service.as_dict()["training"]["state"] == "frozen"
    assert bench.service.as_dict()["training"]["failures"] == 0


@pytest.mark.system
@pytest.mark.usefixtures("quick")
async def test_another_policy_ends_the_round_of_the_one_before(tmp_path: Path) -> None:
    bench = Bench(tmp_path, LONG)
    await bench.service.start()
    bench.run(300)
    step = await bench.training()
    other = LeastPredicted(SMALL)
    bench.router.settings.set_policy(other, Weights.of(()), now=1e6)
    await step
    bench.run(30)
    await bench.service.step()
    assert bench.router.learning.learner is other
    assert (bench.version(), load(bench.file).kind) == (1, "linear")
    plain = make_policy("random")
    bench.router.settings.set_policy(plain, Weights.of(plain.weight_specs), now=1e6)
    await bench.service.step()
    shown = bench.service.as_dict()
    assert (shown["policy"], shown["is_shadow"], shown["model"]) == (None, False, None)
    assert (shown["training"]["state"], shown["training"]["settings"]) == ("off", None)


@pytest.mark.usefixtures("quick")
async def test_a_shadow_policy_learns_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy=make_policy("random"))
    bench.router.settings.set_shadow(LeastPredicted(SMALL), now=0.0)
    await bench.service.start()
    bench.run(30)
    await bench.service.step()
    assert bench.version() == 1
    assert bench.service.as_dict()["is_shadow"]
    await bench.service.aclose()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
async def test_a_cut_model_file_is_logged_and_is_a_cold_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, share: float
) -> None:
    bench = Bench(tmp_path)
    await bench.service.start()
    bench.run(30)
    await bench.service.step()
    await bench.service.aclose()
    whole = bench.file.read_bytes()
    bench.file.write_bytes(whole[: int(share * len(whole))])
    again = Bench(tmp_path)
    await again.service.start()
    assert again.version() is None
    (told,) = events(caplog, "model_not_loaded")
    assert str(bench.file) in str(told)
    again.run(30)
    await again.service.step()
    assert again.version() == 1
    await again.service.aclose()


TREES = replace(SMALL, kind="trees", names=NAMES)


@pytest.mark.usefixtures("quick")
@needs_lightgbm
async def test_a_file_of_trees_is_tried_in_another_process_and_one_that_ends_it_is_a_cold_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Bench(tmp_path, TREES)
    model = fit(training_rows(60), TREES, seed=1, version=5)
    save(model, first.file)
    await first.service.start()
    assert first.version() == 5
    for module, timeout_s, reason in (
        ("tests.live.training.nowhere", 60.0, "it ended"),
        (service_module.WORKER, 0.0, "it had no answer within 0 s"),
    ):
        monkeypatch.setattr(service_module, "WORKER", module)
        monkeypatch.setattr(service_module, "TRY_TIMEOUT_S", timeout_s)
        caplog.clear()
        again = Bench(tmp_path, TREES)
        await again.service.start()
        assert again.version() is None
        (told,) = events(caplog, "model_not_loaded")
        assert f"{first.file}: loading it and predicting once in another process: {reason}" in str(told)


@pytest.mark.usefixtures("quick")
async def test_a_model_of_other_features_or_of_another_kind_is_logged_and_is_a_cold_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Bench(tmp_path)
    await first.service.start()
    first.run(30)
    await first.service.step()
    await first.service.aclose()
    for spec in (replace(SMALL, names=("rtt_s",)), replace(SMALL, kind="mlp")):
        bench = Bench(tmp_path, spec)
        await bench.service.start()
        assert bench.version() is None
    assert len(events(caplog, "model_not_loaded")) == 2


@pytest.mark.usefixtures("quick")
async def test_the_newer_of_the_two_model_files_counts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.service.start()
    bench.run(30)
    await bench.service.step()
    await bench.service.aclose()
    given = tmp_path / "given.npz"
    save(replace(load(bench.file), version=40), given)  # type: ignore[type-var]
    for age_s, version in ((-60.0, 1), (60.0, 40)):
        changed_s = bench.file.stat().st_mtime + age_s
        os.utime(given, (changed_s, changed_s))
        again = Bench(tmp_path, learning=LearningConfig(model_file=str(given)))
        await again.service.start()
        assert again.version() == version


@pytest.mark.usefixtures("quick")
async def test_another_model_file_in_the_configuration_is_adopted_at_the_next_step_but_not_while_frozen(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    await bench.service.start()
    bench.run(30)
    await bench.service.step()
    given = tmp_path / "given.npz"
    save(replace(load(bench.file), version=40), given)  # type: ignore[type-var]
    bench.router.settings.frozen = True
    bench.service.configure(LearningConfig(model_file=str(given), online=False))
    await bench.service.step()
    assert bench.version() == 1
    bench.router.settings.frozen = False
    await bench.service.step()
    assert bench.version() == 40
    await bench.service.aclose()


@pytest.mark.usefixtures("quick")
async def test_a_missing_model_file_of_the_configuration_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, learning=LearningConfig(model_file=str(tmp_path / "no.npz")))
    await bench.service.start()
    assert bench.version() is None
    assert len(events(caplog, "model_not_loaded")) == 1


@pytest.mark.usefixtures("quick")
async def test_a_full_disk_is_logged_once_and_the_model_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gorgo")
    bench = Bench(tmp_path)
    await bench.service.start()
    bench.file.symlink_to("/dev/full")
    for version in (1, 2):
        bench.run(30)
        await bench.service.step()
        assert bench.version() == version
    (told,) = events(caplog, "model_not_written")
    assert "No space left on device" in str(told)
    assert bench.counted("gorgo_model_writes_total", result="failed") == 2
    assert bench.service.as_dict()["model"]["file"] is None
    bench.file.unlink()
    bench.run(30)
    await bench.service.step()
    assert load(bench.file).version == 3
    assert len(events(caplog, "model_written_again")) == 1
    await bench.service.aclose()


@pytest.mark.usefixtures("quick")
async def test_without_online_learning_a_given_model_is_used_and_never_changed(tmp_path: Path) -> None:
    first = Bench(tmp_path)
    await first.service.start()
    first.run(30)
    await first.service.step()
    await first.service.aclose()
    bench = Bench(tmp_path, learning=LearningConfig(online=False))
    await bench.service.start()
    bench.run(100)
    await bench.service.step()
    assert bench.version() == 1
    assert bench.service.as_dict()["training"]["state"] == "off"


@pytest.mark.usefixtures("quick")
async def test_outcomes_that_left_the_ring_during_a_round_are_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.service.start()
    bench.run(1)
    await bench.service.step()
    bench.run(OUTCOMES + 7)
    await bench.service.step()
    assert bench.service.as_dict()["training"]["lost"] == 7
    assert bench.counted("gorgo_training_outcomes_total", result="lost") == 7
    await bench.service.aclose()


@pytest.mark.usefixtures("quick")
async def test_the_process_runs_below_the_priority_of_the_proxy_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.live.training.service.NICENESS", NICENESS)
    bench = Bench(tmp_path)
    await bench.service.start()
    bench.run(1)
    await bench.service.step()
    pid = bench.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    loop = asyncio.create_task(bench.service.run())
    await asyncio.sleep(0)
    loop.cancel()
    await asyncio.wait((loop,))
    await bench.service.aclose()
    await eventually(lambda: not Path(f"/proc/{pid}").exists())


# --- The model of a policy that learns, in a line.


MODEL = {"version": 4, "kind": "mlp", "samples": 5000, "age_s": 12.4, "error_ttft": 0.073}
LEARNED, COLD = "lodestar learned: model 4 (mlp) of 5,000 outcomes, 12 s old", "lodestar has no model: 1,200 outcomes"


@pytest.mark.parametrize(
    ("policy", "model", "training", "line"),
    [
        (None, None, TrainingState(), None),
        (
            "lodestar",
            None,
            TrainingState("waiting", taken=1200),
            f"{COLD}; training waiting",
        ),
        (
            "lodestar",
            MODEL | {"error_e2e": 0.2},
            TrainingState("waiting", first_tokens=900, whole_answers=1250, censored=50, refused=3),
            f"{LEARNED}, TTFT off by 7 %, whole answers off by 20 % where held out; training waiting, from 900 first "
            "tokens, 1,250 whole answers by the time to their end, 50 without an answer; 3 rounds left the better "
            "model in use",
        ),
        (
            "lodestar",
            MODEL,
            TrainingState("frozen"),
            f"{LEARNED}, TTFT off by 7 % where held out; training frozen",
        ),
        (
            "lodestar",
            MODEL | {"error_ttft": None},
            TrainingState("failed", failure="the training process ended"),
            f"{LEARNED}; training failed (the training process ended)",
        ),
    ],
)
def test_a_line_has_the_model_and_the_state_of_its_training(
    policy: str | None, model: dict[str, Any] | None, training: TrainingState, line: str | None
) -> None:
    assert model_line({"policy": policy, "model": model, "training": training.as_dict(None)}) == line


# --- The process that trains, as a neighbour of the event loop.


def test_it_pauses_after_each_slice_of_processor_time() -> None:
    pauses: list[float] = []
    handler = signal.getsignal(signal.SIGVTALRM)
    try:
        pace(pauses.append)
        end_s = process_time() + 100 * SLICE_S  # a kernel counts coarsely, and more so beside other processes
        while len(pauses) < 4 and process_time() < end_s:
            pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, handler)
    assert pauses == [PAUSE_S] * 4


def test_it_ends_in_the_middle_of_a_round_when_its_parent_is_gone() -> None:
    """As after SIGKILL: nothing but the end of its input tells it."""
    spec = TrainingSpec("mlp", ("prompt_tokens",), first_samples=10, epochs=1_000_000)
    start, outcomes = (0, Settings(spec, 0, None)), Outcomes(numbered(40), more=False)
    round_without_end = frame(pickled(start)) + frame(pickled(outcomes))
    command = [sys.executable, "-m", "gorgo.live.training.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(round_without_end)
            process.stdin.close()
            assert process.wait(timeout=15) == 0
        finally:
            process.kill()


# --- `gorgo serve` with a policy that learns, as a process: what becomes of its model when something is killed or cut.


CHAT = "/v1/chat/completions"
LEARNING = {"first_samples": 20, "round_samples": 20, "epochs": 5}
ANSWER = stream(delta("a"), delta("b"), USAGE, DONE)


async def requests(proxy: Served, count: int) -> None:
    """Send streams; each is answered."""
    for number in range(count):
        content = chat(stream=True, messages=[{"role": "user", "content": "x" * (100 + 37 * number)}])
        assert (await proxy.client.post(CHAT, content=content)).status_code == 200


async def command(proxy: Served, *words: str) -> str:
    """Return the last line of a command about this proxy."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gorgo", *words),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "GORGO_ADMIN_TOKEN": TOKEN, "GORGO_ADMIN_URL": proxy.admin_url},
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().splitlines()[-1]


async def shown(proxy: Served) -> Any:
    return (await proxy.admin.get("/admin/model")).json()


async def trained(proxy: Served, version: int) -> Any:
    """Wait for a model of at least this version, and return what is shown."""
    async with asyncio.timeout(60):
        while True:
            found = await shown(proxy)
            if found["model"] is not None and found["model"]["version"] >= version:
                return found
            await asyncio.sleep(0.05)


def write(folder: Path, replica: FakeReplica, **learning: Any) -> None:
    proxy = {"policy": "lodestar", "learning": LEARNING | learning}
    (folder / "regions.yaml").write_bytes(regions({"a": replica, "b": {"url": replica.url}}, proxy=proxy))


@pytest.mark.system  # test_service.py has each part of it in seconds
async def test_a_model_outlives_its_process_and_the_proxy_and_routing_goes_on_without_it(tmp_path: Path) -> None:
    state, file = tmp_path / "state.json", tmp_path / "state.json.lodestar.npz"
    options = ("--state", str(state), "--outcome-log", str(tmp_path / "outcomes.jsonl"))
    async with running(ANSWER) as replica:
        write(tmp_path, replica)
        async with served(tmp_path, *options) as proxy:
            await requests(proxy, 40)
            first = await trained(proxy, 1)
            assert (first["policy"], first["is_shadow"], first["model"]["kind"]) == ("lodestar", False, "mlp")
            worker = first["training"]["pid"]
            os.kill(worker, signal.SIGKILL)
            await requests(proxy, 40)
            second = await trained(proxy, first["model"]["version"] + 1)
            assert second["training"]["failures"] == 1
            assert second["training"]["pid"] != worker
            await eventually(file.exists)
            assert (await proxy.admin.post("/admin/freeze", json={})).status_code == 200
            await requests(proxy, 40)
            await asyncio.sleep(2.5)  # two steps of the training
            frozen = await shown(proxy)
            assert (frozen["training"]["state"], frozen["training"]["pid"]) == ("frozen", None)
            assert (await proxy.admin.post("/admin/unfreeze", json={})).status_code == 200
            last = await trained(proxy, frozen["model"]["version"] + 1)
            metrics = (await proxy.client.get("/metrics")).text
            assert f"gorgo_model_version {float(last['model']['version'])}" in metrics
            assert 'gorgo_fallbacks_total{rule="cold_start"}' in metrics
            assert 'gorgo_model_error_ratio_count{target="ttft"}' in metrics
            line = await command(proxy, "status")
            assert line.startswith(f"lodestar learned: model {last['model']['version']} (mlp) of "), line
            proxy.process.kill()
            await eventually(lambda: not Path(f"/proc/{last['training']['pid']}").exists())
        async with served(tmp_path, *options) as proxy:
            again = (await shown(proxy))["model"]
            assert (again["version"], again["file"]) == (last["model"]["version"], str(file))
        learned = tmp_path / "learned.npz"
        result = await gorgo(
            *("learn", str(tmp_path / "outcomes.jsonl"), "--policy", "lodestar", "--out", str(learned)), "--no-ablation"
        )
        assert result.returncode == 0, result.stderr
        file.write_bytes(file.read_bytes()[:200])
        async with served(tmp_path, *options) as proxy:
            assert (await shown(proxy))["model"] is None
            await requests(proxy, 3)
            write(tmp_path, replica, model_file=str(learned), online=False)
            assert (await proxy.admin.post("/admin/reload", json={})).status_code == 200
            offline = await trained(proxy, 1)
            assert offline["model"]["file"] == str(learned)
            assert offline["training"]["state"] == "off"
