"""The CPU kernels that a model uses: the fastest that are allowed, built, and correct on this machine."""

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.cpu_kernels.models import PLAIN, RUNNABLE, compiles, kernels
from llama_engine.kernels.cpu import selection
from llama_engine.kernels.cpu.build import INSTRUCTION_SETS, SCRIPT, compile_object, find_compiler, object_path, seal
from llama_engine.kernels.cpu.library import CpuKernels, openmp_runtimes
from llama_engine.kernels.cpu.packing import MOST_INPUTS, Dimensions, padded
from llama_engine.kernels.cpu.selection import CPU_FLAGS, allowed_instruction_sets, choose_cpu_kernels
from llama_engine.kernels.cpu.structures import Matrix, Model, Quantized

EVERYTHING = set().union(*CPU_FLAGS.values())

DISTINCT = Dimensions(100, 3, 3, 20, 150, 200, 1e-5, 0.2)
"""Five linear layers of different shapes."""


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
        f"the CPU kernels aren't built for {allowed_instruction_sets()[0]}: run python3 {SCRIPT}"
    ]


def test_each_faster_instruction_set_that_is_not_built_is_named_in_a_line(
    built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if len(RUNNABLE) < 2:
        pytest.skip("this CPU has one instruction set of the kernels")
    monkeypatch.setattr(selection, "allowed_instruction_sets", lambda: RUNNABLE)
    for name in RUNNABLE[:-1]:
        object_path(name, built).unlink()
    chosen = choose_cpu_kernels(PLAIN, torch.float32, built)
    assert chosen is not None
    assert chosen.name == RUNNABLE[-1]
    assert [message.split(":")[0] for message in caplog.messages] == [
        f"the CPU kernels aren't built for {name}" for name in RUNNABLE[:-1]
    ]


def test_a_model_with_more_inputs_than_int32_sums_hold_has_no_kernels_and_the_log_says_so(
    built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_cpu_kernels(replace(PLAIN, intermediate=MOST_INPUTS + 1), torch.float32, built) is None
    assert caplog.messages
    assert all(f"ValueError: a linear layer has {MOST_INPUTS + 1} inputs" in message for message in caplog.messages)


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


def _after_each_product(
    chosen: CpuKernels, monkeypatch: pytest.MonkeyPatch, action: Callable[[int, torch.Tensor], None]
) -> list[tuple[int, int]]:
    """Call an action with the number and the result of each product; return the inputs and terms of those so far."""
    linear, products = chosen.linear, list[tuple[int, int]]()

    def watched(matrix: Matrix, quantized: Quantized, x: torch.Tensor, y: torch.Tensor) -> None:
        linear(matrix, quantized, x, y)
        products.append((quantized.inputs, quantized.count))
        action(len(products) - 1, y)

    monkeypatch.setattr(chosen, "linear", watched)
    return products


def test_products_of_every_shape_are_verified_with_one_and_with_two_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = kernels(RUNNABLE[0])
    products = _after_each_product(chosen, monkeypatch, lambda *_: None)
    selection.verify(chosen, DISTINCT, torch.float32)
    shapes = DISTINCT.linear_shapes
    assert sorted(products) == sorted((padded(inputs), terms) for _, inputs in shapes for terms in (1, 2))


@pytest.mark.parametrize("faulty", range(2 * len(DISTINCT.linear_shapes)))
def test_one_wrong_bit_in_one_product_of_any_shape_and_terms_is_refused(
    faulty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = kernels(RUNNABLE[0])

    def spoil(number: int, y: torch.Tensor) -> None:
        if number == faulty:
            y[-1, 5] = y[-1, 5].nextafter(torch.tensor(torch.inf))

    products = _after_each_product(chosen, monkeypatch, spoil)
    with pytest.raises(RuntimeError, match=r"the product of \d+ inputs with [12] terms isn't exact") as refused:
        selection.verify(chosen, DISTINCT, torch.float32)
    assert len(products) == faulty + 1
    assert f"with {products[-1][1]} terms" in str(refused.value)


def test_rows_after_the_first_16_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels multiply up to 16 rows of two terms at once, and the rest by other code."""
    chosen = kernels(RUNNABLE[0])

    def spoil(_: int, y: torch.Tensor) -> None:
        y[16:] = y[16:].nextafter(torch.tensor(torch.inf))

    _after_each_product(chosen, monkeypatch, spoil)
    with pytest.raises(RuntimeError, match="isn't exact"):
        selection.verify(chosen, PLAIN, torch.float32)


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.int8], ids=["float32", "bfloat16", "int8"])
def test_attention_that_is_not_finite_is_refused(cache: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = kernels(RUNNABLE[0])
    attention = chosen.attention

    def spoiled(model: Model, layer: int, slots: torch.Tensor, positions: torch.Tensor) -> None:
        attention(model, layer, slots, positions)
        ctypes.memset(model.attended, 0xFF, 4)  # the first float: NaN

    monkeypatch.setattr(chosen, "attention", spoiled)
    with pytest.raises(RuntimeError, match="the attention is wrong by nan% of the largest value"):
        selection.verify(chosen, PLAIN, cache)


@pytest.mark.skipif("amx_int8" in selection.cpu_flags(), reason="this CPU has AMX")
def test_amx_is_refused_where_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "avx512-amx" not in allowed_instruction_sets()
    monkeypatch.setattr(selection, "cpu_flags", lambda: EVERYTHING)
    with pytest.raises(OSError, match="the kernel refuses AMX"):
        selection.request_amx()


def test_amx_compiles(tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None or not compiles(compiler, "avx512-amx"):
        pytest.skip("no C++ compiler that knows AMX")
    assert compile_object(compiler, "avx512-amx", tmp_path) is None
    assert object_path("avx512-amx", tmp_path).stat().st_size > 10_000


def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    kernels(RUNNABLE[0])
    assert len(openmp_runtimes()) == 1
