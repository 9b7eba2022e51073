"""What people write in README.md and docs/ agrees with the code, the configs and the results.

`make configs` writes the tables of the code; tests/end_to_end runs the code blocks.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from deploy.code_blocks import PAGES, ROOT, blocks, table
from engine.configs import FILES, read_config
from llama_engine.observability.metrics import METRICS
from tritonclient.grpc.model_config_pb2 import DataType

README, API_PAGE, CLIENTS_PAGE, METRICS_PAGE, BENCHMARKS_PAGE = (
    (ROOT / f"{name}.md").read_text()
    for name in ("README", "docs/api", "docs/clients", "docs/metrics", "docs/benchmarks")
)
LINKED_PAGES = [*PAGES, *sorted(ROOT.glob("deploy/*/README.md")), *sorted(ROOT.glob("integrations/*/README.md"))]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))

each_page = pytest.mark.parametrize("page", LINKED_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@each_page
def test_every_make_target_of_a_page_exists(page: Path) -> None:
    targets = re.findall(r"`make ([a-z-]+)", page.read_text())
    in_blocks = "\n".join(block.text for block in blocks(page))
    assert {*targets, *re.findall(r"^\$? *make ([a-z-]+)", in_blocks, re.MULTILINE)} <= TARGETS


def test_make_help_lists_every_target() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert [target for target in TARGETS if target not in listed] == []


@each_page
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", page.read_text())
    for link in (first or second for first, second in links):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target.read_text()), link


def test_the_api_page_lists_every_output_with_its_type() -> None:
    rows = [*table(API_PAGE, "output"), *table(API_PAGE, "optional output")]
    # Every output has a value for each completion.
    assert {tuple(tensor.dims) for tensor in read_config("config").output} == {(-1,)}
    assert sorted((name, type_) for names, type_, *_ in rows for name in names.split(", ")) == sorted(
        (f"`{tensor.name}`", DataType.Name(tensor.data_type).removeprefix("TYPE_"))
        for tensor in read_config("config").output
    )


def test_the_readme_lists_every_config() -> None:
    names = [re.findall(r"`(\w+)`", row[0])[0] for row in table(README, "config")]
    assert sorted(names) == sorted({"default", *FILES} - {"config"})


def test_the_headline_figures_of_the_readme_are_in_the_benchmark_tables() -> None:
    """docs/benchmarks.md has them from perf/results."""
    figures = re.findall(r"\*\*([\d.,]+(?: ×)?)\*\*", README)
    (article,) = re.findall(r"<!-- table: article -->(.*?)<!-- end", BENCHMARKS_PAGE, re.DOTALL)
    cells = {cell.strip() for line in article.splitlines() for cell in line.split("|")}
    assert len(figures) >= 4
    assert set(figures) <= cells


def test_the_supported_versions_are_the_pinned_ones() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name in ("nvidia-pytriton", "torch", "transformers", "bitsandbytes"):
        assert re.search(rf"\b{re.escape(pinned[name])}\b", README), name
    (base,) = re.findall(r"tritonserver:([\d.]+)-py3", (ROOT / "deploy/docker/Dockerfile").read_text())
    assert f"{base}, the default base of the Docker image" in " ".join(README.split())


def test_every_metric_that_the_metrics_page_names_exists() -> None:
    # llama_0_0 is an instance of the model.
    used = set(re.findall(r"llama_(?!\d)\w+", METRICS_PAGE))
    assert used <= {metric.name + suffix for metric in METRICS for suffix in ("", "_bucket", "_sum", "_count")}


@each_page
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    names = re.findall(r"`((?:tests|perf|deploy|client|frontend|compatibility)/[\w/.-]+)`", page.read_text())
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_clients_page_has_the_versions_that_tests_pin() -> None:
    clients = ROOT / "tests" / "end_to_end" / "clients"
    headers = [path.read_text().splitlines()[0] for path in (clients / "requirements").glob("*.txt")]
    packages = json.loads((clients / "node" / "package.json").read_text())["dependencies"]
    own = re.findall(r'"(?:anthropic|openai)==([^"]+)"', (ROOT / "pyproject.toml").read_text())
    pinned = {header.split("==")[1].split()[0].rstrip(",") for header in headers} | {*own, *packages.values()}
    listed = {version for _, versions, *_ in table(CLIENTS_PAGE, "client") for version in versions.split(", ")}
    assert listed == pinned - {packages["zod"]}
