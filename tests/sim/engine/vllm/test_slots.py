from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from gorgo.sim.engine.engines import Engine, make_engine, predict_first_token
from gorgo.sim.engine.prediction import ArrivingRequest
from gorgo.sim.engine.request import EngineRequest
from gorgo.sim.engine.vllm.model import VllmModel
from gorgo.sim.engine.vllm.slots import SlotPool
from tests.sim.profiles import round_profile

Model = VllmModel[EngineRequest]


class NaiveSlots:
    """The same rules on texts, of which a letter is a token, with everything looked up anew each time."""

    def __init__(self, *, slots: int, most: int) -> None:
        self.most = most
        self.texts = [""] * slots
        self.busy: set[int] = set()
        #: Slots in the order in which they were given back.
        self.order = list(range(slots))[::-1]
        self.ram: list[str] = []

    def take(self, prompt: str) -> tuple[int, int]:
        idle = [slot for slot in range(len(self.texts)) if slot not in self.busy]
        slot = max(idle, key=lambda one: (common(self.texts[one], prompt), -one))
        text = self.texts[slot]
        if common(text, prompt) > 0.1 * len(prompt):
            is_swapped = common(text, prompt) < 0.5 * len(text)
        else:
            slot = next(one for one in self.order if one in idle)
            text, is_swapped = self.texts[slot], True
        self.texts[slot] = ""
        self.busy.add(slot)
        if is_swapped:
            self.save(text)
            text = self.load(text, prompt)
            self.drop()
        return slot, min(common(text, prompt), len(prompt) - 1)

    def save(self, text: str) -> None:
        if text and not any(kept.startswith(text) for kept in self.ram):
            self.ram = [*(kept for kept in self.ram if not text.startswith(kept)), text]

    def load(self, text: str, prompt: str) -> str:
        """The kept text that beats all before it in both shares."""
        best = text
        for kept in self.ram:
            used, found = common(kept, prompt) / len(kept), common(kept, prompt)
            best_used = common(best, prompt) / len(best) if best else -1.0
            if used >= 0.25 and used > best_used and found > common(best, prompt):
                best = kept
        if best != text:
            self.ram.remove(best)
        return best

    def drop(self) -> None:
        while len(self.ram) > 1 and sum(map(len, [*self.texts, *self.ram])) > self.most:
            self.ram.pop(0)

    def give_back(self, slot: int, text: str) -> None:
        self.busy.remove(slot)
        self.texts[slot] = text
        self.order.remove(slot)
        self.order.append(slot)
        self.drop()


def common(one: str, other: str) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(
    prompts=st.lists(st.text("ab", min_size=1, max_size=14), min_size=1, max_size=60),
    ends=st.randoms(use_true_random=False),
    slots=st.integers(1, 4),
    most=st.integers(1, 60),
)
@settings(max_examples=300)
def test_any_requests_find_what_a_naive_twin_finds(
    prompts: list[str], ends: random.Random, slots: int, most: int
) -> None:
    twin = NaiveSlots(slots=slots, most=most)
    pool = SlotPool(capacity_tokens=most, item_bytes=1, slots=slots)
    running: dict[int, str] = {}
    for prompt in prompts:
        while running and (len(running) == slots or ends.random() < 0.5):
            slot = ends.choice(sorted(running))
            text = running.pop(slot) + "ab"[: ends.randrange(3)]
            twin.give_back(slot, text)
            pool.release_slot(slot, pool.contents(text.encode()), len(text))
        taken = twin.take(prompt)
        assert pool.take_slot(pool.contents(prompt.encode()), len(prompt)) == taken
        running[taken[0]] = prompt
        pool.check()
        event(f"kept {min(len(twin.ram), 3)}")


def engine(*, pool: int = 1000, slots: int = 2) -> Model:
    profile = round_profile(kv_tokens=pool, chunk_tokens=100, max_running_requests=slots)
    profile = replace(profile, scheduler="vllm", block_tokens=1, slot_cache=True)
    model: Engine[EngineRequest] = make_engine(profile, item_bytes=1)
    assert isinstance(model, VllmModel)
    return model


def ran(model: Model, *prompts: str, output: str = "x") -> list[int]:
    """Run the prompts together; what was cached of each."""
    requests = [
        EngineRequest(prompt.encode(), prompt_tokens=len(prompt), output_tokens=len(output), output_key=output.encode())
        for prompt in prompts
    ]
    for request in requests:
        model.submit(request, now=0.0)
    while (step := model.start_step(now=0.0)) is not None:
        model.check()
        model.finish_step(step)
        model.check()
    return [request.cached_tokens for request in requests]


def test_what_runs_is_not_found_and_what_has_ended_is() -> None:
    model = engine()
    assert ran(model, "a" * 50, "a" * 50) == [0, 0]
    assert ran(model, "a" * 60) == [50]


def test_the_answer_is_found_but_for_its_last_token() -> None:
    model = engine()
    ran(model, "abcdefgh", output="ijkl")
    assert ran(model, "abcdefghijklmn") == [11]


def test_a_prompt_that_lost_its_slot_comes_back_from_host_memory_while_there_is_room() -> None:
    for pool, found in ((1000, 30), (60, 0)):
        model = engine(pool=pool)
        for prompt in ("a" * 30, "b" * 30, "c" * 30, "d" * 30, "e" * 30):
            assert ran(model, prompt) == [0]
        assert ran(model, "a" * 30 + "z") == [found]


def test_a_flushed_engine_finds_nothing() -> None:
    model = engine()
    ran(model, "a" * 30)
    assert model.flush()
    assert ran(model, "a" * 30) == [0]


def test_an_aborted_request_leaves_what_it_computed_in_its_slot() -> None:
    model = engine()
    request = EngineRequest(b"a" * 150, prompt_tokens=150, output_tokens=2)
    model.submit(request, now=0.0)
    step = model.start_step(now=0.0)
    assert step is not None
    model.finish_step(step)
    assert model.abort(request)
    assert ran(model, "a" * 150) == [100]


def test_a_first_token_is_foreseen_on_an_idle_engine() -> None:
    model = engine()
    ran(model, "a" * 50)
    foreseen = predict_first_token(model, [], ArrivingRequest(b"a" * 60, 60, arrives_s=1.0), now=1.0)
    assert foreseen.cached_tokens == 50
