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
from pathlib import Path
from types import FrameType
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
INTERRUPT_S = 60.0
"""For pytest to end its fixtures, servers among them, after SIGINT."""


def main() -> int:
    """Run what the command line says. Returns 0 if every room passed, 130 after Ctrl-C or SIGTERM, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="+", help="folders under tests/, in the foreground, one after another")
    parser.add_argument("--beside", nargs="*", default=[], metavar="ROOM", help="meanwhile, one after another")
    parser.add_argument("-m", dest="marker", default="", help="only the tests that pytest's -m selects with this")
    options = parser.parse_args()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)
    waiting = [
        [room for room in rooms if _has_tests(room, options.marker)] for rooms in (options.rooms, options.beside)
    ]
    running: dict[int, tuple[str, subprocess.Popen[str]]] = {}
    failed: list[str] = []
    with tempfile.TemporaryFile("w+") as output:
        try:
            while any(waiting) or running:
                for row, rooms in enumerate(waiting):
                    if rooms and row not in running:
                        running[row] = rooms[0], _start(rooms.pop(0), options.marker, output if row else None)
                for row, (room, process) in list(running.items()):
                    if process.poll() is not None:
                        del running[row]
                        failed += [room] * (process.returncode != 0)
                time.sleep(0.1)
        except KeyboardInterrupt:
            _end([process for _, process in running.values()])
            return 130
        finally:
            output.seek(0)
            sys.stdout.write(output.read())
    print(f"failed: {', '.join(failed)}" if failed else "all rooms passed")
    return 1 if failed else 0


def _start(room: str, marker: str, output: IO[str] | None) -> subprocess.Popen[str]:
    """Start a room in a pytest of its own. output: a file, or None for the terminal."""
    report = f".work/tests/{room}{'-long' if marker.startswith('long') else ''}.xml"
    options = ["-m", marker] if marker else []
    command = [sys.executable, "-m", "pytest", f"tests/{room}", f"--junitxml={report}", *options]
    # In a session of its own: Ctrl-C comes from here, once. A second one would interrupt the end of the fixtures.
    return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, text=True, start_new_session=True)


def _end(processes: list[subprocess.Popen[str]]) -> None:
    """Ask rooms to end their fixtures, servers among them, and themselves; kill those that take too long."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(INTERRUPT_S)
        except subprocess.TimeoutExpired:
            process.kill()


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
