"""The compiled kernels as Python sees them: their structures and functions, and the loading of a shared object.

A shared object's OpenMP symbols (GOMP_parallel) are resolved from the runtime that torch has loaded, so that torch and
the kernels share one thread pool.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from llama_engine.kernels.cpu.build import is_whole


class Matrix(ctypes.Structure):
    """A packed weight."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("has_offsets", ctypes.c_int32),
    )


class Quantized(ctypes.Structure):
    """Scratch memory for quantized tokens."""

    _fields_ = (
        ("terms", ctypes.c_void_p),
        ("outliers", ctypes.c_void_p),
        ("outlier_quad", ctypes.c_void_p),
        ("outlier_high", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("group_start", ctypes.c_void_p),
        ("group_sum", ctypes.c_void_p),
        ("outlier_ratio", ctypes.c_float),
        ("outlier_factor", ctypes.c_float),
        ("inputs", ctypes.c_int32),
    )


class Lora(ctypes.Structure):
    """An adapter's weights of a linear layer; zeros if it has none there."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("scaling", ctypes.c_void_p),
        ("range", ctypes.c_void_p),
        ("rank_blocks", ctypes.c_int32),
        ("is_bfloat16", ctypes.c_int32),
    )


class Cache(ctypes.Structure):
    """The KV cache of a layer."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
    )


class Scoring(ctypes.Structure):
    """How attention scores are made of products: scaled, and bounded by a soft cap."""

    _fields_ = (("scaling", ctypes.c_float), ("softcap", ctypes.c_float))


class Layer(ctypes.Structure):
    """A decoder layer."""

    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("attention_output_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("query_key_value", Matrix),
        ("attention_output", Matrix),
        ("mlp_norm", ctypes.c_void_p),
        ("mlp_output_norm", ctypes.c_void_p),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("cache", Cache),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    )


class Model(ctypes.Structure):
    """A model with its KV cache and scratch memory."""

    _fields_ = (
        ("layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("unpadded_head_dim", ctypes.c_int32),
        ("rotary", ctypes.c_int32),
        ("norm_of_all_heads", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("cache_type", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("scoring", Scoring),
        ("logits_softcap", ctypes.c_float),
        ("page_table", ctypes.c_void_p),
        ("slots", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("pages", ctypes.c_int64),
        ("positions", ctypes.c_int64),
        ("norm", ctypes.c_void_p),
        ("head", Matrix),
        ("layer", ctypes.POINTER(Layer)),
        ("qkv", ctypes.c_void_p),
        ("attended", ctypes.c_void_p),
        ("gated", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("hidden_terms", Quantized),
        ("attended_terms", Quantized),
        ("gated_terms", Quantized),
        ("counts", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
        ("loras", ctypes.POINTER(Lora)),
        ("lora_shrunk", ctypes.c_void_p),
        ("lora_stride", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("scratch_stride", ctypes.c_int64),
    )


HUGE_PAGE = 1 << 21
MADV_HUGEPAGE = 14
"""Linux's advice for madvise(2) to use huge pages."""

OPENMP_RUNTIMES = ("libgomp", "libiomp5", "libomp")


def openmp_runtimes() -> list[Path]:
    """Return the paths of the OpenMP runtimes loaded in this process, those of torch first."""
    mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    runtimes = sorted(path for path in mapped if path.name.startswith(OPENMP_RUNTIMES))
    site = Path(torch.__file__).parents[1]
    return sorted(runtimes, key=lambda path: not path.is_relative_to(site))


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's data; None, the kernels' null pointer, without one."""
    return None if tensor is None else tensor.data_ptr()


def use_huge_pages(tensor: torch.Tensor) -> None:
    """Request 2 MiB pages for a tensor that has not been written yet. Does nothing if Linux doesn't support them."""
    first = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    size = tensor.data_ptr() + tensor.nbytes - first
    if size >= HUGE_PAGE:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_HUGEPAGE)


class CpuKernels:
    """The kernels of one instruction set, as functions of C. Tensors are passed as pointers to their data.

    They must be contiguous CPU tensors of padded widths (see `packing`). name: the instruction set. Raises OSError if
    the object can't be loaded, AttributeError if it lacks a function.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        if not is_whole(path):
            raise OSError(f"{path} is damaged")
        runtimes = openmp_runtimes()
        if not runtimes:
            raise OSError("torch has no OpenMP runtime")
        ctypes.CDLL(str(runtimes[0]), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        model, matrix = ctypes.POINTER(Model), ctypes.POINTER(Matrix)
        self.forward = library.forward
        """(model, x [tokens, width], slots, positions, tokens, threads): run all layers on x in place."""
        self.forward.argtypes = (model, pointer, pointer, pointer, int64, ctypes.c_int)
        self.find_without_page = library.find_without_page
        """(model, slots, positions, tokens) → index of the first token without a page or outside the table, or -1."""
        self.find_without_page.argtypes, self.find_without_page.restype = (model, pointer, pointer, int64), int64
        self.logits = library.logits
        """(model, x [tokens, width], tokens, result [tokens, head.outputs], threads): write the logits of x."""
        self.logits.argtypes = (model, pointer, int64, pointer, ctypes.c_int)
        self.attention = library.attention
        """(model, layer, slots, positions, tokens, threads): RoPE, the KV cache and attention, Model.qkv → attended."""
        self.attention.argtypes = (model, ctypes.c_int, pointer, pointer, int64, ctypes.c_int)
        self.linear = library.linear
        """(matrix, quantized, adapter or None, room for x · Aᵀ, x [tokens, inputs], tokens, y [tokens, outputs],
        threads): compute a linear layer."""
        quantized, lora = ctypes.POINTER(Quantized), ctypes.POINTER(Lora)
        self.linear.argtypes = (matrix, quantized, lora, pointer, pointer, int64, pointer, ctypes.c_int)
        self.scratch_stride = library.scratch_stride
        """(positions of a sequence, head dim) → number of scratch floats per thread."""
        self.scratch_stride.argtypes, self.scratch_stride.restype = (int64, ctypes.c_int), int64
        self._pack = library.pack
        self._pack.argtypes = (pointer, pointer, int64, int64, int64, pointer, ctypes.c_int)
        self._pack_groups = library.pack_groups
        self._pack_groups.argtypes = (matrix, pointer, pointer, pointer, pointer, pointer, ctypes.c_int)

    def pack(self, weight: torch.Tensor, source: torch.Tensor, inputs: int) -> torch.Tensor:
        """Pack a weight [channels, columns] int8 into the kernels' layout, [outputs, inputs] uint8.

        source: [outputs] int32, the channel of `weight` for each packed output; -1 is an output of zeros.
        """
        packed = torch.empty(len(source), inputs, dtype=torch.uint8)
        use_huge_pages(packed)
        self._pack(
            weight.data_ptr(), source.data_ptr(), weight.shape[1], len(source), inputs, packed.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return packed

    def pack_groups(
        self, matrix: Matrix, weight: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None,
        source: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Pack a weight [channels, columns] int8 in groups of columns into the kernels' layout, bytes.

        matrix: the packed weight's shape. scales, offsets: [channels, groups] float32. source: see `pack`.
        """
        floats = matrix.outputs * matrix.groups * (1 if offsets is None else 2)
        packed = torch.empty(4 * floats + matrix.outputs * weight.shape[1] * matrix.bits // 8, dtype=torch.uint8)
        use_huge_pages(packed)
        self._pack_groups(
            matrix, weight.data_ptr(), scales.data_ptr(), address_of(offsets),
            source.data_ptr(), packed.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return packed
