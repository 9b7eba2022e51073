"""The CPU kernels that a model uses: the fastest that are allowed, built, and correct on this machine."""

import subprocess
from pathlib import Path

import pytest
import torch
from engine.cpu_kernels.models import PLAIN, RUNNABLE, kernels
from llama_engine.kernels.cpu import selection
from llama_engine.kernels.cpu.build import INSTRUCTION_SETS, compile_object, find_compiler, object_path, seal
from llama_engine.kernels.cpu.library import openmp_runtimes
from llama_engine.kernels.cpu.selection import CPU_FLAGS, allowed_instruction_sets, choose_cpu_kernels

EVERYTHING = set().union(*CPU_FLAGS.values())


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


def compile_stub(source: str, name: str, directory: Path) -> None:
    """Compile C++ in place of an instruction set's object."""
    compiler = find_compiler()
    assert compiler is not None
    path = directory / "stub.cpp"
    path.write_text(source)
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", object_path(name, directory), path], check=True)
    seal(object_path(name, directory))


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.int8], ids=["float32", "bfloat16", "int8"])
def test_the_fastest_instruction_set_is_chosen(
    built: Path, cache: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = choose_cpu_kernels(PLAIN, cache, built)
    assert chosen is not None
    assert chosen.name == RUNNABLE[0]
    assert not caplog.messages


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("ONEDNN_MAX_CPU_ISA", "ALL", ["avx512-amx", "avx512-vnni", "avx2"]),
        ("ONEDNN_MAX_CPU_ISA", "DEFAULT", ["avx512-amx", "avx512-vnni", "avx2"]),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX", ["avx512-amx", "avx512-vnni", "avx2"]),
        ("ONEDNN_MAX_CPU_ISA", "AVX10_1_512_AMX", ["avx512-amx", "avx512-vnni", "avx2"]),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16", ["avx512-vnni", "avx2"]),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", ["avx512-vnni", "avx2"]),
        ("ONEDNN_MAX_CPU_ISA", "avx512_core_vnni", ["avx512-vnni", "avx2"]),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", ["avx2"]),
        ("ONEDNN_MAX_CPU_ISA", "AVX2_VNNI", ["avx2"]),
        ("ONEDNN_MAX_CPU_ISA", "AVX2", ["avx2"]),
        ("ONEDNN_MAX_CPU_ISA", "AVX", []),
        ("ONEDNN_MAX_CPU_ISA", "SSE41", []),
        ("DNNL_MAX_CPU_ISA", "AVX2", ["avx2"]),
        ("ATEN_CPU_CAPABILITY", "avx512", ["avx512-amx", "avx512-vnni", "avx2"]),
        ("ATEN_CPU_CAPABILITY", "avx2", ["avx2"]),
        ("ATEN_CPU_CAPABILITY", "default", []),
    ],
)
def test_the_environment_caps_the_instruction_set(
    variable: str, value: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "cpu_flags", lambda: EVERYTHING)
    monkeypatch.setenv(variable, value)
    assert allowed_instruction_sets() == expected


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ({"amx_int8"}, ["avx512-vnni", "avx2"]),
        ({"amx_tile", "avx512_vnni"}, ["avx2"]),
        ({"avx512dq"}, ["avx2"]),
        ({"fma"}, []),
    ],
)
def test_an_instruction_set_needs_all_its_flags(
    missing: set[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "cpu_flags", lambda: EVERYTHING - missing)
    assert allowed_instruction_sets() == expected


def test_a_cpu_without_avx2_has_no_kernels_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(selection, "cpu_flags", lambda: {"sse4_2"})
    assert choose_cpu_kernels(PLAIN, torch.float32) is None
    assert len(caplog.messages) == 1
    assert "they need AVX2 and FMA" in caplog.messages[0]


def test_objects_that_are_not_built_give_none_and_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_cpu_kernels(PLAIN, torch.float32, tmp_path) is None
    assert caplog.messages == [
        f"the CPU kernels aren't built for {RUNNABLE[0]}: run python -m llama_engine.kernels.cpu.build"
    ]


def test_an_object_of_other_sources_is_not_loaded(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSTRUCTION_SETS, "avx2", ("-mavx2", "-mfma", "-DCHANGED"))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert choose_cpu_kernels(PLAIN, torch.float32, built) is None


@pytest.mark.parametrize("size", [0, 10, 2000, -1])
def test_a_truncated_object_falls_back_to_the_next_with_one_line(
    built: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = object_path(RUNNABLE[0], built)
    damaged.write_bytes(damaged.read_bytes()[:size])
    chosen = choose_cpu_kernels(PLAIN, torch.float32, built)
    assert (chosen.name if chosen else None) == (RUNNABLE[1] if len(RUNNABLE) > 1 else None)
    assert len(caplog.messages) == 1
    assert f"for {RUNNABLE[0]} can't be used: OSError" in caplog.messages[0]


def test_an_object_that_computes_zeros_falls_back_to_the_next_with_one_line(
    built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    functions = " ".join(
        f'extern "C" int {name}() {{ return 0; }}' for name in ("forward", "logits", "attention", "linear", "pack")
    )
    stub = functions + ' extern "C" long scratch_stride(long, int) { return 1; }'
    compile_stub(stub, RUNNABLE[0], built)
    chosen = choose_cpu_kernels(PLAIN, torch.float32, built)
    assert (chosen.name if chosen else None) == (RUNNABLE[1] if len(RUNNABLE) > 1 else None)
    assert len(caplog.messages) == 1
    assert "RuntimeError: the product of 128 inputs with 1 terms isn't exact" in caplog.messages[0]


def test_an_object_without_the_functions_falls_back_to_the_next_with_one_line(
    built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compile_stub("int x;", RUNNABLE[0], built)
    choose_cpu_kernels(PLAIN, torch.float32, built)
    assert len(caplog.messages) == 1
    assert "AttributeError" in caplog.messages[0]


def test_wrong_attention_is_refused(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = kernels(RUNNABLE[0])
    monkeypatch.setattr(chosen, "attention", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"the attention is wrong by 100\.0% of the largest value"):
        selection.verify(chosen, PLAIN, torch.float32)


@pytest.mark.skipif("amx_int8" in selection.cpu_flags(), reason="this CPU has AMX")
def test_amx_is_refused_where_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "avx512-amx" not in allowed_instruction_sets()
    monkeypatch.setattr(selection, "cpu_flags", lambda: EVERYTHING)
    with pytest.raises(OSError, match="the kernel refuses AMX"):
        selection.request_amx()


def test_amx_compiles(tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    assert compile_object(compiler, "avx512-amx", tmp_path) is None
    assert object_path("avx512-amx", tmp_path).stat().st_size > 10_000


def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    kernels(RUNNABLE[0])
    assert len(openmp_runtimes()) == 1
