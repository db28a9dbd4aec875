"""The status page in a real browser, and the site of the documents."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.lab.demo import REPLICAS, DemoFleet, running_fleet
from tests.documents import ROOT
from tests.ports import free_port

# --- A headless Chromium, driven by chromedriver's own HTTP protocol (W3C WebDriver): no library between.
#
# Owns the two processes and the few verbs that the tests need. Where Chromium is missing, `missing_reason` says so.


_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 15.0
_WAIT_S = 20.0
_POLL_S = 0.1
_READY = re.compile(r"started successfully on port (\d+)")
#: The key under which WebDriver hands out elements.
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def missing_reason() -> str | None:
    """Why there is no browser to test with, or `None`."""
    wanted = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(wanted)}: apt-get install chromium chromium-driver" if wanted else None


class MissingElementError(RuntimeError):
    """No element of the page matches."""


class Browser:
    """One session."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._session = session

    def go(self, url: str) -> None:
        self._post("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a function body returns."""
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def type(self, css: str, text: str) -> None:
        self._post(f"element/{self._find(css)}/value", {"text": text})

    def click(self, css: str) -> None:
        """As a person does: scrolled to, in sight, at its middle."""
        self._post(f"element/{self._find(css)}/click", {})

    def text(self, css: str) -> str:
        return str(self._get(f"element/{self._find(css)}/text"))

    def count(self, css: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", css))

    def until(self, condition: Callable[[], object], what: str, *, limit_s: float = _WAIT_S) -> None:
        """Wait for something that happens in the page; `AssertionError` with `what` if it does not."""
        deadline_s = time.monotonic() + limit_s
        while not self._holds(condition):
            assert time.monotonic() < deadline_s, f"it did not happen: {what}"
            time.sleep(_POLL_S)

    @staticmethod
    def _holds(condition: Callable[[], object]) -> bool:
        """Whether it does by now: an element of a page that is still loading will come."""
        try:
            return bool(condition())
        except MissingElementError:
            return False

    def colours(self, scheme: str) -> None:
        """`light` or `dark`, whatever the machine prefers."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})

    def scripts(self, on: bool) -> None:
        """Whether pages loaded from now on may run any."""
        self.devtools("Emulation.setScriptExecutionDisabled", {"value": not on})

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._post("goog/cdp/execute", {"cmd": command, "params": parameters})

    def screenshot(self, width: int) -> bytes:
        """The whole page as PNG, however long."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", size)
        height = int(self.run("return Math.ceil(document.body.getBoundingClientRect().height)"))
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.devtools("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        return base64.b64decode(shot["data"])

    def console_errors(self) -> list[str]:
        """What the browser's console holds against the page, since the last call."""
        entries = self._post("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def requested(self) -> list[str]:
        """Every URL that was asked for over the network, since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self._post("se/log", {"type": "performance"})]
        return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]

    def _find(self, css: str) -> str:
        return str(self._post("element", {"using": "css selector", "value": css})[_ELEMENT])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _value(self._http.post(f"/session/{self._session}/{path}", json=body))

    def _get(self, path: str) -> Any:
        return _value(self._http.get(f"/session/{self._session}/{path}"))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a new, empty profile in `folder`; both processes are gone afterwards."""
    log = folder / "chromedriver.log"
    with log.open("wb") as out:
        driver = subprocess.Popen(["chromedriver", f"--port={free_port()}"], stdout=out, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{_port(driver, log)}", timeout=60, trust_env=False) as http:
            session = str(_value(http.post("/session", json={"capabilities": _wishes(folder)}))["sessionId"])
            try:
                yield Browser(http, session)
            finally:
                http.delete(f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait(_STOP_TIMEOUT_S)


def _wishes(folder: Path) -> dict[str, Any]:
    profile = folder / "profile"
    profile.mkdir()
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    arguments += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]
    chrome = {"args": arguments, "binary": shutil.which("chromium")}
    logs = {"browser": "ALL", "performance": "ALL"}
    return {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": chrome, "goog:loggingPrefs": logs}}


def _port(driver: subprocess.Popen[bytes], log: Path) -> int:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        said = log.read_text(errors="replace")
        if found := _READY.search(said):
            return int(found[1])
        if driver.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"chromedriver did not start: {said[-2000:]}")
        time.sleep(_POLL_S)


def _value(response: httpx.Response) -> Any:
    value = response.json()["value"]
    if response.is_error:
        kind = MissingElementError if value["error"] in ("no such element", "stale element reference") else RuntimeError
        raise kind(f"{value['error']}: {value['message']}")
    return value


# --- The status page in a real browser: Chromium, headless, before a real proxy with three simulated engines under
# load.
#
# Makes the screenshot of docs/status-page.md where `GORGO_SCREENSHOT` says (a path), else in the test's own folder.


NASTY = "<img src=x onerror='window.hurt = 1'><script>window.hurt = 1</script>"
MAX_BYTES = 300_000
WIDTH, PHONE_WIDTH = 1280, 390
REASON = "tr[data-reason='seoul-0'] p"


@dataclass(frozen=True, slots=True)
class Open:
    """The page, open and signed in."""

    fleet: DemoFleet
    browser: Browser

    @property
    def url(self) -> str:
        return f"{self.fleet.admin_url}/admin/page"

    def put(self, method: str, path: str, body: Mapping[str, object]) -> None:
        headers = {"authorization": f"Bearer {self.fleet.token}"}
        answer = httpx.request(method, self.fleet.admin_url + path, json=body, headers=headers, trust_env=False)
        answer.raise_for_status()

    def finished(self) -> int:
        headers = {"authorization": f"Bearer {self.fleet.token}"}
        answer = httpx.get(f"{self.fleet.admin_url}/admin/status", headers=headers, trust_env=False)
        return int(answer.json()["recent_stats"]["n"])

    def side(self, css: str, name: str) -> float:
        """Where an element's left or right side is, in pixels of the window."""
        found = self.browser.run(
            "return document.querySelector(arguments[0]).getBoundingClientRect()[arguments[1]]", css, name
        )
        return float(found)

    def newest(self) -> str:
        return str(self.browser.run("return (document.querySelector('#decisions details') || {id: ''}).id"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Signed in by the form, while a trace is replayed through the proxy, for about a minute."""
    reason = missing_reason()
    if reason is not None:
        pytest.skip(f"PAGE TESTS SKIPPED: {reason}")
    folder = tmp_path_factory.mktemp("page")
    with running_fleet("gorgo-ms", folder=folder, seed=3) as fleet, browser(folder) as opened:
        fleet.processes.start("replay", ["replay", "chat-small", "--url", fleet.url, "--time-scale", "2.5"])
        opened.go("about:blank")
        opened.requested()
        opened.console_errors()
        opened.go(f"{fleet.admin_url}/")
        opened.type("#token", fleet.token)
        opened.click("button")
        opened.until(lambda: opened.text("#live").startswith("live"), "the page went live")
        yield Open(fleet, opened)


def test_every_replica_has_its_row_with_a_round_trip(page: Open) -> None:
    rows = page.browser.run(
        "const rows = [...document.querySelectorAll('tr[data-replica]')];"
        "return rows.map(row => [row.dataset.replica, row.cells[2].innerText])"
    )
    assert [name for name, _ in rows] == list(REPLICAS)
    assert all(float(rtt_ms) > 0 for _, rtt_ms in rows)
    assert page.browser.run("return document.title") in ("GORGO us-ashburn", "(1) GORGO us-ashburn")


def test_updates_change_what_is_shown_without_a_reload(page: Open) -> None:
    page.browser.run("window.loadedOnce = true")
    before, told = page.newest(), page.browser.text("#live")
    page.browser.until(lambda: page.newest() not in ("", before), "a newer decision appeared")
    page.browser.until(lambda: page.browser.text("#live") != told, "the time of the last news moved")
    assert page.browser.run("return window.loadedOnce") is True


def test_decision_opens_on_click_and_stays_while_it_is_read(page: Open) -> None:
    page.browser.until(lambda: page.browser.count("#decisions details") >= 3, "three decisions")
    first = page.newest()
    chosen = page.browser.run("return document.querySelectorAll('#decisions details')[1].id")
    assert page.browser.run("return document.querySelector('#decisions .inside').checkVisibility()") is False
    page.browser.click(f"[id='{chosen}'] summary")
    terms = page.browser.text(f"[id='{chosen}'] table.terms").split()
    assert {*REPLICAS, "rtt", "queue", "prefill", "externality", "room", "shared", "cost", "chosen"} <= set(terms)
    page.browser.until(
        lambda: page.browser.run("return !document.querySelector('.waits').hidden"), "newer decisions waited"
    )
    assert page.browser.run("return document.getElementById(arguments[0]).open", chosen) is True
    page.browser.click(f"[id='{chosen}'] summary")
    page.browser.until(
        lambda: page.browser.run("return document.querySelector('.waits').hidden"), "the newer ones took their place"
    )
    page.browser.until(lambda: page.newest() != first, "the list went on")


def test_drained_replica_is_said_at_the_top_and_in_its_row(page: Open) -> None:
    page.put("POST", "/admin/replicas/seoul-0/drain", {})
    page.browser.until(lambda: "seoul-0 is draining" in page.browser.text("#alerts"), "the alert")
    assert "draining" in page.browser.text("tr[data-replica='seoul-0'] .state")
    assert page.browser.run("return document.title").startswith("(")
    page.put("POST", "/admin/replicas/seoul-0/drain", {"drain": False})
    page.browser.until(lambda: "seoul-0" not in page.browser.text("#alerts"), "the alert left")


def test_screenshot_of_the_page_under_load(page: Open, tmp_path: Path) -> None:
    page.browser.until(lambda: page.finished() >= 100, "a hundred requests finished", limit_s=60)
    for value, reason in ((1.15, "campaign 1, generation 3"), (0.92, "campaign 1, generation 4")):
        order = {"weights": {"m_queue": value}, "by": "gorgo tune", "reason": reason}
        page.put("PUT", "/admin/weights", order)
    page.put("POST", "/admin/freeze", {"by": "mara", "reason": "held over the weekend"})
    try:
        page.browser.colours("light")
        page.browser.until(lambda: "held over the weekend" in page.browser.text("#weights"), "the freeze was shown")
        page.browser.until(lambda: _finished(page), "a decision's outcome was shown")
        page.browser.run("document.querySelector('#decisions .seen.shown').closest('details').open = true")
        shot = page.browser.screenshot(WIDTH)
        Path(os.environ.get("GORGO_SCREENSHOT", tmp_path / "status-page.png")).write_bytes(shot)
        hidden = "const wide = document.querySelector('#fleet .wide'); return wide.scrollWidth - wide.clientWidth"
        assert page.browser.run(hidden) == 0
        assert shot.startswith(b"\x89PNG")
        assert len(shot) < MAX_BYTES
        page.browser.colours("dark")
        assert page.browser.screenshot(WIDTH) != shot
    finally:
        page.browser.run("document.querySelectorAll('#decisions details').forEach(one => { one.open = false })")
        page.put("POST", "/admin/unfreeze", {})


def test_page_fits_a_desktop_and_a_phone_with_a_replica_drained(page: Open, tmp_path: Path) -> None:
    hidden = (
        "const over = css => { const one = document.querySelector(css); return one.scrollWidth - one.clientWidth };"
        "return [over('html'), over('#decisions'), over('#fleet .wide')]"
    )
    page.put("POST", "/admin/replicas/seoul-0/drain", {})
    try:
        page.browser.until(lambda: page.browser.count(REASON) == 1, "the reason was shown")
        assert page.browser.text(REASON).startswith("no new requests")
        (tmp_path / "drained.png").write_bytes(page.browser.screenshot(WIDTH))
        assert page.browser.run(hidden) == [0, 0, 0]
        (tmp_path / "drained-phone.png").write_bytes(page.browser.screenshot(PHONE_WIDTH))
        document, decisions, fleet = page.browser.run(hidden)
        assert (document, decisions) == (0, 0)
        assert fleet > 0  # scrolls within itself, and the replica's name and the reason stay
        page.browser.run("document.querySelector('#fleet .wide').scrollLeft = 200")
        assert 0 <= page.side("tr[data-replica] th", "left") < 30
        assert 0 <= page.side(REASON, "left") < page.side(REASON, "right") <= PHONE_WIDTH
    finally:
        page.browser.screenshot(WIDTH)
        page.put("POST", "/admin/replicas/seoul-0/drain", {"drain": False})


def test_reason_of_any_length_wraps_and_does_not_widen_the_table(page: Open) -> None:
    """An engine's own text may be long, and without a blank."""
    measured = (
        "const [table, reason] = ['#fleet table', arguments[0]].map(css => document.querySelector(css));"
        "const before = table.scrollWidth; reason.textContent = arguments[1];"
        "return [before, table.scrollWidth, reason.getBoundingClientRect().right]"
    )
    page.put("POST", "/admin/replicas/seoul-0/drain", {})
    try:
        page.browser.until(lambda: page.browser.count(REASON) == 1, "the reason was shown")
        for width in (WIDTH, PHONE_WIDTH):
            page.browser.screenshot(width)
            for text in ("word " * 200, "x" * 1000):
                before, after, right = page.browser.run(measured, REASON, text)
                assert after <= before
                assert right <= width
    finally:
        page.browser.screenshot(WIDTH)
        page.put("POST", "/admin/replicas/seoul-0/drain", {"drain": False})


def _finished(page: Open) -> object:
    """Marks the newest decision whose first token came."""
    return page.browser.run(
        "const seen = [...document.querySelectorAll('#decisions .seen')].find(one => one.innerText !== '-');"
        "if (seen) seen.classList.add('shown'); return !!seen"
    )


def test_words_of_others_are_text(page: Open) -> None:
    page.put("PUT", "/admin/weights", {"weights": {"m_rtt": 1.1}, "reason": NASTY, "by": NASTY})
    page.browser.until(lambda: NASTY in page.browser.text("#weights"), "the reason was shown")
    assert page.browser.count("#weights img, #weights script") == 0
    assert page.browser.run("return window.hurt === undefined") is True


def test_browser_has_nothing_against_the_page_and_asked_nobody_else(page: Open) -> None:
    assert page.browser.console_errors() == []
    asked = page.browser.requested()
    assert f"{page.url}/events" in asked
    assert [url for url in asked if not url.startswith(f"{page.fleet.admin_url}/")] == []


def test_without_scripts_the_page_is_a_snapshot_that_opens_and_reloads(page: Open) -> None:
    page.browser.scripts(False)
    try:
        page.browser.go(page.url)
        assert page.browser.text("#live").startswith("snapshot of")
        assert "Without scripts this is a snapshot" in page.browser.text("noscript")
        page.browser.click("#decisions details summary")
        assert "chosen" in page.browser.text("#decisions details table.terms")
        page.browser.click("noscript a + a")
        page.browser.until(lambda: "it reloads every 10 s" in page.browser.text("noscript"), "it reloads")
    finally:
        page.browser.scripts(True)


def test_signing_out_leads_back_to_the_form(page: Open) -> None:
    page.browser.go(page.url)
    page.browser.click("header button")
    page.browser.until(lambda: page.browser.count("#token") == 1, "the form appeared")
    page.browser.type("#token", "wrong")
    page.browser.click("button")
    page.browser.until(lambda: page.browser.count(".login .bad") == 1, "the token was refused")
    page.browser.type("#token", page.fleet.token)
    page.browser.click("button")
    page.browser.until(lambda: page.browser.count("tr[data-replica]") == len(REPLICAS), "the page came back")


def test_page_says_when_the_proxy_is_gone(page: Open) -> None:
    page.browser.until(lambda: page.browser.text("#live").startswith("live"), "the page went live again")
    page.fleet.processes.finish("serve")
    page.browser.until(lambda: page.browser.text("#live").startswith("connection lost"), "the page said so")


# --- `make docs`: the site builds without a broken link, has every page and finds words in them.


#: Packages of the lock, the script for diagrams, and forty pages.
TIMEOUT_S = 600


def test_make_docs_builds_a_site_with_search() -> None:
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = ROOT / "build/site"
    for page in (
        "index.html",
        "docs/index.html",
        "docs/migrating/index.html",
        "DESIGN/index.html",
        "datasets/index.html",
    ):
        assert (site / page).is_file(), page
    found = json.loads((site / "search/search_index.json").read_text())["docs"]
    assert any("round robin" in section["text"] and section["location"].startswith("#") for section in found)
    assert any(section["location"].startswith("docs/policies/gorgo-ms/") for section in found)
