"""Run rooms of the tests, a folder under tests/ each: some in the foreground, others beside them.

Starting servers and containers is mostly waiting, so on two cores other tests run beside them. What those print is
shown when they have ended. The durations of the last run are in .work/tests/<room>.xml.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
INTERRUPT_S = 60.0
"""For pytest to end its fixtures, servers among them, after SIGINT."""


class Rooms:
    """Rooms that run one after another, each in a pytest of its own. output: a file, or None for the terminal."""

    def __init__(self, names: Sequence[str], marker: str, output: IO[str] | None = None) -> None:
        self._waiting = [name for name in names if _has_tests(name, marker)]
        self._marker = marker
        self._output = output
        self._running: subprocess.Popen[str] | None = None
        self.failed: list[str] = []

    def poll(self) -> bool:
        """Start the next room if none runs. Returns whether there is anything left to wait for."""
        if self._running is not None:
            code = self._running.poll()
            if code is None:
                return True
            if code:
                self.failed.append(self._waiting[0])
            del self._waiting[0]
            self._running = None
        if self._waiting:
            self._running = self._start(self._waiting[0])
        return self._running is not None

    def interrupt(self) -> None:
        """Ask the room that runs to end its fixtures, servers among them, and itself."""
        if self._running is not None:
            self._running.send_signal(signal.SIGINT)

    def wait(self) -> None:
        """Wait for its end; kill it if it takes too long."""
        if self._running is not None:
            try:
                self._running.wait(INTERRUPT_S)
            except subprocess.TimeoutExpired:
                self._running.kill()

    def _start(self, name: str) -> subprocess.Popen[str]:
        report = f".work/tests/{name}{'-long' if self._marker.startswith('long') else ''}.xml"
        options = ["-m", self._marker] if self._marker else []
        command = [sys.executable, "-m", "pytest", f"tests/{name}", f"--junitxml={report}", *options]
        # In a session of its own: Ctrl-C comes from here, once. A second one would interrupt the end of the fixtures.
        return subprocess.Popen(
            command, cwd=ROOT, stdout=self._output, stderr=self._output, text=True, start_new_session=True
        )


def main() -> int:
    """Run what the command line says. Returns 0 if every room passed, 130 after Ctrl-C or SIGTERM, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="+", help="folders under tests/, in the foreground, one after another")
    parser.add_argument("--beside", nargs="*", default=[], metavar="ROOM", help="meanwhile, one after another")
    parser.add_argument("-m", dest="marker", default="", help="only the tests that pytest's -m selects with this")
    options = parser.parse_args()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)
    with tempfile.TemporaryFile("w+") as output:
        groups = [Rooms(options.rooms, options.marker), Rooms(options.beside, options.marker, output)]
        try:
            while sum(group.poll() for group in groups):
                time.sleep(0.1)
        except KeyboardInterrupt:
            for group in groups:
                group.interrupt()
            for group in groups:
                group.wait()
            return 130
        finally:
            output.seek(0)
            sys.stdout.write(output.read())
    failed = [name for group in groups for name in group.failed]
    print(f"failed: {', '.join(failed)}" if failed else "all rooms passed")
    return 1 if failed else 0


def _has_tests(room: str, marker: str) -> bool:
    """Whether a room has tests, marked `long` where only those run: without any, pytest would fail."""
    folder = ROOT / "tests" / room
    files = [*folder.rglob("test_*.py")]
    if marker.startswith("long"):
        files = [file for file in (*files, *folder.glob("conftest.py")) if "mark.long" in file.read_text()]
    if not files:
        print(f"tests/{room}: no {marker} tests".replace("  ", " "), flush=True)
    return bool(files)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
