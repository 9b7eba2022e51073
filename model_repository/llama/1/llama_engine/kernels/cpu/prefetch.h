// Prefetching into the second-level cache.
#pragma once
#include <immintrin.h>

#include <cstdint>

template <class Element>
inline void prefetch(const Element* from, int64_t count) {
    auto bytes = reinterpret_cast<const char*>(from);
    for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(Element)); i += 64) _mm_prefetch(bytes + i, _MM_HINT_T1);
}

// The weights that a thread multiplies next, fetched while it computes products: memory has nothing else to do then.
struct Prefetch {
    const uint8_t* weight;
    int64_t bytes;  // of a step: one for each INPUTS inputs of the products

    void fetch() const { _mm_prefetch(weight, _MM_HINT_T1); }
    void advance(int64_t steps = 1) { weight += bytes * steps; }
};
