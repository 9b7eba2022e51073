"""The CPU kernels that a model uses: the fastest that are allowed, built, and correct on this machine."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine.cpu_kernels.models import PLAIN, RUNNABLE, compiles, kernels, llama_of
from engine.int8_layers import TERMS
from llama_engine.kernels.cpu import instruction_sets, trial
from llama_engine.kernels.cpu.build import (
    INSTRUCTION_SETS,
    SCRIPT,
    compile_object,
    compile_to,
    find_compiler,
    object_path,
)
from llama_engine.kernels.cpu.instruction_sets import CPU_FLAGS, allowed_instruction_sets
from llama_engine.kernels.cpu.library import CpuKernels, openmp_runtimes
from llama_engine.kernels.cpu.packing import linear_shapes, padded
from llama_engine.kernels.cpu.structures import Matrix, Model, Quantized
from llama_engine.kernels.cpu.trial import choose_cpu_kernels

EVERYTHING = set().union(*CPU_FLAGS.values())

DISTINCT = llama_of(100, 3, 3, 20, 150, 200, 0.2)
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


each_cache = pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.int8], ids=str)


@each_cache
def test_the_fastest_instruction_set_is_chosen(
    built: Path, cache: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = choose_cpu_kernels(PLAIN, cache, built)
    assert chosen is not None
    assert chosen.name == RUNNABLE[0]
    assert not caplog.messages


CAPS = {
    3: [*(("ONEDNN_MAX_CPU_ISA", cap) for cap in ("ALL", "DEFAULT", "AVX512_CORE_AMX", "AVX10_1_512_AMX")),
        ("ATEN_CPU_CAPABILITY", "avx512")],
    2: [("ONEDNN_MAX_CPU_ISA", cap) for cap in ("AVX512_CORE_FP16", "AVX512_CORE_BF16", "avx512_core_vnni")],
    1: [*(("ONEDNN_MAX_CPU_ISA", cap) for cap in ("AVX512_CORE", "AVX2_VNNI", "AVX2")), ("DNNL_MAX_CPU_ISA", "AVX2"),
        ("ATEN_CPU_CAPABILITY", "avx2")],
    0: [("ONEDNN_MAX_CPU_ISA", "AVX"), ("ONEDNN_MAX_CPU_ISA", "SSE41"), ("ATEN_CPU_CAPABILITY", "default")],
}  # fmt: skip
"""Variables and values by the number of instruction sets that they allow, from the slowest on."""


@pytest.mark.parametrize(
    ("variable", "value", "number"), [(*setting, number) for number, settings in CAPS.items() for setting in settings]
)
def test_the_environment_caps_the_instruction_set(
    variable: str, value: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: EVERYTHING)
    monkeypatch.setenv(variable, value)
    assert allowed_instruction_sets() == list(INSTRUCTION_SETS)[3 - number :]


@pytest.mark.parametrize(
    ("missing", "number"), [({"amx_int8"}, 2), ({"amx_tile", "avx512_vnni"}, 1), ({"avx512dq"}, 1), ({"fma"}, 0)]
)
def test_an_instruction_set_needs_all_its_flags(
    missing: set[str], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: EVERYTHING - missing)
    assert allowed_instruction_sets() == list(INSTRUCTION_SETS)[3 - number :]


def test_a_cpu_without_avx2_has_no_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: {"sse4_2"})
    assert choose_cpu_kernels(PLAIN, torch.float32) is None
    assert len(caplog.messages) == 1
    assert "they need AVX2 and FMA" in caplog.messages[0]


def test_objects_that_are_not_built_give_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_cpu_kernels(PLAIN, torch.float32, tmp_path) is None
    assert caplog.messages == [
        f"the CPU kernels aren't built for {allowed_instruction_sets()[0]}: run python3 {SCRIPT}"
    ]


def test_an_object_of_other_sources_is_not_loaded(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSTRUCTION_SETS, "avx2", ("-mavx2", "-mfma", "-DCHANGED"))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert choose_cpu_kernels(PLAIN, torch.float32, built) is None


def _truncate(size: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def _compile(source: str) -> Callable[[Path], object]:
    """Compile C++ in place of an instruction set's object."""

    def compile_stub(path: Path) -> None:
        compiler = find_compiler()
        assert compiler is not None
        stub = path.with_suffix(".cpp")
        stub.write_text(source)
        assert compile_to(path, [*compiler, "-shared", "-fPIC", str(stub)]) is None

    return compile_stub


