// A linear layer with INT8 weights, or INT4 in groups: quantized tokens, exact integer products, scales. Weights are packed
// here, too.
#pragma once
#include "lanes.h"
#include "matrix.h"
#include "prefetch.h"
#if defined(__AMX_INT8__)
#include "amx.h"
#include "avx512_vnni.h"
using Integers = ByteTerms<Amx>;
using GroupSet = Avx512Vnni;  // AMX's tiles are for products per channel
using GroupTerms = ByteTerms<Avx512Vnni>;
#elif defined(__AVX512VNNI__)
#include "avx512_vnni.h"
using Integers = ByteTerms<Avx512Vnni>;
using GroupSet = Avx512Vnni;
using GroupTerms = Integers;
#else
#include "avx2.h"
using Integers = Avx2;
using GroupSet = Avx2;
using GroupTerms = Integers;
#endif
#include "column_groups.h"

// Integers, of the instruction set that is compiled for, has
//   INPUTS, ZERO                       inputs packed together; the packed form of the weight 0
//   BYTES                              bytes of an operand per input
//   GROUP                              operands that one call of `products` multiplies; at most 32, a divisor of 96
//   INTERLEAVED                        operands that share cache lines
//   operand(position, two_terms)       the first operand of the token at a position, if so many tokens have two terms
//   position(operand, two_terms)       its inverse
//   store_one(x, operand, i, high), store_two(x, operand, i, high, low)  store the terms of 16 inputs of a token
//   begin()                            called by each thread before the products of a phase
//   products(m, block, x, two_terms, first, last, next, result)
//                                      result[t][b] = 254 · Σ high·w + Σ low·w (or Σ high·w), rounded to float, of the
//                                      tokens at positions from `first` to `last` with two blocks
// A Product, ChannelProduct or GroupProduct, has besides
//   pair_bytes(m), steps(m)            packed bytes of two blocks, and the steps of `products` over them
//   CHUNK_BYTES, CHUNK_OPERANDS        weights that a thread takes at a time, for at most so many operands
//   scaled(value, m, scale, output)    the product of a token with this scale
constexpr int INPUTS = Integers::INPUTS, ZERO = Integers::ZERO;

struct ChannelProduct : Integers {
    static constexpr int64_t CHUNK_BYTES = 1 << 16, CHUNK_OPERANDS = GROUP;
    static int64_t pair_bytes(const Matrix& m) { return 2 * OUTPUTS * m.inputs; }
    static int64_t steps(const Matrix& m) { return m.inputs / INPUTS; }
    static Lanes scaled(Lanes sum, const Matrix& m, float scale, int64_t output) {
        return sum * (set(scale) * load(m.scale + output));
    }
};
using GroupProduct = ColumnGroups<GroupSet, GroupTerms>;

// Σ high² of a token, exact: lanes are added as integers before they exceed 2²⁴.
template <class Values>
inline int64_t sum_of_squares(int inputs, const Range& range, const Values& values) {
    constexpr int EXACT = (1 << 24) / (127 * 127) * LANES;
    int64_t total = 0;
    for (int from = 0; from < inputs; from += EXACT) {
        Lanes squares = set(0.0f);
        for (int i = from; i < std::min(from + EXACT, inputs); i += LANES) {
            const Lanes high = round(range.scaled(values(i)));
            squares = fma(high, high, squares);
        }
        float lane[LANES];
        store(lane, squares);
        for (float value : lane) total += static_cast<int64_t>(value);
    }
    return total;
}

// How `factor · x · gain` is quantized; gain may be null. The scale of a token that isn't finite is NaN.
inline void choose_terms(const float* x, const float* gain, float factor, const Quantized& to, int64_t token) {
    auto values = [&](int i) { return gain ? load(x + i) * load(gain + i) : load(x + i); };
    const Range range(to.inputs, factor, values);
    bool has_two = to.limit == INFINITY;
    if (!has_two && to.limit > 0) {
        const int64_t squares = sum_of_squares(to.inputs, range, values);
        has_two = squares > 0 && static_cast<double>(squares) < to.limit;
    }
    to.has_two[token] = has_two;
    to.largest[token] = range.finite ? range.largest : NAN;
    to.scale[token] = range.finite ? range.largest / 127.0f * factor / (has_two ? SPLIT : 1) : NAN;
}

