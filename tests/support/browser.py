"""Headless Chromium for tests, controlled over a pipe by its DevTools protocol. No driver, no library, no
port.

    with Browser() as browser:
        page = browser.open(file, width=390, scheme="dark")
        page.ask("document.title")

A page records its console output, its exceptions, and every address that it requests.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT_S = 60.0


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    def __init__(self) -> None:
        program = find()
        assert program is not None, f"none of {', '.join(NAMES)} is installed"
        self._home = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        command = [
            program, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self._home.name}",
            "--no-sandbox",
            "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--hide-scrollbars", "--force-color-profile=srgb", "about:blank",
        ]  # fmt: skip
        # The protocol is spoken on descriptors 3 and 4. The browser is in a group of its own: it has many
        # processes.
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "browser", *command]
        self._process = subprocess.Popen(
            shell,
            pass_fds=(theirs_in, theirs_out),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread, self._count = b"", 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._to)  # it ends itself when its pipe does
        os.close(self._from)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._home.cleanup()

    def open(
        self,
        file: Path,
        *,
        width: int = 1280,
        height: int = 900,
        scheme: Literal["light", "dark"] = "light",
        media: str = "screen",
    ) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.look(width=width, height=height, scheme=scheme, media=media)
        page.go(file)
        return page

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message = {
            "id": number,
            "method": method,
            "params": params,
            **({"sessionId": session} if session else {}),
        }
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def next(self) -> dict[str, Any]:
        """The browser's next message; events are also recorded."""
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._from, 1 << 20) if ready else b""
            assert chunk, "the browser said nothing more"
            self._unread += chunk
        one, _, self._unread = self._unread.partition(b"\0")
        said: dict[str, Any] = json.loads(one)
        if "method" in said:
            self.events.append(said)
        return said


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def look(
        self,
        *,
        width: int = 1280,
        height: int = 900,
        scheme: Literal["light", "dark"] = "light",
        media: str = "screen",
    ) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def go(self, file: Path) -> None:
        begun = len(self._browser.events)
        self.call("Page.navigate", url=file.resolve().as_uri())
        while not self._heard("Page.loadEventFired", begun):
            self._browser.next()

    def _heard(self, method: str, begun: int = 0) -> list[dict[str, Any]]:
        events = self._browser.events[begun:]
        return [
            one["params"]
            for one in events
            if one["method"] == method and one.get("sessionId") == self._session
        ]

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions."""
        thrown = [one["exceptionDetails"]["text"] for one in self._heard("Runtime.exceptionThrown")]
        printed = [
            str(one["args"])
            for one in self._heard("Runtime.consoleAPICalled")
            if one["type"] in ("error", "warning", "assert")
        ]
        logged = [
            one["entry"]["text"]
            for one in self._heard("Log.entryAdded")
            if one["entry"]["level"] in ("error", "warning")
        ]
        return thrown + printed + logged

    @property
    def addresses(self) -> list[str]:
        """Every requested address."""
        return [one["request"]["url"] for one in self._heard("Network.requestWillBeSent")]

    def picture(self, file: Path, *, whole: bool = True, top: int = 0, height: int = 0) -> None:
        clip: dict[str, Any] = {}
        if height:
            width = self.ask("document.documentElement.clientWidth")
            clip = {"clip": {"x": 0, "y": top, "width": width, "height": height, "scale": 1}}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])
