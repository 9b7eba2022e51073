// The activation functions of the gate, and the soft cap of scores and logits, all by the exponential of `lanes.h`.
#pragma once
#include "lanes.h"

enum Activation : int32_t { SILU, GELU_TANH };

inline Lanes silu(Lanes x) { return x / (set(1.0f) + exp(set(0.0f) - x)); }

// x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), as x / (1 + e⁻²ᵘ)
inline Lanes gelu_tanh(Lanes x) {
    const Lanes cubic = fma(x * x * x, set(0.044715f), x);
    return x / (set(1.0f) + exp(cubic * set(-1.5957691216f)));
}

// cap · tanh(x / cap), with an error of 2e-7 · cap
inline Lanes soft_cap(Lanes x, float cap) {
    const Lanes sum = set(1.0f) + exp(x * set(2.0f / cap));
    return set(cap) - set(2.0f * cap) / sum;
}
