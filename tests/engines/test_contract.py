"""What every dialect keeps, whatever its engine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from gorgo.config.values import BUILT_IN, engine_names
from gorgo.core.messages.request import EngineSample
from gorgo.engines.base import EngineDialect, merged
from gorgo.engines.registry import DIALECTS, dialect
from gorgo.live.upstream.target import Report
from tests.engines.scrapes import METRICS

#: Those that other packages offer as well, where they are installed.
every_dialect = pytest.mark.parametrize("name", sorted(engine_names()))


def test_the_configuration_allows_exactly_the_dialects_that_exist() -> None:
    assert set(BUILT_IN) == set(DIALECTS)


@every_dialect
def test_a_dialect_keeps_the_protocol_under_its_name(name: str) -> None:
    kind = dialect(name)
    assert isinstance(kind, EngineDialect)
    assert kind.name == name
    assert set(kind.report_flags) <= {report.value for report in Report}


@every_dialect
def test_routes_are_paths_and_the_probe_never_generates(name: str) -> None:
    kind = dialect(name)
    paths = [path for path in (kind.probe_path, kind.metrics_path, kind.loads_path) if path is not None]
    assert all(path.startswith("/") for path in paths)
    assert kind.probe_path != "/health_generate"
    assert (name, kind.probe_path) != ("sglang", "/health")


@pytest.mark.parametrize("name", sorted(METRICS))
def test_a_full_scrape_tells_what_runs_and_what_waits(name: str) -> None:
    sample = dialect(name).read_metrics(METRICS[name])
    assert sample.running_requests is not None
    assert sample.queued_requests is not None


@every_dialect
def test_text_that_is_no_scrape_of_the_engine_reports_nothing(name: str) -> None:
    read = dialect(name).read_metrics
    texts = [
        "",
        "\n\n",
        "# only a comment",
        "<html>not found</html>",
        "a{",
        'vllm:num_requests_running{engine="0"}',
        "\x00",
    ]
    texts += [METRICS[other] for other in METRICS if other != name]
    assert [text for text in texts if read(text) != EngineSample()] == []


@pytest.mark.parametrize("name", sorted(METRICS))
def test_a_scrape_cut_anywhere_is_read_as_far_as_it_goes(name: str) -> None:
    text = METRICS[name]
    for end in range(0, len(text), max(1, len(text) // 40)):
        values = [value for value in asdict(dialect(name).read_metrics(text[:end])).values() if value is not None]
        assert all(value >= 0 for value in values)


@every_dialect
def test_json_that_is_no_load_report_has_no_amount(name: str) -> None:
    others: list[Any] = [None, [], {}, "text", 7, [None], [{}], {"loads": None}, {"loads": [None, {}]}]
    for loads in others:
        found = dialect(name).read_capacity(loads)
        assert (found.queued_requests, found.kv_capacity_tokens) == (None, None), loads
        assert not found.running_requests, loads


def test_of_two_reports_the_first_goes_before_and_the_second_fills_gaps() -> None:
    first = EngineSample(running_requests=1.0, used_tokens=0.0)
    second = EngineSample(running_requests=2.0, used_tokens=3.0, kv_capacity_tokens=4.0)
    assert merged(first, second) == EngineSample(running_requests=1.0, used_tokens=0.0, kv_capacity_tokens=4.0)
