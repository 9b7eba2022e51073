// A linear layer with INT8 weights, or INT4 in groups: exact integer products of quantized tokens, scales. Weights are packed
// here, too.
#pragma once
#include "column_groups.h"
#include "lanes.h"
#include "lora.h"
#include "matrix.h"
#include "prefetch.h"
#ifdef __AMX_INT8__
#include "amx.h"
#endif
#ifdef __AVX512VNNI__
#include "avx512_vnni.h"
template <int BITS>
using GroupProduct = ColumnGroups<Avx512Vnni, ByteTerms<Avx512Vnni>, BITS>;  // AMX's tiles are for products per channel
#ifdef __AMX_INT8__
using IntegerProduct = ByteTerms<Amx>;
#else
using IntegerProduct = ByteTerms<Avx512Vnni>;
#endif
#else
#include "avx2.h"
using IntegerProduct = Avx2;
template <int BITS, class Isa = std::conditional_t<BITS == 4, Avx2Nibbles, Avx2>>
using GroupProduct = ColumnGroups<Isa, Isa, BITS>;
#endif

// IntegerProduct, of the instruction set that is compiled for, has
//   INPUTS, ZERO                       inputs packed together; the packed form of the weight 0
//   BYTES                              bytes of a token per input
//   TOKEN_BLOCK                        tokens that one call of `products` multiplies; at most 32, a divisor of 96
//   INTERLEAVED                        tokens that share cache lines
//   store(x, token, i, q, low)         store 16 inputs of a token: low, or q for 16-bit products (low for column groups)
//   begin()                            called by each thread before the products of a phase
//   products(m, block, x, first, last, next, result)
//                                      result[t][b] = Σ low·w + 254 · Σ high·w, rounded to float, of the tokens from
//                                      `first` to `last` with two blocks
// A Product, ChannelProduct or GroupProduct<4 or 8>, has besides
//   store_sum(x, m, token, g, low)     store Σ low of a column group; per channel all inputs are one
//   pair_bytes(m), steps(m)            packed bytes of two blocks, and the steps of `products` over them
//   CHUNK_BYTES, CHUNK_TOKENS          weights that a thread takes at a time, for at most so many tokens
//   scaled(value, m, scale, output)    the product of a token with this scale
constexpr int INPUTS = IntegerProduct::INPUTS, ZERO = IntegerProduct::ZERO;

struct ChannelProduct : IntegerProduct {
    static constexpr int64_t CHUNK_BYTES = 1 << 16, CHUNK_TOKENS = TOKEN_BLOCK;
    static void store_sum(const Quantized& to, const Matrix&, int64_t token, int64_t, float low) {
        to.offset[2 * token] = ZERO * static_cast<int32_t>(low);
    }
    static int64_t pair_bytes(const Matrix& m) { return 2 * OUTPUTS * m.inputs; }
    static int64_t steps(const Matrix& m) { return m.inputs / INPUTS; }
    static Lanes scaled(Lanes sum, const Matrix& m, float scale, int64_t output) {
        return sum * (set(scale) * load(m.scale + output));
    }
};

// function(Product()) with the Product of a matrix.
template <class Function>
inline void with_product(const Matrix& m, const Function& function) {
    if (!m.groups) return function(ChannelProduct());
    m.bits == 4 ? function(GroupProduct<4>()) : function(GroupProduct<8>());
}

// The scaled products of the tokens from `first` to `end` with two blocks, and what `lora` adds unless it is null;
// finish(token, block, Lanes[2]). `next`: this thread's next two blocks.
template <class Product, class Finish>
inline void multiply_pair(const Matrix& m, int64_t block, int64_t next, const Quantized& x, int64_t first, int64_t end,
                          const LoraProduct* lora, const Finish& finish) {
    constexpr int64_t SIZE = Product::TOKEN_BLOCK;
    const int64_t calls = (end - first + SIZE - 1) / SIZE, pair = Product::pair_bytes(m), steps = Product::steps(m);
    // A single call waits for its own weights: prefetching others would delay them.
    Prefetch prefetch{m.weight + (calls > 1 ? next : block) / 2 * pair, calls > 1 ? pair / steps / calls : 0};
    for (; first < end; first += SIZE, prefetch.advance(steps)) {
        const int64_t last = std::min(first + SIZE, end);
        Lanes values[SIZE][2], *value = values[0];
        Product::products(m, block, x, first, last, prefetch, values);
        for (int64_t token = first; token < last; token++, value += 2) {
            for (int b = 0; b < 2; b++) {
                const int64_t output = (block + b) * OUTPUTS;
                value[b] = Product::scaled(value[b], m, x.scale[token], output);
                if (m.bias) value[b] = value[b] + load(m.bias + output);
            }
            if (!lora) finish(token, block, value);
        }
        if (!lora) continue;
        lora->add(first, last, block, values);
        for (int64_t token = first; token < last; token++) finish(token, block, values[token - first]);
    }
}

// Pack a weight. source: [outputs], the channel of `weight` for each packed output, or -1 for zeros.
inline void pack_block(const int8_t* weight, const int32_t* source, int64_t columns, int64_t inputs, int64_t block,
                       uint8_t* packed) {
    uint8_t* target = packed + block * OUTPUTS * inputs;
    std::memset(target, ZERO, OUTPUTS * inputs);
    for (int o = 0; o < OUTPUTS; o++) {
        const int64_t channel = source[block * OUTPUTS + o];
        if (channel < 0) continue;
        const int8_t* from = weight + channel * columns;
        auto put = [&](int64_t k, int64_t count) {
            uint32_t bytes = 0;  // w + 128 is w with its upper bit flipped
            std::memcpy(&bytes, from + k, count);
            bytes ^= ZERO * 0x01010101u;
            std::memcpy(target + k * OUTPUTS + o * INPUTS, &bytes, INPUTS);
        };
        const int64_t whole = columns / INPUTS * INPUTS;
        for (int64_t k = 0; k < whole; k += INPUTS) put(k, INPUTS);
        if (whole < columns) put(whole, columns - whole);
    }
}
