// Products of bytes of weights and bytes of terms: AVX512-VNNI's and AMX's.
//
// The instructions multiply unsigned by signed bytes: a packed weight is w + 128, and 128 times the sum of the terms is
// subtracted. The sums wrap around 2³², which the subtraction undoes.
//
// `Isa` is an instruction set, a struct of
//   TOKEN_BLOCK                       tokens whose low terms are multiplied at once
//   INTERLEAVED                       tokens that share cache lines
//   begin()                           called by each thread before the products of a phase
//   store_term(to, token, i, value)   store 16 low terms of a token
//   sums(m, weight, x, token, count, next, result)
//                                     result[t][b] = the sums of the low terms of `count` tokens from `token` on, the
//                                     first of a token block, with the blocks of outputs at `weight` and after
#pragma once
#include "lanes.h"
#include "matrix.h"
#include "prefetch.h"

template <class Isa>
struct ByteTerms {
    static constexpr int ZERO = 128;
    static constexpr int INPUTS = 4;
    static constexpr int TOKEN_BLOCK = Isa::TOKEN_BLOCK;
    static constexpr int INTERLEAVED = Isa::INTERLEAVED;
    static constexpr int BYTES = 1;

    static void begin() { Isa::begin(); }

    static void store(const Quantized& to, int64_t token, int i, Lanes, Lanes low) { Isa::store_term(to, token, i, low); }

    static void products(const Matrix& m, int64_t block, const Quantized& x, int64_t first, int64_t last, Prefetch next,
                         Lanes (*result)[2]) {
        alignas(64) int32_t sums[TOKEN_BLOCK][2][OUTPUTS];
        const uint8_t* weight = m.weight + block * OUTPUTS * m.inputs;
        Isa::sums(m, weight, x, first, static_cast<int>(last - first), next, sums);
        for (int64_t token = first; token < last; token += OUTLIER_BLOCK) {
            const int count = static_cast<int>(std::min<int64_t>(last - token, OUTLIER_BLOCK));
            const int most = *std::max_element(x.outliers + token, x.outliers + token + count);
            const bool fit = most <= MAX_OUTLIERS && m.inputs <= MAX_INPUTS;
            Int32s high[OUTLIER_BLOCK][2];
            if (most > 0)
                with_count<OUTLIER_BLOCK>(count, [&](auto n) {
                    sum_outliers<decltype(n)::value>(weight, weight + m.inputs * OUTPUTS, x, token, most, high);
                });
            for (int t = 0; t < count; t++) {
                const int32_t* zero = x.offset + 2 * (token + t);
                for (int b = 0; b < 2; b++) {
                    Int32s sum = load_sums(sums[token - first + t][b]) - zero[0];
                    Lanes& value = result[token - first + t][b];
                    if (most > 0 && !fit) {
                        value = combine(high[t][b] - zero[1], sum);
                    } else {
                        if (most > 0) sum += SPLIT * (high[t][b] - zero[1]);
                        value = {_mm512_cvtepi32_ps(reinterpret_cast<__m512i>(sum))};
                    }
                }
            }
        }
    }

private:
    // With another type GCC copies sums in each step of a loop.
    using Int32s [[gnu::vector_size(64)]] = int32_t;
    // 254 · Σ high·w + Σ low·w fits int32 for up to so many outlier quads and inputs.
    static constexpr int MAX_OUTLIERS = 64, MAX_INPUTS = 1 << 16;
    static_assert(int64_t{MAX_OUTLIERS} * 4 * SPLIT * 127 * 128 + int64_t{MAX_INPUTS} * 127 * 128 < int64_t{1} << 31);

    static Int32s load_sums(const int32_t* sums) { return reinterpret_cast<Int32s>(_mm512_load_si512(sums)); }

    // result [COUNT][2]: the sums of high terms of a token block with the blocks of outputs at `first` and at `second`.
    // `most`: the largest number of their outliers.
    template <int COUNT>
    __attribute__((noinline)) static void sum_outliers(const uint8_t* first, const uint8_t* second, const Quantized& x,
                                                       int64_t token, int most, Int32s (*result)[2]) {
        const int32_t *quad = x.outlier_quad + x.outliers_at(token), *high = x.outlier_high + x.outliers_at(token);
        auto add = [](Int32s sum, const uint8_t* weights, __m512i terms) {
            return reinterpret_cast<Int32s>(
                _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), _mm512_loadu_si512(weights), terms));
        };
        Int32s sums[COUNT][2] = {};
        for (int i = 0; i < most; i++, quad += OUTLIER_BLOCK, high += OUTLIER_BLOCK) {
            unrolled<COUNT>([&](auto t) {
                const int64_t at = int64_t{quad[t]} * (OUTPUTS * INPUTS);
                const __m512i terms = _mm512_set1_epi32(high[t]);
                sums[t][0] = add(sums[t][0], first + at, terms);
                sums[t][1] = add(sums[t][1], second + at, terms);
            });
        }
        unrolled<COUNT>([&](auto t) {
            result[t][0] = sums[t][0];
            result[t][1] = sums[t][1];
        });
    }

    // 254 · high + low of 16 outputs: exact in double, rounded once.
    static Lanes combine(Int32s high_sums, Int32s low_sums) {
        const auto high = reinterpret_cast<__m512i>(high_sums), low = reinterpret_cast<__m512i>(low_sums);
        auto half = [](__m256i h, __m256i l) {
            return _mm512_cvtpd_ps(
                _mm512_fmadd_pd(_mm512_cvtepi32_pd(h), _mm512_set1_pd(SPLIT), _mm512_cvtepi32_pd(l)));
        };
        __m256 a = half(_mm512_castsi512_si256(high), _mm512_castsi512_si256(low));
        __m256 b = half(_mm512_extracti64x4_epi64(high, 1), _mm512_extracti64x4_epi64(low, 1));
        return {_mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1)};
    }
};
