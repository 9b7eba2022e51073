// Products of bytes of weights and bytes of terms: AVX512-VNNI's and AMX's.
//
// The rows of terms are those of all activation rows, high and low one after the other. The instructions multiply
// unsigned by signed bytes: a packed weight is w + 128, and 128 · Σ q is subtracted from the sums. These wrap around 2³²,
// which the subtraction undoes.
//
// `Set` is an instruction set, a struct of
//   GROUP                             terms that are multiplied at once
//   begin()                           called by each thread before the products of a phase
//   store_term(to, term, i, value)    store 16 inputs of a row of terms
//   sums(m, weight, x, term, count, next, result)
//                                     result[t][b] = the sums of `count` terms from `term` on, the first of a group,
//                                     with the blocks at `weight` and the next one
#pragma once
#include "lanes.h"
#include "matrix.h"
#include "prefetch.h"

template <class Set>
struct ByteTerms {
    static constexpr int ZERO = 128;
    static constexpr int INPUTS = 4;
    static constexpr int GROUP = Set::GROUP;

    static int rows_at_once(int terms) { return GROUP / terms; }
    static void begin() { Set::begin(); }

    static void store_terms(const Quantized& to, int64_t row, int i, Lanes high, Lanes low) {
        Set::store_term(to, row * to.count, i, high);
        if (to.count == 2) Set::store_term(to, row * 2 + 1, i, low);
    }

    static void products(const Matrix& m, int64_t block, const Quantized& x, int64_t row, int rows, Prefetch next,
                         Lanes (*result)[2]) {
        alignas(64) int32_t sums[GROUP][2][OUTPUTS];
        Set::sums(m, m.weight + block * OUTPUTS * m.inputs, x, row * x.count, rows * x.count, next, sums);
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

private:
    // 254 · high + low of 16 outputs: exact in double, rounded once.
    static Lanes combine(__m512i high, __m512i low) {
        auto half = [](__m256i h, __m256i l) {
            return _mm512_cvtpd_ps(
                _mm512_fmadd_pd(_mm512_cvtepi32_pd(h), _mm512_set1_pd(SPLIT), _mm512_cvtepi32_pd(l)));
        };
        __m256 a = half(_mm512_castsi512_si256(high), _mm512_castsi512_si256(low));
        __m256 b = half(_mm512_extracti64x4_epi64(high, 1), _mm512_extracti64x4_epi64(low, 1));
        return {_mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1)};
    }
};
