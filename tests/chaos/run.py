"""One run from its seed to its record: fleet up, load and faults, quiet, everything looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.chaos.faults import Saboteur, read_history
from tests.chaos.fleet import LIMITS, REPLICAS, SERVE, EnvoyFleet, Fleet, PlainFleet, WorkersFleet, running_fleet
from tests.chaos.invariants import Run
from tests.chaos.load import Load
from tests.chaos.observe import IDLE_LOOKS, Observer, admin_client, events_of
from tests.chaos.questions import draw_questions, judge_behind_envoy, judge_proxy
from tests.chaos.schedule import RECOVERY_S, Planned, draw_schedule

#: For the sidecar to put its best weights back and end.
SIDECAR_END_S = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how hard. Times in seconds."""

    load_s: float
    per_s: float
    #: Mean time between the starts of two faults, how long they last, and from the end of one to the next at a target.
    every_s: float
    length_s: tuple[float, float]
    rest_s: float = RECOVERY_S
    #: Limits of the proxy.
    limits: Mapping[str, float] = field(default_factory=lambda: LIMITS)
    #: Looks at the idle proxy before the load.
    idle_looks: int = IDLE_LOOKS


#: With starting and settling nine and a half minutes, one minute, and a quarter of a minute.
FULL = Plan(load_s=500.0, per_s=6.0, every_s=4.5, length_s=(2.0, 7.0))
SHORT = Plan(load_s=52.0, per_s=6.0, every_s=1.5, length_s=(1.2, 2.4))
#: No fault is so long that a time-out ends it, and no time-out so short that a busy machine exceeds it.
BRIEF = Plan(
    load_s=10.0,
    per_s=12.0,
    every_s=0.45,
    length_s=(0.6, 0.9),
    rest_s=0.5,
    limits=LIMITS
    | {
        "connect_timeout_s": 15.0,
        "first_token_timeout_s": 30.0,
        "response_timeout_s": 30.0,
        "stream_idle_timeout_s": 15.0,
    },
    idle_looks=4,
)


def plan_schedule(plan: Plan, seed: int) -> list[Planned]:
    """Faults of that run."""
    return draw_schedule(
        np.random.default_rng([seed, 0]),
        REPLICAS,
        seconds=plan.load_s,
        every_s=plan.every_s,
        length_s=plan.length_s,
        rest_s=plan.rest_s,
    )


async def run_chaos(
    plan: Plan, seed: int, folder: Path, *, behind_envoy: bool = False, plain: bool = False, workers: bool = False
) -> Run:
    """Everything that became of it, for the invariants; with Envoy and a picker in the place of the proxy or not.

    `plain`: the proxy has the HTTP of stock libraries. `workers`: it has two processes.
    """
    questions = draw_questions(seed, seconds=plan.load_s, per_s=plan.per_s)
    planned = plan_schedule(plan, seed)
    kind = EnvoyFleet if behind_envoy else PlainFleet if plain else WorkersFleet if workers else Fleet
    async with running_fleet(folder, seed, plan.limits, kind) as fleet, admin_client(fleet) as admin:
        observer, saboteur = Observer(fleet, admin), Saboteur(fleet)
        await observer.before(plan.idle_looks)
        await fleet.start_sidecar()
        load = Load(fleet.url, questions, judge_behind_envoy if behind_envoy else judge_proxy)
        looking = asyncio.create_task(observer.during())
        async with asyncio.TaskGroup() as at_work:
            at_work.create_task(load.run())
            at_work.create_task(saboteur.run(planned, seconds=plan.load_s))
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
        sidecar_exit = await asyncio.to_thread(_end_sidecar, fleet)
        saboteur.histories.append(read_history(fleet.database))
        await observer.after()
        rows = await observer.fleet_rows()
    return Run(
        seed=seed,
        replicas=REPLICAS,
        questions=questions,
        notes=load.notes,
        applied=saboteur.applied,
        watch=observer.watch,
        log=events_of(fleet.said(f"{SERVE}-1")),
        said={name: fleet.said(name) for name in fleet.names},
        histories=saboteur.histories,
        sidecar_exit=sidecar_exit,
        reloads=saboteur.reloads,
        refusals=saboteur.refusals,
        fleet=rows,
        passed={name: gate.passed for name, gate in fleet.gates.items()},
        behind_envoy=behind_envoy,
        processes=2 if workers else 1,
    )


def _end_sidecar(fleet: Fleet) -> int | None:
    """Its exit code; None where it does not end."""
    process = fleet._process("tune")
    process.terminate()
    with suppress(TimeoutError):
        return process.wait(SIDECAR_END_S)
    return None
