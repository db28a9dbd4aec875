"""Usage by client and model: bounded labels, and a window of a minute."""

from __future__ import annotations

from gorgo.live.telemetry.counters import MAX_CLIENTS, MAX_MODELS, ClientRow, ClientUsage, MetricStore
from gorgo.live.telemetry.metric_table import METRICS


class Rig:
    """A store, a clock and the models that replicas list."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.models = {"m"}
        self.store = MetricStore(METRICS)
        self.usage = ClientUsage(self.store, lambda model: model in self.models, lambda: self.now)

    def labels(self, name: str, label: str) -> set[str]:
        families = {family.name: family for family in self.store.collect()}
        return {sample.labels[label] for sample in families[name.removesuffix("_total")].samples}


def test_tokens_and_rejections_are_of_the_last_minute() -> None:
    rig = Rig()
    rig.usage.finished("a", "m", 200, prompt_tokens=100, output_tokens=20, now=rig.now)
    rig.now += 59.5
    rig.usage.finished("a", "m", 200, prompt_tokens=1, now=rig.now)
    rig.usage.rejected("b", "client_rate")
    rig.usage.finished("b", None, 429, now=rig.now)
    assert rig.usage.last_minute() == [ClientRow("a", 2, 121, 0), ClientRow("b", 1, 0, 1)]
    rig.now += 1.0
    assert rig.usage.last_minute() == [ClientRow("a", 1, 1, 0), ClientRow("b", 1, 0, 1)]
    rig.now += 3600.0
    assert rig.usage.last_minute() == [ClientRow("a", 0, 0, 0), ClientRow("b", 0, 0, 0)]


def test_further_clients_and_models_are_other() -> None:
    rig = Rig()
    rig.models = {f"m{n}" for n in range(MAX_MODELS + 5)}
    for n in range(MAX_CLIENTS + 5):
        rig.usage.finished(f"c{n}", f"m{n}", 200, prompt_tokens=1, now=rig.now)
        rig.usage.rejected(f"c{n}", "client_rate")
    rig.usage.finished(None, "not listed", 404, now=rig.now)
    clients = rig.labels("gorgo_client_requests_total", "client")
    assert (len(clients), {"other", "none"} <= clients) == (MAX_CLIENTS + 2, True)
    assert len(rig.labels("gorgo_client_tokens_total", "model")) == MAX_MODELS + 1
    assert "not listed" not in rig.labels("gorgo_client_requests_total", "model")
    assert len(rig.labels("gorgo_client_rejects_total", "client")) == MAX_CLIENTS + 1
    assert {row.name: row.requests for row in rig.usage.last_minute()}["other"] == 5


def test_models_that_no_replica_lists_any_more_make_room_for_those_that_came() -> None:
    rig = Rig()
    for generation in range(3):
        rig.models = {"m"} | {f"adapter-{generation}-{n}" for n in range(MAX_MODELS - 1)}
        rig.now += 10.0
        for model in sorted(rig.models):
            rig.usage.finished(None, model, 200, prompt_tokens=1, now=rig.now)
        assert rig.labels("gorgo_client_requests_total", "model") == rig.models
    assert rig.store.count("gorgo_client_requests_total", "none", "m", "2xx").value == 3.0, "its count goes on"


def test_room_is_looked_for_once_a_second_while_all_models_are_listed() -> None:
    rig = Rig()
    rig.models = {f"m{n}" for n in range(MAX_MODELS + 1)}
    for model in sorted(rig.models):
        rig.usage.finished(None, model, 200, now=rig.now)
    (waiting,) = rig.models - rig.labels("gorgo_client_requests_total", "model")
    rig.models = {waiting}
    rig.usage.finished(None, waiting, 200, now=rig.now)
    assert waiting not in rig.labels("gorgo_client_requests_total", "model")
    rig.now += 1.0
    rig.usage.finished(None, waiting, 200, now=rig.now)
    assert rig.labels("gorgo_client_requests_total", "model") == {waiting, "other"}


def test_series_of_a_client_or_model_that_left_end_and_make_room() -> None:
    rig = Rig()
    rig.models |= {"n"}
    for client in ("a", "b"):
        for model in ("m", "n"):
            rig.usage.finished(client, model, 200, prompt_tokens=1, now=rig.now)
    rig.models = {"m"}
    rig.usage.retain({"b"})
    assert rig.labels("gorgo_client_tokens_total", "client") == {"b"}
    assert rig.labels("gorgo_client_requests_total", "model") == {"m"}
    assert [row.name for row in rig.usage.last_minute()] == ["b"]
    rig.usage.finished("b", "m", 200, prompt_tokens=2, now=rig.now)
    assert rig.store.count("gorgo_client_tokens_total", "b", "m", "prompt").value == 3.0
