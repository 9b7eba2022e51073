// The integer product with VNNI: four products of a byte of weights and a byte of a term at a time. Included by linear.h.
//
// Rows of terms are those of all activation rows, high and low one after the other. Without AMX, Quantized::terms holds
// them in groups of 12, so that the products of a group read it from beginning to end:
//
//     group of 12 terms          48 bytes: 12 terms × 4 inputs
//       inputs 0…3      t0: k0 k1 k2 k3 | t1: k0 k1 k2 k3 | … | t11: k0 k1 k2 k3
//       inputs 4…7      t0: k4 k5 k6 k7 | …
#pragma once

constexpr int ZERO = 128;
constexpr int INPUTS = 4;

#ifdef __AMX_INT8__
#include "amx.h"
#else
constexpr int SUMS_AT_ONCE = 12;  // a group: two registers each, and two for weights

inline void begin_products() {}

inline void store_term(const Quantized& to, int64_t term, int i, Lanes value) {
    int8_t q[LANES], *target = to.terms + term / SUMS_AT_ONCE * SUMS_AT_ONCE * to.inputs;
    store(q, value);
    for (int k = 0; k < LANES; k += INPUTS)
        std::memcpy(target + (i + k) * SUMS_AT_ONCE + term % SUMS_AT_ONCE * INPUTS, q + k, INPUTS);
}

// result[s] = the integer products of SUMS terms of a group with two blocks of outputs.
template <int SUMS>
inline void sum_products(const Matrix& m, const uint8_t* weight, const int8_t* group, int32_t (*result)[2][OUTPUTS]) {
    const uint8_t *end = weight + static_cast<int64_t>(m.inputs) * OUTPUTS, *next = end;
    __m512i sums[SUMS][2];
    unrolled<SUMS>([&](auto s) { sums[s][0] = sums[s][1] = _mm512_setzero_si512(); });
    for (; weight < end; weight += INPUTS * OUTPUTS, next += INPUTS * OUTPUTS, group += INPUTS * SUMS_AT_ONCE) {
        __m512i w0 = _mm512_loadu_si512(weight), w1 = _mm512_loadu_si512(next);
        unrolled<SUMS>([&](auto s) {
            int32_t four;
            std::memcpy(&four, group + s * INPUTS, INPUTS);
            __m512i q = _mm512_set1_epi32(four);
            sums[s][0] = _mm512_dpbusd_epi32(sums[s][0], w0, q);
            sums[s][1] = _mm512_dpbusd_epi32(sums[s][1], w1, q);
        });
    }
    unrolled<SUMS>([&](auto s) {
        _mm512_storeu_si512(result[s][0], sums[s][0]);
        _mm512_storeu_si512(result[s][1], sums[s][1]);
    });
}

// The sums of `count` terms from `term` on, the first of a group.
template <int SUMS = SUMS_AT_ONCE>
inline void integer_products(const Matrix& m, const uint8_t* weight, const Quantized& x, int64_t term, int count,
                             int32_t (*result)[2][OUTPUTS]) {
    if constexpr (SUMS > 1)
        if (count < SUMS) return integer_products<SUMS - 1>(m, weight, x, term, count, result);
    sum_products<SUMS>(m, weight, x.terms + term * x.inputs, result);
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

inline int rows_at_once(int terms) { return SUMS_AT_ONCE / terms; }

inline void products(const Matrix& m, int64_t block, const Quantized& x, int64_t row, int rows, Lanes (*result)[2]) {
    alignas(64) int32_t sums[SUMS_AT_ONCE][2][OUTPUTS];
    integer_products(m, m.weight + block * OUTPUTS * m.inputs, x, row * x.count, rows * x.count, sums);
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
