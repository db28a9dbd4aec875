"""Real processes: engines, proxy and the official client as the README has them, with a file and by `--replica`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.config.load import load_config, parse_config

# --- Real processes: engines, proxy and the official client as the README has them, started and stopped by signals.


ROOT = Path(__file__).parents[2]
TOKEN = "token-of-the-tests"
#: A first start compiles nothing and loads little, but two cores are shared with other tests.
STOP_TIMEOUT_S = 30.0
#: For a whole command from its start: the import of a client library alone took 25 s at a load of 40 on two cores.
COMMAND_S = 120.0


def gorgo(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "gorgo", *map(str, words)]


def environ() -> dict[str, str]:
    return {**os.environ, "GORGO_ADMIN_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def running(pattern: str, *words: str | Path) -> Iterator[tuple[re.Match[str], subprocess.Popen[str]]]:
    """A process that has said the line it says when it is ready; killed if the test leaves it running."""
    process = subprocess.Popen(gorgo(*words), stdout=subprocess.PIPE, text=True, env=environ())
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        said = re.fullmatch(pattern, line.rstrip("\n"))
        assert said is not None, line
        yield said, process
    finally:
        process.kill()
        process.communicate()


def stopped(process: subprocess.Popen[str], by: signal.Signals) -> int:
    process.send_signal(by)
    return process.wait(STOP_TIMEOUT_S)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_engine_says_where_it_listens_and_stops_with_exit_code_0(by: signal.Signals) -> None:
    words = ("engine", "--replica", "us-ashburn-0", "--config", ROOT / "regions.yaml", "--port", "0")
    with running(r"gorgo engine us-ashburn-0 listening on http://127\.0\.0\.1:\d+", *words) as (_, process):
        assert stopped(process, by) == 0


def test_engine_without_a_round_trip_to_its_region_is_refused(tmp_path: Path) -> None:
    text = (ROOT / "regions.yaml").read_text().replace("ap-seoul: 180", "").replace("95, }", "95}")
    (tmp_path / "regions.yaml").write_text(text)
    words = gorgo("engine", "--replica", "ap-seoul-0", "--config", tmp_path / "regions.yaml", "--port", "0")
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 2
    assert "simulation.rtt_ms.ap-seoul: missing; expected the mean round trip" in done.stderr


def vllm_regions(folder: Path, engine: str) -> Path:
    path = folder / "regions.yaml"
    text = (ROOT / "regions.yaml").read_text()
    path.write_text(
        text.replace("engine: sglang", f"engine: {engine}").replace(
            "profile: 2xL40S-Qwen3.5-35B-A3B-FP8-fitted", "profile: 2xL40S-Qwen3.5-35B-A3B-FP8-vLLM"
        )
    )
    return path


def test_engine_with_a_profile_of_vllm_answers_as_vllm(tmp_path: Path) -> None:
    words = ("engine", "--replica", "us-ashburn-0", "--config", vllm_regions(tmp_path, "vllm"), "--port", "0")
    with running(r"gorgo engine us-ashburn-0 listening on (http://127\.0\.0\.1:\d+)", *words) as (said, process):
        with urllib.request.urlopen(f"{said[1]}/version", timeout=STOP_TIMEOUT_S) as answer:
            assert set(json.load(answer)) == {"version"}
        with urllib.request.urlopen(f"{said[1]}/metrics", timeout=STOP_TIMEOUT_S) as answer:
            assert b"vllm:num_preemptions_total" in answer.read()
        assert stopped(process, signal.SIGTERM) == 0


def test_engine_of_vllm_is_refused_for_a_replica_that_is_asked_as_sglang(tmp_path: Path) -> None:
    words = gorgo("engine", "--replica", "us-ashburn-0", "--config", vllm_regions(tmp_path, "sglang"), "--port", "0")
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 2
    assert "replicas.us-ashburn-0.engine: sglang" in done.stderr
    assert "expected vllm or auto" in done.stderr


def test_port_that_is_taken_is_told_without_a_traceback() -> None:
    words = ("engine", "--replica", "us-ashburn-0", "--config", ROOT / "regions.yaml", "--port")
    with running(r"gorgo engine us-ashburn-0 listening on http://127\.0\.0\.1:(\d+)", *words, "0") as (said, _):
        done = subprocess.run(gorgo(*words, said[1]), capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 1
    assert "address already in use" in done.stderr
    assert "Traceback" not in done.stderr


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[tuple[str, str, Path, subprocess.Popen[str]]]:
    """The quick start: the shipped file's three engines and the proxy, on free ports. Addresses, file, proxy."""
    text = (ROOT / "regions.yaml").read_text()
    with contextlib.ExitStack() as stack:
        for replica in load_config(ROOT / "regions.yaml").replicas:
            words = ("engine", "--replica", replica.name, "--config", ROOT / "regions.yaml", "--port", "0")
            said, _ = stack.enter_context(running(rf"gorgo engine {replica.name} listening on (http://\S+)", *words))
            text = text.replace(replica.url, said[1])
        (folder / "regions.yaml").write_text(text)
        serve = ("serve", "--config", folder / "regions.yaml", "--bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0")
        ready = r"gorgo serve listening on (http://\S+) \(admin (http://\S+)\)"
        said, proxy = stack.enter_context(running(ready, *serve))
        yield said[1], said[2], folder / "regions.yaml", proxy


