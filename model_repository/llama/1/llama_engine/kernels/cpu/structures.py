"""ctypes mirrors of the C++ kernels' structures in forward.cpp, linear.h and attention.h."""

from __future__ import annotations

import ctypes


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
        ("token", ctypes.c_void_p),
        ("has_two", ctypes.c_void_p),
        ("largest", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("group_start", ctypes.c_void_p),
        ("group_sum", ctypes.c_void_p),
        ("limit", ctypes.c_double),
        ("inputs", ctypes.c_int32),
    )


class Cache(ctypes.Structure):
    """The KV cache of a layer."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
    )


class Scores(ctypes.Structure):
    """Options of the attention scores."""

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
        ("scores", Scores),
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
        ("scratch", ctypes.c_void_p),
        ("scratch_stride", ctypes.c_int64),
    )
