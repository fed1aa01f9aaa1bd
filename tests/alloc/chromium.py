"""A headless Chromium over its DevTools pipe, with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["Browser", "find_chromium"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
LAUNCH = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 64) for n in sys.argv[1:3])
os.dup2(commands, 3), os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. `with Browser(binary, profile) as tab: tab.open(file)`."""

    def __init__(self, binary: str, profile: Path) -> None:
        read_commands, self._commands = os.pipe()
        answers, write_answers = os.pipe()
        command = [sys.executable, "-c", LAUNCH, str(read_commands), str(write_answers), binary, *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(read_commands, write_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._answers = os.fdopen(answers, "rb")
        self._number, self._rest, self._session = 0, b"", ""
        self.problems: list[str] = []
        """What the page's scripts threw or wrote to the console, and what it asked the network for."""

    def __enter__(self) -> Browser:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._session = ""
        self.send("Browser.close")
        os.close(self._commands)
        self._process.wait(20)
        self._answers.close()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command, and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, address: str) -> None:
        """Load a page (or, when only the fragment differs, go there) and wait for it."""
        self.send("Page.navigate", url=address)
        self.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click on the middle of an element."""
        script = "(e => { e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
        script += " return [b.x + b.width / 2, b.y + b.height / 2] })"
        script += f"(document.querySelector({json.dumps(selector)}))"
        x, y = self.run(script)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """A real key press."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, file: Path) -> None:
        """The whole page as a PNG."""
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._answers.fileno(), 1 << 16)
            assert part, "Chromium ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.problems.append(json.dumps(parameters))
        if event.get("method") == "Network.requestWillBeSent":
            address = parameters["request"]["url"]
            if not address.startswith(("file:", "about:", "data:")):
                self.problems.append(f"asked for {address}")