@pytest.mark.system
def test_openai_client_of_the_reference_works(tmp_path: Path) -> None:
    with fleet(tmp_path) as (url, admin_url, config, proxy):
        (block,) = re.findall(r"```python\n(from openai .*?)```", (ROOT / "docs/reference.md").read_text(), re.DOTALL)
        script = block.replace("http://127.0.0.1:8080", url)
        assert script != block
        answer = output([sys.executable, "-c", script])
        assert len(answer) == 8 * 4  # eight tokens of four bytes

        assert "us-ashburn-0" in output(gorgo("check", "--live", "--config", config))

        shown = json.loads(output(gorgo("status", "--json", "--url", admin_url)))
        assert sum(replica["attempts"] for replica in shown["replicas"]) == 1
        tables = output(gorgo("status", "--url", admin_url)).splitlines()
        weights = "policy gorgo-ms m_rtt=1 m_queue=1 lambda=0.15 delta=25 eta=800, version 1, not frozen"
        assert " ".join(" ".join(tables).split()).endswith(weights), "its lines are as wide as a terminal"
        rows = [line.split()[:3] for line in tables]
        assert all([replica["region"], replica["name"], "ready"] in rows for replica in shown["replicas"])
        assert any("* us-ashburn-0" in line for line in tables)

        refused = {**environ(), "GORGO_ADMIN_TOKEN": "another"}
        done = subprocess.run(
            gorgo("status", "--url", admin_url), env=refused, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert "is GORGO_ADMIN_TOKEN right?" in done.stderr

        words = ("--url", url, "--limit", "5", "--max-output", "4", "--time-scale", "0.1", "--out", tmp_path / "out")
        (row,) = json.loads(output(gorgo("replay", "chat-small", "--json", *words)))
        assert (row["n"], row["errors"], row["policy"]) == (5, 0, "gorgo-ms")
        assert len((tmp_path / "out" / "requests.jsonl").read_text().splitlines()) == 5

        assert stopped(proxy, signal.SIGTERM) == 0


def test_log_of_a_proxy_is_text_or_json_from_a_level_on(tmp_path: Path) -> None:
    """No replica answers: each says so once, and the choice of format and level comes from an option or a variable."""
    text = re.sub(r"http://127\.0\.0\.1:\d+", "http://127.0.0.1:9", (ROOT / "regions.yaml").read_text())
    (tmp_path / "regions.yaml").write_text(text)
    words: list[str | Path] = ["serve", "--config", tmp_path / "regions.yaml"]
    words += ["--bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0"]
    for form, level in (("text", "warning"), ("json", "info")):
        command = gorgo(*words, "--log-format", form)
        variables = environ() | {"GORGO_SERVE_LOG_LEVEL": level}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, env=variables, **pipes) as process:  # type: ignore[call-overload]
            try:
                url = re.findall(r"listening on (http://\S+)", process.stdout.readline())[0]
                # A refused route writes a line at level info; warnings of the replicas come first.
                lines = [process.stderr.readline() for _ in range(3)]
                with contextlib.suppress(urllib.error.HTTPError):
                    urllib.request.urlopen(f"{url}/%20", timeout=STOP_TIMEOUT_S)
                assert stopped(process, signal.SIGTERM) == 0
                lines += process.stderr.read().splitlines()
            finally:
                process.kill()
        if form == "text":
            assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z (warning|error) ", one) for one in lines), (
                lines
            )
            assert any(re.search(r" warning replica_does_not_answer  replica=us-ashburn-0 ", one) for one in lines)
        else:
            levels = {json.loads(one)["event"]: json.loads(one)["level"] for one in lines}
            assert levels["replica_does_not_answer"] == "warning"
            assert levels["request_refused"] == "info"


