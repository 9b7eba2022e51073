"""The CPU kernels that a model uses: the fastest that are allowed, built, and correct on this machine."""

import ctypes
from pathlib import Path

import pytest
from engine.cpu_kernels.models import RUNNABLE, compiles, kernels
from llama_engine.kernels.cpu import instruction_sets
from llama_engine.kernels.cpu.bindings import Model, openmp_runtimes
from llama_engine.kernels.cpu.build import SCRIPT, compile_object, compile_to, find_compiler, object_path
from llama_engine.kernels.cpu.instruction_sets import (
    CPU_FLAGS,
    INSTRUCTION_SETS,
    allowed_instruction_sets,
    choose_cpu_kernels,
)
from llama_engine.kernels.cpu.paged_cache import CACHE_TYPES
from llama_engine.kernels.cpu.self_test import self_test

EVERYTHING = set().union(*CPU_FLAGS.values())
WITHOUT = "INT8 weights are dequantized: steps are slower and not batch-invariant"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """Return a folder with the objects of the instruction sets that this machine runs."""
    for name in RUNNABLE:
        kernels(name)
        (tmp_path / object_path(name).name).write_bytes(object_path(name).read_bytes())
    return tmp_path


@pytest.fixture(autouse=True)
def _uncapped(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(variable, raising=False)


def test_the_fastest_instruction_set_is_chosen(built: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen = choose_cpu_kernels(built)
    assert chosen is not None
    assert chosen.name == RUNNABLE[0]
    assert not caplog.messages


CAPS = {
    4: [("ONEDNN_MAX_CPU_ISA", "ALL"), ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX"), ("ATEN_CPU_CAPABILITY", "avx512")],
    3: [("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")],
    2: [("ONEDNN_MAX_CPU_ISA", "avx512_core_vnni")],
    1: [("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"), ("DNNL_MAX_CPU_ISA", "AVX2"), ("ATEN_CPU_CAPABILITY", "avx2")],
    0: [("ONEDNN_MAX_CPU_ISA", "AVX"), ("ATEN_CPU_CAPABILITY", "default")],
}
"""Variables and values by the number of instruction sets that they allow, from the slowest on."""


@pytest.mark.parametrize(
    ("variables", "missing", "number"),
    [
        *(({variable: value}, set(), number) for number, caps in CAPS.items() for variable, value in caps),
        ({}, {"amx_int8"}, 3), ({}, {"avx512_bf16"}, 2), ({}, {"amx_tile", "avx512_vnni"}, 1), ({}, {"fma"}, 0),
    ],
)  # fmt: skip
def test_the_environment_and_the_cpu_limit_the_instruction_sets(
    variables: dict[str, str], missing: set[str], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: EVERYTHING - missing)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert allowed_instruction_sets() == list(INSTRUCTION_SETS[len(INSTRUCTION_SETS) - number :])


def test_a_cpu_without_avx2_has_no_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: {"sse4_2"})
    assert choose_cpu_kernels() is None
    (message,) = caplog.messages
    assert message.startswith("no CPU kernels (they need AVX2 and FMA, ")
    assert message.endswith(WITHOUT)


def test_without_objects_one_line_names_the_package_and_the_cost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_cpu_kernels(tmp_path) is None
    reasons = "; ".join(f"{name}: not compiled" for name in allowed_instruction_sets())
    assert caplog.messages == [
        f"no CPU kernels ({reasons}); install a C++ compiler (Debian's package g++) and run python3 {SCRIPT}. {WITHOUT}"
    ]


def _damage(path: Path, damage: str) -> None:
    """Cut an object, or compile this C++ in its place."""
    if not damage:
        path.write_bytes(path.read_bytes()[:-1])
        return
    compiler, source = find_compiler(), path.with_suffix(".cpp")
    assert compiler is not None
    source.write_text(damage)
    assert compile_to(path, [*compiler, "-shared", "-fPIC", str(source)]) is None


ZEROS = " ".join(
    f'extern "C" int {name}() {{ return 0; }}'
    for name in ("forward", "find_without_page", "logits", "attention", "linear", "pack", "pack_groups")
)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("", "{}: OSError: "),
        (ZEROS + ' extern "C" long scratch_stride(long, int) { return 1; }', "{}: RuntimeError: a product isn't exact"),
        ("int x;", "{}: AttributeError: "),
    ],
    ids=["cut", "zeros", "no functions"],
)
def test_a_damaged_or_wrong_object_falls_back_to_the_next_with_one_line(
    built: Path, damage: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    _damage(object_path(RUNNABLE[0], built), damage)
    chosen = choose_cpu_kernels(built)
    assert (chosen.name if chosen else None) == (RUNNABLE[1] if len(RUNNABLE) > 1 else None)
    assert len(caplog.messages) == 1
    assert reason.format(RUNNABLE[0]) in caplog.messages[0]


def test_an_adapter_without_effect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = kernels(RUNNABLE[0])
    linear = chosen.linear
    monkeypatch.setattr(chosen, "linear", lambda matrix, room, lora, *rest: linear(matrix, room, None, *rest))
    with pytest.raises(RuntimeError, match=r"^an adapter's product is wrong by 100\.0% of the largest value$"):
        self_test(chosen)


@pytest.mark.parametrize("kind", CACHE_TYPES.values())
def test_attention_that_is_wrong_or_not_finite_is_refused(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = kernels(RUNNABLE[0])
    attention = chosen.attention

    def skipped(model: Model, *arguments: int) -> None:
        if model.cache_type != kind:
            attention(model, *arguments)

    def spoiled(model: Model, *arguments: int) -> None:
        attention(model, *arguments)
        if model.cache_type == kind:
            ctypes.memset(model.attended, 0xFF, 4)  # the first float: NaN

    for wrong, percent in ((skipped, r"100\.0"), (spoiled, "nan")):
        monkeypatch.setattr(chosen, "attention", wrong)
        with pytest.raises(RuntimeError, match=f"^the attention is wrong by {percent}% of the largest value$"):
            self_test(chosen)


@pytest.mark.skipif("amx_int8" in instruction_sets.cpu_flags(), reason="this CPU has AMX")
def test_amx_is_refused_where_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "avx512-amx" not in allowed_instruction_sets()
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: EVERYTHING)
    with pytest.raises(OSError, match="the kernel refuses AMX"):
        instruction_sets.request_amx()


def test_amx_compiles() -> None:
    compiler = find_compiler()
    if compiler is None or not compiles(compiler, "avx512-amx"):
        pytest.skip("no C++ compiler that knows AMX")
    assert compile_object(compiler, "avx512-amx") is None
    assert object_path("avx512-amx").stat().st_size > 10_000


def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    kernels(RUNNABLE[0])
    assert len(openmp_runtimes()) == 1