ZEROS = " ".join(
    f'extern "C" int {name}() {{ return 0; }}'
    for name in ("forward", "find_without_page", "logits", "attention", "linear", "pack", "pack_groups")
)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        *[(_truncate(size), "for {} can't be used: OSError") for size in (0, 10, 2000, -1)],
        (_compile(ZEROS + ' extern "C" long scratch_stride(long, int) { return 1; }'),
         "RuntimeError: the product of 128 inputs with one term isn't exact"),
        (_compile("int x;"), "AttributeError"),
    ],
    ids=["empty", "10 bytes", "2000 bytes", "cut", "zeros", "no functions"],
)  # fmt: skip
def test_a_damaged_or_wrong_object_falls_back_to_the_next_with_one_line(
    built: Path, damage: Callable[[Path], object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(object_path(RUNNABLE[0], built))
    chosen = choose_cpu_kernels(PLAIN, torch.float32, built)
    assert (chosen.name if chosen else None) == (RUNNABLE[1] if len(RUNNABLE) > 1 else None)
    assert len(caplog.messages) == 1
    assert reason.format(RUNNABLE[0]) in caplog.messages[0]


def _after_each_product(
    chosen: CpuKernels, monkeypatch: pytest.MonkeyPatch, action: Callable[[int, torch.Tensor], None]
) -> list[tuple[int, float]]:
    """Call an action with the number and the result of each product; return the inputs and limits of those so far."""
    linear, products = chosen.linear, list[tuple[int, float]]()

    def watched(matrix: Matrix, quantized: Quantized, x: torch.Tensor, y: torch.Tensor) -> None:
        linear(matrix, quantized, x, y)
        products.append((quantized.inputs, quantized.limit))
        action(len(products) - 1, y)

    monkeypatch.setattr(chosen, "linear", watched)
    return products


def test_one_wrong_bit_in_one_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, faulty = kernels(RUNNABLE[0]), -1

    def spoil(number: int, y: torch.Tensor) -> None:
        if number == faulty:
            y[-1, 5] = y[-1, 5].nextafter(torch.tensor(torch.inf))

    products = _after_each_product(chosen, monkeypatch, spoil)
    trial.verify(chosen, DISTINCT, torch.float32)
    every = list(products)
    widths = [*(inputs for _, inputs in set(linear_shapes(DISTINCT).values())), *(1024 for _ in trial.GROUPS)]
    assert sorted(every) == sorted((padded(n), terms.limit(n)) for n in widths for terms in TERMS.values())
    names = {(padded(n), terms.limit(n)): terms.describe() for n in widths for terms in TERMS.values()}
    for faulty in range(len(every)):
        products.clear()
        with pytest.raises(RuntimeError, match=f"with {re.escape(names[every[faulty]])} isn't exact"):
            trial.verify(chosen, DISTINCT, torch.float32)
        assert products == every[: faulty + 1]


@each_cache
def test_attention_that_is_wrong_or_not_finite_is_refused(cache: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = kernels(RUNNABLE[0])
    attention = chosen.attention

    def spoiled(model: Model, layer: int, slots: torch.Tensor, positions: torch.Tensor) -> None:
        attention(model, layer, slots, positions)
        ctypes.memset(model.attended, 0xFF, 4)  # the first float: NaN

    for wrong, percent in ((lambda *_: None, r"100\.0"), (spoiled, "nan")):
        monkeypatch.setattr(chosen, "attention", wrong)
        with pytest.raises(RuntimeError, match=f"the attention is wrong by {percent}% of the largest value"):
            trial.verify(chosen, PLAIN, cache)


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