def test_serve_warns_at_its_start_of_a_url_with_a_path(tmp_path: Path) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text((ROOT / "regions.yaml").read_text().replace("http://127.0.0.1:30000", "http://127.0.0.1:1/v1"))
    words = ["--config", str(config), "--bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0", "--log-format", "json"]
    with subprocess.Popen(
        gorgo("serve", *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ()
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("gorgo serve listening on")
            assert stopped(process, signal.SIGTERM) == 0
        finally:
            process.kill()
        _, log = process.communicate()
    (warning,) = (json.loads(line)["warning"] for line in log.splitlines() if "config_warning" in line)
    assert warning.endswith("http://127.0.0.1:1/v1 ends in /v1, which the proxy adds itself; write http://127.0.0.1:1")


#: Runs the command line as `python -m gorgo` does and prints at its end what it has imported.
PRINT_IMPORTS = """
import atexit, sys
atexit.register(lambda: print("imported", *sorted({name.partition(".")[0] for name in sys.modules})))
from gorgo.cli import main
main()
"""


def test_serve_refuses_an_admin_token_that_can_be_guessed() -> None:
    environment = {**environ(), "GORGO_ADMIN_TOKEN": "fifteen-letters"}
    words = gorgo("serve", "--config", ROOT / "regions.yaml")
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=COMMAND_S)
    assert done.returncode == 2
    assert "GORGO_ADMIN_TOKEN: a token of 15 characters; expected at least 16" in " ".join(done.stderr.split())


def test_serve_imports_no_package_of_the_tuner() -> None:
    """A proxy that ran: sqlalchemy and alembic keep the tuner's history, cma and joblib search offline."""
    words = ["serve", "--config", ROOT / "regions.yaml", "--bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0"]
    command = [sys.executable, "-c", PRINT_IMPORTS, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ()) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("gorgo serve listening on")
            assert stopped(process, signal.SIGTERM) == 0
            imported = process.stdout.read().split()
        finally:
            process.kill()
    assert {"imported", "gorgo", "starlette", "numpy"} <= set(imported)
    assert {"sqlalchemy", "alembic", "cma", "joblib", "tuner"}.isdisjoint(imported)


def output(words: list[str]) -> str:
    """stdout of a command that succeeds."""
    done = subprocess.run(words, env=environ(), capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_while_the_interpreter_ends_does_not_replace_the_exit_code(name: str) -> None:
    program = (
        "import atexit, os, signal, sys\n"
        "from gorgo.cli import main\n"
        f"atexit.register(os.kill, os.getpid(), signal.{name})\n"
        "sys.argv = ['gorgo', '--version']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def buffered(*, whether: bool) -> dict[str, str]:
    """The environment of a Python that buffers its output, or does not."""
    return {name: value for name, value in environ().items() if name != "PYTHONUNBUFFERED" or not whether}


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["policies"]], ids=" ".join)
def test_full_disk_behind_stdout_is_told_without_a_traceback(words: list[str], buffers: bool) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            gorgo(*words),
            env=buffered(whether=buffers),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "gorgo: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("words", [["no-command"], ["check", "--config", "/missing.yaml"]], ids=" ".join)
def test_full_disk_behind_stderr_has_an_exit_code_of_the_command_line(words: list[str], buffers: bool) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(gorgo(*words), env=buffered(whether=buffers), stderr=full, timeout=COMMAND_S, check=False)
    assert done.returncode == 1


def test_output_that_a_command_left_in_its_buffer_is_told_to_be_lost() -> None:
    program = (
        "import sys\n"
        "from gorgo.cli import app, main\n"
        "app.command('look')(lambda: print('found'))\n"
        "sys.argv = ['gorgo', 'look']\n"
        "main()\n"
    )
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-c", program]
        done = subprocess.run(
            words,
            env=buffered(whether=True),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "gorgo: [Errno 28] No space left on device\n")


def test_streams_that_the_caller_has_closed_lead_nowhere() -> None:
    # What was opened next took their numbers, and libraries that flush sys.stdout found None there.
    program = (
        "import os, sys\n"
        "from gorgo.cli import app, main\n"
        "def look(): print([os.readlink(f'/proc/self/fd/{n}') for n in range(3)], file=file); sys.stdout.flush()\n"
        "app.command('look')(look)\n"
        "file = os.fdopen(int(sys.argv[1]), 'w')\n"
        "sys.argv = ['gorgo', 'look']\n"
        "main()\n"
    )
    read, write = os.pipe()
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program, str(write)]
    done = subprocess.run(words, pass_fds=[write], timeout=COMMAND_S, check=False)
    os.close(write)
    with open(read) as told:
        assert (done.returncode, told.read()) == (0, "['/dev/null', '/dev/null', '/dev/null']\n")


