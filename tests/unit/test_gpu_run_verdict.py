"""The verdict of a GPU run: each aim is met, missed or not measured."""

from __future__ import annotations

from typing import Any

import pytest

from perf.gpu.verdict import DEVICE, Measurements, failures, table, verdicts

MEASURED: dict[str, dict[str, Any]] = {
    "decode/int8/32": {"requests_per_second": 25.0, "tokens_per_second": 5000.0},
    "decode/fp16/32": {"requests_per_second": 15.0},
    "decode/int8/1": {"tokens_per_second": 200.0},
    "stock/int8/32": {"requests_per_second": 3.0},
    "stock/int8_outliers/32": {"requests_per_second": 2.0},
    "quality/int8_fused": {"kl_nats": {"mean": 0.0003}},
    "quality/int8_threshold_0": {"kl_nats": {"mean": 0.0016}},
    "quality/int8_threshold_6": {"kl_nats": {"mean": 0.0007}},
}


SERVED = {
    "article/equal/inflight_int8": {"requests_per_second": 30.0},
    "article/equal/inflight_int8_quick": {"requests_per_second": 22.0},
    "article/equal/inflight_fp16_quick": {"requests_per_second": 12.0},
}
STOCK = {"steps": "decode steps: stock kernels, launched"}
FUSED = {"steps": "decode steps: fused 8-bit product and attention, launched"}


def _with(key: str, **changed: object) -> Measurements:
    return {**MEASURED, key: {**MEASURED[key], **changed}}


@pytest.mark.parametrize(
    ("measured", "device", "met"),
    [
        pytest.param(MEASURED, DEVICE, [True, False, True, True, True, True], id="measured"),
        pytest.param({}, DEVICE, [None] * 6, id="nothing measured"),
        pytest.param(MEASURED, "NVIDIA H200", [None] * 6, id="another device"),
        pytest.param(
            {**MEASURED, "decode/int8/32": {"not_run": "CUDA error"}},
            DEVICE,
            [None, False, None, True, None, True],
            id="did not run",
        ),
        pytest.param(
            _with("quality/int8_fused", kl_nats={"mean": 0.0008}),
            DEVICE,
            [True, False, True, True, True, False],
            id="a greater divergence than LLM.int8()'s",
        ),
        pytest.param(
            {key: found for key, found in MEASURED.items() if key != "quality/int8_threshold_6"},
            DEVICE,
            [True, False, True, True, True, None],
            id="no divergence of LLM.int8()",
        ),
    ],
)
def test_an_aim_is_met_exactly_when_its_figure_on_its_device_is_within_the_bound(
    measured: Measurements, device: str, met: list[bool | None]
) -> None:
    assert [one.met for one in verdicts(measured, device)] == met


def test_an_aim_without_a_figure_has_none_and_one_on_another_device_keeps_it() -> None:
    assert [one.to_json()["measured"] for one in verdicts({})] == [None] * 6
    elsewhere = verdicts(MEASURED, "NVIDIA H200")[0]
    assert elsewhere.to_json()["measured"] == 25.0
    assert elsewhere.line().startswith("not compared INT8 in-flight")


def test_a_fallback_to_stock_kernels_is_no_figure_of_an_aim() -> None:
    assert verdicts(_with("decode/int8/32", **STOCK))[0].figure is None
    assert verdicts(_with("decode/int8/32", **FUSED))[0].met is True


def test_the_servers_figure_takes_precedence_over_the_engines() -> None:
    first = verdicts({**MEASURED, **SERVED})[0]
    assert (first.met, first.to_json()["from"]) == (False, "article/equal/inflight_int8_quick")


def test_a_ratio_uses_figures_measured_in_the_same_way() -> None:
    alone = {key: found for key, found in SERVED.items() if "fp16" not in key}
    ratio = verdicts({**MEASURED, **alone})[2].figure
    assert ratio is not None
    assert ratio.source == "decode/int8/32 over decode/fp16/32"


def test_replayed_steps_take_precedence_when_both_precisions_have_them() -> None:
    replayed = {
        "graph/int8/32": {"requests_per_second": 31.0},
        "graph/fp16/32": {"requests_per_second": 14.0},
        "graph/int8/1": {"tokens_per_second": 150.0},
    }
    found = verdicts({**MEASURED, **replayed})
    assert [one.to_json()["from"] for one in found[:2]] == ["graph/int8/32", "graph/fp16/32"]
    assert found[3].to_json()["from"] == "decode/int8/1"
    alone = {key: one for key, one in replayed.items() if "fp16" not in key}
    assert [one.to_json()["from"] for one in verdicts({**MEASURED, **alone})[:2]] == [
        "decode/int8/32",
        "decode/fp16/32",
    ]


def test_the_faster_stock_threshold_is_the_baseline() -> None:
    ratio = verdicts(MEASURED)[4].figure
    assert ratio is not None
    assert ratio.value == pytest.approx(25.0 / 3.0)


def test_the_table_names_failed_checks_and_another_device() -> None:
    lines: list[str] = []
    failed: Measurements = {
        "capacity/int8": {"passed": False, "in_short": "growth 12 MiB"},
        "article": {"not_run": "needs CUDA"},
    }
    table({**MEASURED, **failed}, "NVIDIA H200", lines.append)
    assert lines[0] == "these aims are an H100's; this is NVIDIA H200"
    assert "NOT PASSED   capacity/int8: growth 12 MiB" in lines
    assert "not run      article: needs CUDA" in lines
    assert failures({**MEASURED, **failed}) == ["capacity/int8"]
    lines.clear()
    table(MEASURED, "NVIDIA H100 80GB HBM3", lines.append)
    assert not any("these aims" in line for line in lines)
