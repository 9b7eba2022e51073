// The integer product with AVX2 alone: sums of pairs of 16-bit products.
//
// AVX2's product of bytes saturates; that of 16-bit integers is exact, and takes q itself in place of two terms.
#pragma once
#include "token_blocks.h"

struct Avx2 {
    static constexpr int ZERO = 0;
    static constexpr int INPUTS = 2;
    static constexpr int BYTES = 2;
    static constexpr int TOKEN_BLOCK = 6;         // two registers each, and four for weights, a pair and products
    static constexpr int INTERLEAVED = TOKEN_BLOCK;
    static constexpr int64_t EXACT_INPUTS = 512;  // whose sums fit int32: 512 · 128 · 32,258 < 2³¹

    using Term = int16_t;
    using Sums = __m256i;
    static Sums load_weights(const uint8_t* packed) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
    }
    // The `part`-th INPUTS of a quad's four terms, in the form of `broadcast`.
    static int32_t part_of_quad(int32_t four, int part) {
        const int32_t pair = four >> 16 * part;
        return static_cast<uint16_t>(static_cast<int8_t>(pair)) | static_cast<int8_t>(pair >> 8) * 65536;
    }
    static Sums ones() { return _mm256_set1_epi32(0x00010001); }
    static Sums broadcast(int32_t four) { return _mm256_set1_epi32(four); }
    static Sums add_products(Sums sums, Sums weights, Sums terms) {
        return _mm256_add_epi32(sums, _mm256_madd_epi16(weights, terms));
    }

    static constexpr int PANEL = 1;
    static constexpr int COLUMNS_IN_INT16 = 0;
    static Sums int32s(Sums sums) { return sums; }
    static Lanes floats(Sums first, Sums second, int) { return {_mm256_cvtepi32_ps(first), _mm256_cvtepi32_ps(second)}; }

    static void begin() {}

    static void store(const Quantized& to, int64_t token, int i, Lanes q, Lanes) { store_in_block<Avx2>(to, token, i, q); }

    static void products(const Matrix& m, int64_t block, const Quantized& x, int64_t first, int64_t last, Prefetch next,
                         Lanes (*result)[2]) {
        const int tokens = static_cast<int>(last - first);
        const Term* terms = reinterpret_cast<const Term*>(x.terms) + first * x.inputs;
        next.bytes /= 2;  // for each of the two blocks
        for (int b = 0; b < 2; b++) {
            const uint8_t* weight = m.weight + (block + b) * OUTPUTS * m.inputs;
            double total[TOKEN_BLOCK][OUTPUTS] = {};
            for (int64_t k = 0; k < m.inputs; k += EXACT_INPUTS) {
                const uint8_t* half = weight + k * OUTPUTS;  // a register holds half of a block
                alignas(32) int32_t sums[TOKEN_BLOCK][OUTPUTS];
                with_count<TOKEN_BLOCK>(tokens, [&](auto n) {
                    sum_products<Avx2, decltype(n)::value>(half, half + OUTPUTS / 2 * INPUTS, terms + k * TOKEN_BLOCK,
                                                           std::min(m.inputs - k, EXACT_INPUTS), next,
                                                           reinterpret_cast<Sums*>(sums));
                });
                next.advance(EXACT_INPUTS / INPUTS);
                for (int t = 0; t < tokens; t++)
                    for (int o = 0; o < OUTPUTS; o++) total[t][o] += sums[t][o];
            }
            for (int t = 0; t < tokens; t++) {
                float whole[OUTPUTS];
                for (int o = 0; o < OUTPUTS; o++) whole[o] = static_cast<float>(total[t][o]);
                result[t][b] = load(whole);
            }
        }
    }
};

// The integer product of column groups of 4 bits: of bytes, because 2 · 127 · 15 doesn't saturate.
struct Avx2Nibbles {
    static constexpr int ZERO = 0;
    static constexpr int INPUTS = 4;
    static constexpr int BYTES = 1;
    static constexpr int TOKEN_BLOCK = Avx2::TOKEN_BLOCK;
    static constexpr int INTERLEAVED = TOKEN_BLOCK;

    using Term = int8_t;
    using Sums = __m256i;
    static int32_t part_of_quad(int32_t four, int) { return four; }
    static Sums ones() { return _mm256_set1_epi32(0x01010101); }
    static Sums broadcast(int32_t four) { return _mm256_set1_epi32(four); }
    // Twelve sums, two registers of weights, a term and products are all registers: GCC would reorder, and keep sums in memory.
    static Sums add_products(Sums sums, Sums weights, Sums terms) {
        Sums products;
        asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(weights), "x"(terms));
        return sums;
    }
    static constexpr int COLUMNS_IN_INT16 = 32;  // 8 sums of pairs: 8 · 2 · 127 · 15 < 2¹⁵
    static Sums int32s(Sums sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

    static constexpr int PANEL = Avx2::PANEL;
    static Sums unpack(const uint8_t* packed, int part) {
        alignas(32) static constexpr uint64_t MASK[] = {NIBBLE, NIBBLE, NIBBLE, NIBBLE};
        const Sums pairs = _mm256_loadu_si256(reinterpret_cast<const Sums*>(packed));
        Sums weights = _mm256_srli_epi16(pairs, 4 * part);
        asm("vpand %1, %0, %0" : "+x"(weights) : "m"(MASK));  // no register is left for a mask
        return weights;
    }
    static Lanes floats(Sums first, Sums second, int b) { return Avx2::floats(first, second, b); }

    static void begin() {}

    static void store(const Quantized& to, int64_t token, int i, Lanes, Lanes low) {
        store_in_block<Avx2Nibbles>(to, token, i, low);
    }

private:
    static constexpr uint64_t NIBBLE = 0x0f0f0f0f0f0f0f0f;
};
