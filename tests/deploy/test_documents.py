"""What people write in README.md and docs/ agrees with the code, the configs and the results.

`make configs` writes the tables of the code; tests/end_to_end runs the code blocks.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deploy.code_blocks import PAGES, ROOT, blocks, table
from engine.configs import FILES, read_config
from llama_engine.observability.metrics import METRICS
from tritonclient.grpc.model_config_pb2 import DataType

README, API_PAGE, METRICS_PAGE, BENCHMARKS_PAGE = (
    (ROOT / f"{name}.md").read_text() for name in ("README", "docs/api", "docs/metrics", "docs/benchmarks")
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


def test_the_bold_figures_of_the_readme_are_in_the_benchmark_tables() -> None:
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
