"""A headless Chromium, driven through its DevTools over a pipe: a page, its JavaScript, a mouse, a finger, a keyboard and pictures."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
KEYS = {
    "ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9, "Enter": 13, "Escape": 27, "Delete": 46, "z": 90,
}  # fmt: skip
# As root, without a graphics card, and without a word to any server but the one of the test.
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run --disable-extensions "
    "--disable-background-networking --disable-component-update --disable-sync --remote-debugging-pipe"
).split()


def path() -> str | None:
    """Where Chromium is, None where there is none that this client can drive."""
    return next(filter(None, map(shutil.which, NAMES)), None) if os.name == "posix" else None


def _moved(end: int) -> int:
    import fcntl  # late: not on Windows

    other = fcntl.fcntl(end, fcntl.F_DUPFD, 20)
    os.close(end)
    return other


class Chromium:
    def __init__(self) -> None:
        found = path()
        assert found
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (hears, says), (listens, answers) = os.pipe(), os.pipe()
        hears, answers = map(_moved, (hears, answers))  # out of the way of 3 and 4, where Chromium reads and writes
        shell = f'exec "$0" "$@" 3<&{hears} 4>&{answers} {hears}<&- {answers}>&-'
        command = ["bash", "-c", shell, found, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(hears, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(hears)
        os.close(answers)
        self._says, self._listens, self._heard, self._count = says, listens, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._says)
        os.close(self._listens)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._says, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._heard:
            if not select.select([self._listens], [], [], 60)[0]:
                raise TimeoutError("Chromium has not answered for a minute")
            more = os.read(self._listens, 1 << 20)
            if not more:
                raise RuntimeError("Chromium has ended")
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\0")
        return json.loads(line)

    def js(self, code: str) -> Any:
        done = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        return done["result"].get("value")

    def wait(self, code: str, wanted: Callable[[Any], bool] = bool, seconds: float = 30.0) -> Any:
        """What `code` gives once it is as wanted."""
        end = time.monotonic() + seconds
        while not wanted(value := self.js(code)):
            if time.monotonic() > end:
                raise TimeoutError(f"{code} is still {value!r}")
            time.sleep(0.03)
        return value

    def open(self, address: str) -> None:
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def size(self, width: int, height: int, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def mouse(self, *points: tuple[float, float]) -> None:
        """Down at the first point, through the others, up at the last."""
        moves = [("mouseMoved", p) for p in points[1:]]
        for kind, (x, y) in [("mousePressed", points[0]), *moves, ("mouseReleased", points[-1])]:
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def finger(self, *points: tuple[float, float]) -> None:
        for kind, (x, y) in [("touchStart", points[0]), *(("touchMove", p) for p in points[1:])]:
            self.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def key(self, name: str, times: int = 1, held: int = 0) -> None:
        """`held`: 2 with Ctrl, 4 with Cmd, 8 with Shift, added together."""
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                codes = {"windowsVirtualKeyCode": KEYS[name], "nativeVirtualKeyCode": KEYS[name]}
                text = "\r" if name == "Enter" else ""  # without it Enter presses no button
                self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, modifiers=held, text=text, **codes)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
