"""What the README tells people to type exists. What asks a server is run by tests/server/test_readme.py."""

from __future__ import annotations

import re
import subprocess

import pytest
from contract.readme_blocks import README, ROOT, blocks, readme_blocks

SETTING_UP = [block for block in readme_blocks() if block.sets_up]


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_fenced_blocks_are_found_with_language_text_and_line() -> None:
    text = "# x\n\n```bash\ncurl x\nmake demo\n```\n\n- y\n  ```python\n  print(1)\n  ```\n\n```\nplain\n```\n"
    found = blocks(text)
    assert [(block.language, block.line) for block in found] == [("bash", 4), ("python", 10), ("", 14)]
    assert [block.sets_up for block in found] == [True, False, False]
    assert [block.asks_a_server for block in found] == [False, True, False]
    assert [block.streams for block in found] == [False, False, False]
    assert blocks("```bash\ncurl -N x/generate_stream\n```\n")[0].streams


def test_the_readme_shows_how_to_ask() -> None:
    asking = "\n".join(block.text for block in readme_blocks() if block.asks_a_server)
    assert "curl " in asking
    assert "make demo" in README.read_text()
    assert "make serve" in README.read_text()


@pytest.mark.parametrize("block", SETTING_UP, ids=str)
def test_every_make_target_in_a_block_exists(block: object) -> None:
    named = set(re.findall(r"^(?:\$ )?make ([a-z-]+)", str(getattr(block, "text", "")), re.MULTILINE))
    assert named <= _targets()


def test_make_help_tells_every_target() -> None:
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for target in _targets():
        assert target in told


def test_every_link_to_a_file_leads_to_one() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)|src=\"([^\"]+)\"", README.read_text())
    local = [first or second for first, second in links if "://" not in (first or second)]
    assert [link for link in local if not (ROOT / link).exists()] == []
