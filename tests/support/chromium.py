"""Pages in a headless Chromium, driven over its debugging pipe: no driver and no network."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
# --no-sandbox: the tests may run as root in a container.
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--remote-debugging-pipe", "--no-first-run", "--disable-background-networking")  # fmt: skip
TIMEOUT = 60.0  # seconds


class Tab:
    """A tab of the browser; `renew` replaces it by another one without history and storage.

    Attributes:
        errors: texts of exceptions and of console errors of the page, refusals by its security policy among them.
    """

    def __init__(self, requests: int, replies: int) -> None:
        self.requests, self.replies = requests, replies
        self.buffer, self.number, self.session, self.errors = b"", 0, None, []

    def renew(self) -> None:
        self.session, self.errors = None, []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict:
        """Send a command of the DevTools protocol and wait for its result. Raises RuntimeError if it fails."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.requests, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next_message()
            if reply.get("id") == self.number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def open(self, address: Path | str) -> None:
        """Load a file or URL, to the end of its scripts."""
        self.errors.clear()
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        self.command("Page.navigate", url=url)
        base = json.dumps(url.partition("?")[0])
        self.wait_for(f"location.href.startsWith({base}) && document.readyState == 'complete'")

    def wait_for(self, expression: str) -> None:
        """Evaluate an expression until its value is true. While a page loads it may also fail."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                if self.evaluate(f"Boolean({expression})"):
                    return
                problem = expression
            except RuntimeError as error:
                problem = f"{expression}\n{error}"
            assert time.monotonic() < deadline, f"{problem}\n{self.evaluate('document.body?.innerText')}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, text: str) -> None:
        """Type into the focused element; a newline is the Enter key."""
        for part in text.splitlines(keepends=True):
            self.command("Input.insertText", text=part.rstrip("\n"))
            if part.endswith("\n"):
                self.press("Enter", 13, text="\r")

    def press(self, key: str, code: int, *, text: str = "") -> None:
        """Press a key with this name and Windows key code; text: what it enters."""
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def resize(self, width: int, height: int = 900, *, mobile: bool = False, dark: bool = False) -> None:
        """Set size in CSS pixels and colour scheme; mobile: with a phone's viewport and touch."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height,
                     deviceScaleFactor=2 if mobile else 1, mobile=mobile)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression; promises are awaited. Raises RuntimeError if it throws."""
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def drag(self, x0: float, x1: float, y: float) -> None:
        """Press the mouse at (x0, y), move it to (x1, y), release it; in CSS pixels of the window."""
        for kind, x in (("mouseMoved", x0), ("mousePressed", x0), ("mouseMoved", (x0 + x1) / 2), ("mouseMoved", x1),
                        ("mouseReleased", x1)):  # fmt: skip
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def screenshot(self, path: Path) -> None:
        """The whole page, also what is below the window."""
        picture = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _next_message(self) -> dict:
        while b"\0" not in self.buffer:
            part = os.read(self.replies, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        event, parameters = message.get("method"), message.get("params", {})
        if message.get("sessionId") == self.session:
            if event == "Runtime.exceptionThrown":
                self.errors.append(str(parameters["exceptionDetails"]))
            elif event == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                self.errors.append(parameters["entry"]["text"])
        return message


@contextmanager
def open_tab(profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, with this folder as its profile."""
    request_end, requests = os.pipe()
    replies, reply_end = os.pipe()
    # Chromium reads commands from descriptor 3 and writes replies to 4; neither may be one of these ends itself.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (request_end, reply_end)]
    shell = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
    with (profile / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=ends, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    for end in (request_end, reply_end, *ends):
        os.close(end)
    try:
        tab = Tab(requests, replies)
        tab.renew()
        yield tab
    finally:
        process.terminate()
        process.wait(TIMEOUT)
        os.close(requests)
        os.close(replies)
