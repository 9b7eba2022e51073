// The integer product with AVX2 alone: sums of pairs of 16-bit products.
//
// AVX2's product of bytes saturates; that of 16-bit integers is exact, and takes q itself in place of two terms.
#pragma once
#include "row_groups.h"

struct Avx2 {
    static constexpr int ZERO = 0;
    static constexpr int INPUTS = 2;
    static constexpr int GROUP = 6;               // two registers each, two for weights, one for a pair, one for products
    static constexpr int64_t EXACT_INPUTS = 512;  // whose sums fit int32: 512 · 128 · 32,258 < 2³¹

    using Term = int16_t;
    using Sums = __m256i;
    static Sums load_weights(const uint8_t* packed) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
    }
    static Sums broadcast(int32_t four) { return _mm256_set1_epi32(four); }
    static Sums add_products(Sums sums, Sums weights, Sums terms) {
        return _mm256_add_epi32(sums, _mm256_madd_epi16(weights, terms));
    }

    static int rows_at_once(int) { return GROUP; }
    static void begin() {}

    static void store_terms(const Quantized& to, int64_t row, int i, Lanes high, Lanes low) {
        store_in_group<Avx2>(to, row, i, to.count == 2 ? fma(high, set(SPLIT), low) : high);
    }

    static void products(const Matrix& m, int64_t block, const Quantized& x, int64_t row, int rows, Prefetch next,
                         Lanes (*result)[2]) {
        const Term* group = reinterpret_cast<const Term*>(x.terms) + row * x.inputs;
        next.bytes /= 2;  // for each of the two blocks
        for (int b = 0; b < 2; b++) {
            const uint8_t* weight = m.weight + (block + b) * OUTPUTS * m.inputs;
            double total[GROUP][OUTPUTS] = {};
            for (int64_t k = 0; k < m.inputs; k += EXACT_INPUTS) {
                const uint8_t* first = weight + k * OUTPUTS;  // a register holds half of a block
                alignas(32) int32_t sums[GROUP][OUTPUTS];
                with_count<GROUP>(rows, [&](auto n) {
                    sum_products<Avx2, decltype(n)::value>(first, first + OUTPUTS / 2 * INPUTS, group + k * GROUP,
                                                           std::min(m.inputs - k, EXACT_INPUTS), next,
                                                           reinterpret_cast<Sums*>(sums));
                });
                next.advance(EXACT_INPUTS / INPUTS);
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
};
