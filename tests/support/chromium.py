"""A headless Chromium for tests, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMEOUT = 60  # seconds


class Chromium:
    """One browser with one page; a context manager.

    Attributes:
        console: texts of errors and violations of the page's policy that the page's console shows.
    """

    def __enter__(self) -> Chromium:
        self.folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self.process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--remote-debugging-port=0", f"--user-data-dir={self.folder.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.console: list[str] = []
        self._loop, self._ids = asyncio.new_event_loop(), itertools.count(1)
        self._run(self._connect())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._session.close())
        self._loop.close()
        self.process.terminate()
        self.process.wait(TIMEOUT)
        self.folder.cleanup()

    def open(self, url: str) -> None:
        """Load a page, to the end of its scripts."""
        self.console.clear()
        self.command("Page.navigate", url=url)
        base = json.dumps(url.partition("?")[0])
        self.wait_for(f"location.href.startsWith({base}) && document.readyState == 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression. Raises AssertionError if it throws."""
        reply = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Evaluate an expression until its value is true. While a page loads it may also fail."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                if self.evaluate(f"Boolean({script})"):
                    return
                problem = script
            except AssertionError as error:
                problem = f"{script}\n{error}"
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

    def set_view(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the page in CSS pixels, and its colour scheme."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                     mobile=width < 500)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        return self._run(self._command(method, parameters))

    def _run(self, coroutine: Coroutine) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(coroutine, TIMEOUT))

    async def _connect(self) -> None:
        port_file = Path(self.folder.name) / "DevToolsActivePort"
        while not port_file.exists() or not port_file.read_text():
            assert self.process.poll() is None, "Chromium ended"
            await asyncio.sleep(0.05)
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port_file.read_text().split()[0]}/json/list") as reply:
            pages = [target for target in await reply.json() if target["type"] == "page"]
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=1 << 28)
        for domain in ("Page", "Runtime", "Log"):
            await self._command(f"{domain}.enable", {})

    async def _command(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while (message := await self._socket.receive_json()).get("id") != number:
            if message["method"] == "Log.entryAdded":
                self.console.append(message["params"]["entry"]["text"])
            if message["method"] == "Runtime.exceptionThrown":
                self.console.append(str(message["params"]["exceptionDetails"]))
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]
