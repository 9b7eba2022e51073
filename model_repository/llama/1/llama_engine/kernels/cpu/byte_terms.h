// Products of bytes of weights and bytes of terms: AVX512-VNNI's and AMX's.
//
// An operand is a term here; a token with two has the high and the low one in turn. The instructions multiply
// unsigned by signed bytes: a packed weight is w + 128, and 128 · Σ q is subtracted from the sums. These wrap around 2³²,
// which the subtraction undoes.
//
// `Set` is an instruction set, a struct of
//   GROUP                             terms that are multiplied at once, an even number
//   INTERLEAVED                       terms that share cache lines
//   begin()                           called by each thread before the products of a phase
//   store_term(to, term, i, value)    store 16 inputs of a term
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
    static constexpr int INTERLEAVED = Set::INTERLEAVED;
    static constexpr int BYTES = 1;

    static int64_t operand(int64_t position, int64_t two_terms) { return position + std::min(position, two_terms); }
    static int64_t position(int64_t operand, int64_t two_terms) {
        return operand < 2 * two_terms ? operand / 2 : operand - two_terms;
    }
    static void begin() { Set::begin(); }

    static void store_one(const Quantized& to, int64_t operand, int i, Lanes high) {
        Set::store_term(to, operand, i, high);
    }
    static void store_two(const Quantized& to, int64_t operand, int i, Lanes high, Lanes low) {
        Set::store_term(to, operand, i, high);
        Set::store_term(to, operand + 1, i, low);
    }

    static void products(const Matrix& m, int64_t block, const Quantized& x, int64_t two_terms, int64_t first,
                         int64_t last, Prefetch next, Lanes (*result)[2]) {
        alignas(64) int32_t sums[GROUP][2][OUTPUTS];
        const int64_t begin = operand(first, two_terms), count = operand(last, two_terms) - begin;
        Set::sums(m, m.weight + block * OUTPUTS * m.inputs, x, begin, static_cast<int>(count), next, sums);
        const auto* term = sums;
        auto sum_of = [&](int b, int32_t offset) {
            return _mm512_sub_epi32(_mm512_load_si512(term[0][b]), _mm512_set1_epi32(offset));
        };
        for (int64_t at = first; at < last; at++, result++) {
            const int32_t* offset = x.offset + 2 * x.token[at];
            const __m512i high[2] = {sum_of(0, offset[0]), sum_of(1, offset[0])};
            term++;
            if (at < two_terms) {
                for (int b = 0; b < 2; b++) result[0][b] = combine(high[b], sum_of(b, offset[1]));
                term++;
            } else {
                for (int b = 0; b < 2; b++) result[0][b] = {_mm512_cvtepi32_ps(high[b])};
            }
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
