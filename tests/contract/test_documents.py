"""README.md and docs/ agree with the code, the configs and the results. tests/server runs their code blocks."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from contract.code_blocks import PAGES, README, ROOT, blocks, page_blocks
from contract.configs import FILES, INPUTS, OUTPUTS, read_config
from contract.lock import pinned
from llama_engine.observability.metrics import METRICS
from llama_engine.settings import Settings
from tritonclient.grpc.model_config_pb2 import DataType

DOCS = ROOT / "docs"
METRICS_PAGE, SECURITY_PAGE = ((DOCS / f"{name}.md").read_text() for name in ("metrics", "security"))
(DEFENDED,) = re.findall(r"^## Defended$(.*?)^## ", SECURITY_PAGE, re.MULTILINE | re.DOTALL)
LINKED_PAGES = [*PAGES, *sorted((ROOT / "deploy").glob("*/README.md"))]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))

# Defaults that the page gives in words, because the settings hold None for them.
DEFAULTS_IN_WORDS = {"model", "revision", "int8_threshold", "slots", "max_model_len"}

page = pytest.mark.parametrize("page", LINKED_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def _rows(text: str, heading: str) -> list[tuple[str, ...]]:
    """Return the cells of the table whose first column has this heading."""
    (table,) = re.findall(rf"^\| {heading} \|.*\n\|[-|: ]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table.splitlines()]


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_fenced_blocks_are_found_with_language_text_and_line() -> None:
    text = "# x\n\n```bash\ncurl x\nmake demo\n```\n\n- y\n  ```python\n  print(1)\n  ```\n\n```\nplain\n```\n"
    found = blocks(text)
    assert [(block.language, block.line) for block in found] == [("bash", 4), ("python", 10), ("", 14)]
    assert [block.sets_up for block in found] == [True, False, False]
    assert [block.calls_a_server for block in found] == [False, True, False]
    assert [block.streams for block in found] == [False, False, False]
    assert blocks("```bash\ncurl -N x/generate_stream\n```\n")[0].streams


def test_the_readme_shows_how_to_call_a_server() -> None:
    calling = [block for block in page_blocks() if block.calls_a_server and block.page == "README"]
    assert "curl " in "\n".join(block.text for block in calling)
    assert {"bash", "python"} == {block.language for block in calling}
    for command in ("make demo", "make serve"):
        assert command in README.read_text()


def test_the_readme_says_in_its_first_screen_what_has_not_been_measured() -> None:
    assert "Nothing has run on a GPU" in "".join(README.read_text().splitlines(keepends=True)[:14])


@page
def test_every_make_target_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    in_blocks = "\n".join(block.text for block in blocks(text))
    assert {*re.findall(r"`make ([a-z-]+)", text), *re.findall(r"^\$? *make ([a-z-]+)", in_blocks, re.M)} <= TARGETS


def test_make_help_lists_every_target() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for target in TARGETS:
        assert target in listed


@page
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", page.read_text())
    for link in (first or second for first, second in links):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target.read_text()), link


def test_the_settings_page_lists_every_setting_in_order_with_its_default() -> None:
    rows = _rows((DOCS / "settings.md").read_text(), "setting")
    assert [f"`{field.name}`" for field in fields(Settings)] == [name for name, *_ in rows]
    for field, (_, default, _) in zip(fields(Settings), rows, strict=True):
        if field.default is None:
            assert field.name in DEFAULTS_IN_WORDS
        else:
            assert default.startswith(f"`{field.default}`"), field.name


@pytest.mark.parametrize(("heading", "declared"), [("input", INPUTS), ("output", OUTPUTS)])
def test_the_api_page_lists_what_the_configs_declare(
    heading: str, declared: dict[str, tuple[DataType, list[int]]]
) -> None:
    documented = {
        name: kind for names, kind, _ in _rows((DOCS / "api.md").read_text(), heading) for name in names.split(", ")
    }
    assert documented == {
        f"`{name}`": DataType.Name(kind).removeprefix("TYPE_") + (" list" if dims == [-1] else "")
        for name, (kind, dims) in declared.items()
    }


def test_the_readme_lists_every_config() -> None:
    names = [re.findall(r"`(\w+)`", row[0])[0] for row in _rows(README.read_text(), "config")]
    assert sorted(names) == sorted({"default", *FILES} - {"config"})


def test_the_headline_figures_of_the_readme_are_in_the_benchmark_tables() -> None:
    """docs/benchmarks.md has them from perf/results."""
    figures = re.findall(r"\*\*([\d.,]+(?: ×)?)\*\*", README.read_text())
    (article,) = re.findall(r"<!-- table: article -->(.*?)<!-- end", (DOCS / "benchmarks.md").read_text(), re.DOTALL)
    cells = {cell.strip() for line in article.splitlines() for cell in line.split("|")}
    assert len(figures) >= 4
    assert set(figures) <= cells


def test_the_supported_versions_are_the_pinned_ones() -> None:
    versions = " ".join(README.read_text().split())
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    constraints = pinned(lines)
    for name in ("nvidia-pytriton", "torch", "transformers", "bitsandbytes"):
        assert re.search(rf"\b{re.escape(constraints[name].split('+')[0])}\b", versions), name
    (base,) = re.findall(r"tritonserver:([\d.]+)-py3", (ROOT / "deploy/docker/Dockerfile").read_text())
    assert f"{base}, the default base of the Docker image" in versions


def test_the_metrics_page_lists_the_metrics_of_the_code() -> None:
    rows = re.findall(r"^\| `(llama_\w+)`(?: \{`(\w+)`\})? \| (\w+) \| \w+ \| (.*) \|$", METRICS_PAGE, re.MULTILINE)
    assert rows == [(metric.name, metric.label, metric.kind, metric.help) for metric in METRICS]


def test_the_metrics_page_queries_metrics_that_exist() -> None:
    # llama_0_0 is an instance of the model.
    used = set(re.findall(r"llama_(?!\d)\w+", METRICS_PAGE))
    assert used <= {metric.name + suffix for metric in METRICS for suffix in ("", "_bucket", "_sum", "_count")}


def test_counters_and_only_counters_end_in_total() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_every_defence_of_the_security_page_names_a_test_or_a_page() -> None:
    rows = re.findall(r"^\| (?!threat)([^|]+?) \| [^|]+? \| ([^|]+?) \|$", DEFENDED, re.MULTILINE)
    assert len(rows) >= 15
    assert [threat for threat, shown in rows if not re.search(r"`tests/|\]\(", shown)] == []


def test_every_test_that_the_security_page_names_exists() -> None:
    assert [name for name in re.findall(r"`(tests/[\w/.]+)`", SECURITY_PAGE) if not (ROOT / name).is_file()] == []


def test_the_queues_bounds_on_the_security_page_are_the_configs() -> None:
    policy = read_config("config").dynamic_batching.default_queue_policy
    assert f"holds {policy.max_queue_size} requests" in SECURITY_PAGE
    assert policy.default_timeout_microseconds == 600_000_000
    assert "ten minutes" in SECURITY_PAGE
