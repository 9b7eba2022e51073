// The integer product with AVX512-VNNI: four products of a byte of weights and a byte of a term at a time.
#pragma once
#include "byte_terms.h"
#include "token_blocks.h"

struct Avx512Vnni {
    static constexpr int TOKEN_BLOCK = 8;  // two registers each: divides 8, 16, 32 and 64 tokens, and hides latencies
    static constexpr int INTERLEAVED = OUTLIER_BLOCK;
    static constexpr int INPUTS = 4;

    using Term = int8_t;
    using Sums = __m512i;
    static Sums load_weights(const uint8_t* packed) { return _mm512_loadu_si512(packed); }
    // The `part`-th INPUTS of a quad's four terms.
    static int32_t part_of_quad(int32_t four, int) { return four; }
    static Sums ones() { return _mm512_set1_epi32(0x01010101); }
    static Sums broadcast(int32_t four) { return _mm512_set1_epi32(four); }
    static Sums add_products(Sums sums, Sums weights, Sums terms) { return _mm512_dpbusd_epi32(sums, weights, terms); }

    static constexpr int PANEL = 2;
    static Sums unpack(const uint8_t* packed, int part) {
        using Uint16s [[gnu::vector_size(sizeof(Sums))]] = uint16_t;
        const Uint16s pairs = reinterpret_cast<Uint16s>(load_weights(packed)) >> 4 * part;
        return _mm512_and_si512(reinterpret_cast<Sums>(pairs), _mm512_set1_epi32(0x0f0f0f0f));
    }
    static constexpr int COLUMNS_IN_INT16 = 0;
    static Sums int32s(Sums sums) { return sums; }
    static Lanes floats(Sums first, Sums second, int b) { return {_mm512_cvtepi32_ps(b ? second : first)}; }

    static void begin() {}

    static void store_term(const Quantized& to, int64_t token, int i, Lanes value) {
        store_in_block<Avx512Vnni>(to, token, i, value);
    }

    static void sums(const Matrix& m, const uint8_t* weight, const Quantized& x, int64_t token, int count, Prefetch next,
                     int32_t (*result)[2][OUTPUTS]) {
        const int64_t stride = static_cast<int64_t>(m.inputs) * OUTPUTS;
        with_count<TOKEN_BLOCK>(count, [&](auto n) {
            sum_products<Avx512Vnni, decltype(n)::value>(weight, weight + stride, x.terms + token * x.inputs, m.inputs, next,
                                                         reinterpret_cast<Sums*>(result));
        });
    }
};