// Store the terms of `x · gain`, the token at this position. `two_terms`: number of tokens with two terms.
inline void store_terms(const float* x, const float* gain, const Quantized& to, int64_t token, int64_t position,
                        int64_t two_terms) {
    const Range range(to.largest[token]);
    const int64_t operand = ChannelProduct::operand(position, two_terms);
    Lanes sum_high = set(0.0f), sum_low = set(0.0f);  // exact: integers below 2²⁴
    for (int i = 0; i < to.inputs; i += LANES) {
        const Lanes v = range.scaled(gain ? load(x + i) * load(gain + i) : load(x + i)), high = round(v);
        sum_high = sum_high + high;
        if (position < two_terms) {
            const Lanes low = round((v - high) * set(SPLIT));
            sum_low = sum_low + low;
            ChannelProduct::store_two(to, operand, i, high, low);
        } else {
            ChannelProduct::store_one(to, operand, i, high);
        }
    }
    to.token[position] = static_cast<int32_t>(token);
    to.offset[2 * token] = ZERO * static_cast<int32_t>(sum(sum_high));
    to.offset[2 * token + 1] = ZERO * static_cast<int32_t>(sum(sum_low));
}

// Does what store_terms does, for a matrix in groups of columns.
inline void store_group_terms(const float* x, const float* gain, const Quantized& to, const Matrix& m, int64_t token,
                              int64_t position, int64_t two_terms) {
    const Range range(to.largest[token]);
    const int64_t operand = GroupProduct::operand(position, two_terms);
    const bool two = position < two_terms;
    auto values = [&](const float* from, int i) { return m.order ? gather(from, m.order + i) : load(from + i); };
    for (int g = 0, i = 0; g < m.groups; g++) {
        Lanes sum_high = set(0.0f), sum_low = set(0.0f);
        for (const int end = i + m.group_size; i < end; i += LANES) {
            const Lanes v = range.scaled(gain ? values(x, i) * values(gain, i) : values(x, i)), high = round(v);
            sum_high = sum_high + high;
            if (two) {
                const Lanes low = round((v - high) * set(SPLIT));
                sum_low = sum_low + low;
                GroupProduct::store_two(to, operand, i, high, low);
            } else {
                GroupProduct::store_one(to, operand, i, high);
            }
        }
        GroupProduct::store_sums(to, m, operand, g, two, sum(sum_high), two ? sum(sum_low) : 0.0f);
    }
    to.token[position] = static_cast<int32_t>(token);
}

// The scaled products of the operands [operand, end) with two blocks; finish(token, block, Lanes[2]). `two_terms`: number of
// tokens with two terms. `next`: this thread's next two blocks.
template <class Product, class Finish>
inline void tile(const Matrix& m, int64_t block, int64_t next, const Quantized& x, int64_t two_terms, int64_t operand,
                 int64_t end, const Finish& finish) {
    constexpr int64_t GROUP = Product::GROUP;
    const int64_t calls = (end - operand + GROUP - 1) / GROUP, pair = Product::pair_bytes(m), steps = Product::steps(m);
    // A single call waits for its own weights: prefetching others would delay them.
    Prefetch prefetch{m.weight + (calls > 1 ? next : block) / 2 * pair, calls > 1 ? pair / steps / calls : 0};
    for (; operand < end; operand += GROUP, prefetch.advance(steps)) {
        const int64_t first = Product::position(operand, two_terms);
        const int64_t last = Product::position(std::min(operand + GROUP, end), two_terms);
        Lanes values[GROUP][2], *value = values[0];
        Product::products(m, block, x, two_terms, first, last, prefetch, values);
        for (int64_t position = first; position < last; position++, value += 2) {
            const int64_t token = x.token[position];
            for (int b = 0; b < 2; b++) {
                const int64_t output = (block + b) * OUTPUTS;
                value[b] = Product::scaled(value[b], m, x.scale[token], output);
                if (m.bias) value[b] = value[b] + load(m.bias + output);
            }
            finish(token, block, value);
        }
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
