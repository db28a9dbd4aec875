"""A headless Chromium, driven by chromedriver's own HTTP protocol (W3C WebDriver): no library between.

Owns the two processes and the few verbs that the tests need. Where Chromium is missing, `missing_reason` says so.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

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
        while not condition():
            assert time.monotonic() < deadline_s, f"it did not happen: {what}"
            time.sleep(_POLL_S)

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
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=out, stderr=subprocess.STDOUT)
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
        raise RuntimeError(f"{value['error']}: {value['message']}")
    return value