# --- `gorgo serve --replica`, with real processes: engines of this package, and no file.


LISTENS = r"gorgo serve listening on (http://\S+) \(admin (http://\S+)\)"
ANYWHERE = ("--bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0")


@contextlib.contextmanager
def engine(*words: str) -> Iterator[str]:
    """The URL of a simulated engine next to the proxy."""
    config = ("--replica", "us-ashburn-0", "--config", ROOT / "regions.yaml", "--port", "0")
    with running(r"gorgo engine us-ashburn-0 listening on (http://\S+)", "engine", *config, *words) as (said, _):
        yield said[1]


def chat(url: str, model: str) -> tuple[str, dict[str, object]]:
    """The replica of the answer, and the answer."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.headers["x-gorgo-replica"], json.load(response)


def test_two_urls_are_a_fleet_whose_engines_and_models_are_found(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        near = stack.enter_context(engine())
        far = stack.enter_context(engine())
        words = ("serve", "--replica", near, "--replica", f"eu={far}", *ANYWHERE)
        said, proxy = stack.enter_context(running(LISTENS, *words))
        assert chat(said[1], "gorgo-sim")[0] in ("local-0", "eu-0")
        with urllib.request.urlopen(f"{said[1]}/v1/models", timeout=30) as response:
            assert [row["id"] for row in json.load(response)["data"]] == ["gorgo-sim"]
        shown = json.loads(output(gorgo("status", "--json", "--url", said[2])))
        assert [(row["name"], row["region"], row["engine"]["name"]) for row in shown["replicas"]] == [
            ("local-0", "local", "sglang"),
            ("eu-0", "eu", "sglang"),
        ]
        assert all(row["max_running_requests"] for row in shown["replicas"])
        assert "local-0, eu-0: sglang 0.5" in output(gorgo("status", "--url", said[2]))
        assert stopped(proxy, signal.SIGTERM) == 0


def test_an_adapter_is_found_where_an_engine_has_it_loaded(tmp_path: Path) -> None:
    text = (ROOT / "regions.yaml").read_text().replace("[gorgo-sim]       #", "[gorgo-sim, sql] #")
    (tmp_path / "regions.yaml").write_text(text)
    with contextlib.ExitStack() as stack:
        without = stack.enter_context(engine())
        loaded = stack.enter_context(engine("--config", str(tmp_path / "regions.yaml")))
        words = ("serve", "--replica", without, "--replica", loaded, "--policy", "round-robin", *ANYWHERE)
        said, _ = stack.enter_context(running(LISTENS, *words))
        assert {chat(said[1], "sql")[0] for _ in range(4)} == {"local-1"}
        assert {chat(said[1], "gorgo-sim:sql")[0] for _ in range(4)} == {"local-1"}
        assert {chat(said[1], "gorgo-sim")[0] for _ in range(4)} == {"local-0", "local-1"}


def test_the_printed_configuration_is_the_file_to_go_on_with() -> None:
    words = ("--replica", "http://a:30000", "--replica", "eu=http://b:30000", "--policy", "nearest", "--print-config")
    config = parse_config(output(gorgo("serve", *words)).encode())
    assert [replica.name for replica in config.replicas] == ["local-0", "eu-0"]
    assert config.proxy.policy == "nearest"


def test_options_that_exclude_each_other_and_wrong_urls_are_usage_errors() -> None:
    for words, said in (
        (["--replica", "http://a", "--config", "regions.yaml"], "--config and --replica: expected one of them"),
        (["--config", "none.yaml"], "expected a regions.yaml file, or gorgo serve --replica URL"),
        (["--engine", "vllm"], "--engine: expected --replica beside it"),
        (["--replica", "a:30000"], "expected URL or REGION=URL"),
        (["--replica", "http://a", "--engine", "tgi"], "replicas[0].engine"),
    ):
        done = CliRunner().invoke(app, ["serve", *words])
        assert done.exit_code == 2, words
        assert said in done.stderr, done.stderr
