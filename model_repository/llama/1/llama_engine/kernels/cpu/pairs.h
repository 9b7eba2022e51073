// The integer product with AVX2 alone: sums of pairs of 16-bit products. Included by linear.h.
//
// AVX2's product of bytes saturates; that of 16-bit integers is exact, and takes q itself in place of two terms.
#pragma once

constexpr int ZERO = 0;
constexpr int INPUTS = 2;
constexpr int GROUP = 6;               // two registers each, two for weights, one for a pair, one for products
constexpr int64_t EXACT_INPUTS = 512;  // whose sums fit int32: 512 · 128 · 32,258 < 2³¹

using Term = int16_t;
using Sums = __m256i;
inline Sums load_weights(const uint8_t* packed) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
}
inline Sums broadcast(int32_t four) { return _mm256_set1_epi32(four); }
inline Sums add_products(Sums sums, Sums weights, Sums terms) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(weights, terms));
}

#include "group.h"

inline void store_terms(const Quantized& to, int64_t row, int i, Lanes high, Lanes low) {
    store_term(to, row, i, to.count == 2 ? fma(high, set(SPLIT), low) : high);
}

inline int rows_at_once(int) { return GROUP; }
inline void begin_products() {}

inline void products(const Matrix& m, int64_t block, const Quantized& x, int64_t row, int rows, Ahead ahead,
                     Lanes (*result)[2]) {
    const Term* group = reinterpret_cast<const Term*>(x.terms) + row * x.inputs;
    ahead.bytes /= 2;  // for each of the two blocks
    for (int b = 0; b < 2; b++) {
        const uint8_t* weight = m.weight + (block + b) * OUTPUTS * m.inputs;
        double total[GROUP][OUTPUTS] = {};
        for (int64_t k = 0; k < m.inputs; k += EXACT_INPUTS) {
            const uint8_t* first = weight + k * OUTPUTS;  // a register holds half of a block
            alignas(32) int32_t sums[GROUP][OUTPUTS];
            with_count<GROUP>(rows, [&](auto n) {
                sum_products<decltype(n)::value>(first, first + OUTPUTS / 2 * INPUTS, group + k * GROUP,
                                                 std::min(m.inputs - k, EXACT_INPUTS), ahead,
                                                 reinterpret_cast<Sums*>(sums));
            });
            ahead.weight += ahead.bytes * (EXACT_INPUTS / INPUTS);
            for (int r = 0; r < rows; r++)
                for (int o = 0; o < OUTPUTS; o++) total[r][o] += sums[r][o];
        }
        for (int r = 0; r < rows; r++) {
            float whole[OUTPUTS];
            for (int o = 0; o < OUTPUTS; o++) whole[o] = static_cast<float>(total[r][o]);
            result[r][b] = load(whole);
        }
    }
}
