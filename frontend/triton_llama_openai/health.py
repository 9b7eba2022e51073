"""A probe for orchestrators: `python -m triton_llama_openai.health [--live]`, standard library only.

Exit code 0: the endpoint can answer (with --live: its process answers); 1: not, with the reason in one line.
"""

from __future__ import annotations

import argparse
import sys
import urllib.error
import urllib.request


def main() -> int:
    """Ask the endpoint on this machine; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m triton_llama_openai.health", description=__doc__)
    parser.add_argument("--port", type=int, default=9000, help="(default: 9000)")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds (default: 5)")
    parser.add_argument("--live", action="store_true", help="whatever Triton does")
    options = parser.parse_args()
    url = f"http://127.0.0.1:{options.port}/health{'/live' if options.live else ''}"
    # Without the environment's proxies: the endpoint is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=options.timeout):
            print("alive" if options.live else "ready")
            return 0
    except urllib.error.HTTPError as error:
        with error:
            print(f"not ready: {error.read(500).decode(errors='replace')}")
    except OSError as error:
        print(f"no answer from {url}: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
