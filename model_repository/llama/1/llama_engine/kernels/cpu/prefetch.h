// Prefetching into the first-level or the second-level cache. Always inlined: GCC drops calls of functions that do nothing else.
#pragma once
#include <immintrin.h>

#include <cstdint>

template <int LEVEL, class Element>
__attribute__((always_inline)) inline void prefetch(const Element* from, int64_t count) {
    constexpr auto hint = LEVEL == 1 ? _MM_HINT_T0 : _MM_HINT_T1;
    auto bytes = reinterpret_cast<const char*>(from);
    for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(Element)); i += 64) _mm_prefetch(bytes + i, hint);
}

// The weights that a thread multiplies next, fetched while it computes products: memory has nothing else to do then.
struct Prefetch {
    const uint8_t* weight;
    int64_t bytes;  // bytes of a step: one for each INPUTS inputs of the products

    __attribute__((always_inline)) void fetch() const { _mm_prefetch(weight, _MM_HINT_T1); }
    void advance(int64_t steps = 1) { weight += bytes * steps; }
};
