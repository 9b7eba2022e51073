// The integer product with VNNI: four products of a byte of weights and a byte of a term at a time. Included by linear.h.
//
// The rows of terms are those of all activation rows, high and low one after the other.
#pragma once

constexpr int ZERO = 128;
constexpr int INPUTS = 4;

#ifdef __AMX_INT8__
#include "amx.h"
#else
constexpr int GROUP = 8;  // two registers each: a divisor of the usual 8, 16, 32 and 64 terms, and enough to hide latencies

using Term = int8_t;
using Sums = __m512i;
inline Sums load_weights(const uint8_t* packed) { return _mm512_loadu_si512(packed); }
inline Sums broadcast(int32_t four) { return _mm512_set1_epi32(four); }
inline Sums add_products(Sums sums, Sums weights, Sums terms) { return _mm512_dpbusd_epi32(sums, weights, terms); }

#include "group.h"

inline void begin_products() {}

// The sums of `count` terms from `term` on, the first of a group.
inline void integer_products(const Matrix& m, const uint8_t* weight, const Quantized& x, int64_t term, int count,
                             Ahead ahead, int32_t (*result)[2][OUTPUTS]) {
    const int64_t stride = static_cast<int64_t>(m.inputs) * OUTPUTS;
    with_count<GROUP>(count, [&](auto n) {
        sum_products<decltype(n)::value>(weight, weight + stride, x.terms + term * x.inputs, m.inputs,
                                         ahead, reinterpret_cast<Sums*>(result));
    });
}
#endif

inline void store_terms(const Quantized& to, int64_t row, int i, Lanes high, Lanes low) {
    store_term(to, row * to.count, i, high);
    if (to.count == 2) store_term(to, row * 2 + 1, i, low);
}

// 254 · high + low of 16 outputs: exact in double, rounded once.
inline Lanes combine(__m512i high, __m512i low) {
    auto half = [](__m256i h, __m256i l) {
        return _mm512_cvtpd_ps(_mm512_fmadd_pd(_mm512_cvtepi32_pd(h), _mm512_set1_pd(SPLIT), _mm512_cvtepi32_pd(l)));
    };
    __m256 a = half(_mm512_castsi512_si256(high), _mm512_castsi512_si256(low));
    __m256 b = half(_mm512_extracti64x4_epi64(high, 1), _mm512_extracti64x4_epi64(low, 1));
    return {_mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1)};
}

inline int rows_at_once(int terms) { return GROUP / terms; }

inline void products(const Matrix& m, int64_t block, const Quantized& x, int64_t row, int rows, Ahead ahead,
                     Lanes (*result)[2]) {
    alignas(64) int32_t sums[GROUP][2][OUTPUTS];
    integer_products(m, m.weight + block * OUTPUTS * m.inputs, x, row * x.count, rows * x.count, ahead,
                     sums);
    auto sum_of = [&](int r, int term, int b) {
        __m512i total = _mm512_load_si512(sums[r * x.count + term][b]);
        return _mm512_sub_epi32(total, _mm512_set1_epi32(x.offset[2 * (row + r) + term]));
    };
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < 2; b++) {
            __m512i high = sum_of(r, 0, b);
            result[r][b] = x.count == 2 ? combine(high, sum_of(r, 1, b)) : Lanes{_mm512_cvtepi32_ps(high)};
        }
}
