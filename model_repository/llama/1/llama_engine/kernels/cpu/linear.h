// A linear layer with INT8 weights: quantized rows, exact integer products, scales. Weights are packed here, too.
#pragma once
#include "lanes.h"
#include "matrix.h"
#include "prefetch.h"
#if defined(__AMX_INT8__)
#include "amx.h"
using Product = ByteTerms<Amx>;
#elif defined(__AVX512VNNI__)
#include "avx512_vnni.h"
using Product = ByteTerms<Avx512Vnni>;
#else
#include "avx2.h"
using Product = Avx2;
#endif

// Product, of the instruction set that is compiled for, has
//   INPUTS, ZERO                       inputs of a packed row; the packed form of the weight 0
//   rows_at_once(terms)                rows of a group, for one call of `products`; at most 32, a divisor of 96
//   store_terms(x, row, i, high, low)  store the terms of 16 inputs
//   begin()                            called by each thread before the products of a phase
//   products(m, block, x, row, rows, next, result)  result[r][b] = 254 · Σ high·w + Σ low·w (or Σ high·w), rounded to float,
//                                      of `rows` rows from `row` with the blocks `block` and `block + 1`
constexpr int INPUTS = Product::INPUTS, ZERO = Product::ZERO;

constexpr int MAX_ROWS_AT_ONCE = 32;

// Quantize `factor · x · gain`; gain may be null. A row that isn't finite has the scale NaN and terms of 0.
inline void quantize_row(const float* x, const float* gain, float factor, const Quantized& to, int64_t row) {
    auto values = [&](int i) { return gain ? load(x + i) * load(gain + i) : load(x + i); };
    const Range range(to.inputs, factor, values);
    Lanes sum_high = set(0.0f), sum_low = set(0.0f);  // exact: integers below 2²⁴
    for (int i = 0; i < to.inputs; i += LANES) {
        Lanes v = range.scaled(values(i));
        Lanes high = round(v), low = round((v - high) * set(SPLIT));
        Product::store_terms(to, row, i, high, low);
        sum_high = sum_high + high;
        sum_low = sum_low + low;
    }
    to.scale[row] = range.finite ? range.largest / 127.0f * factor / (to.count == 2 ? SPLIT : 1) : NAN;
    to.offset[2 * row] = ZERO * static_cast<int32_t>(sum(sum_high));
    to.offset[2 * row + 1] = ZERO * static_cast<int32_t>(sum(sum_low));
}

// The scaled products of the rows [row, end) with two blocks; finish(row, block, Lanes[2]). `next`: this
// thread's next two blocks.
template <class Finish>
inline void tile(const Matrix& m, int64_t block, int64_t next, const Quantized& x, int64_t row, int64_t end,
                 const Finish& finish) {
    const int step = Product::rows_at_once(x.count);
    const int64_t calls = (end - row + step - 1) / step, bytes = calls > 1 ? 2 * OUTPUTS * INPUTS / calls : 0;
    // A single call waits for its own weights: prefetching others would delay them.
    Prefetch prefetch{m.weight + (calls > 1 ? next : block) * OUTPUTS * m.inputs, bytes};
    for (; row < end; row += step, prefetch.advance(m.inputs / INPUTS)) {
        const int rows = static_cast<int>(std::min<int64_t>(end - row, step));
        Lanes value[MAX_ROWS_AT_ONCE][2];
        Product::products(m, block, x, row, rows, prefetch, value);
        for (int r = 0; r < rows; r++) {
            for (int b = 0; b < 2; b++) {
                const int64_t output = (block + b) * OUTPUTS;
                value[r][b] = value[r][b] * (set(x.scale[row + r]) * load(m.scale + output));
                if (m.bias) value[r][b] = value[r][b] + load(m.bias + output);
            }
            finish(row + r, block, value[r]);
        }
    }
}

// Pack a weight. source: [outputs], the row of `weight` for each packed output, or -1 for zeros.
inline void pack_block(const int8_t* weight, const int32_t* source, int64_t columns, int64_t inputs, int64_t block,
                       uint8_t* packed) {
    uint8_t* target = packed + block * OUTPUTS * inputs;
    std::memset(target, ZERO, OUTPUTS * inputs);
    for (int o = 0; o < OUTPUTS; o++) {
        const int64_t row = source[block * OUTPUTS + o];
        if (row < 0) continue;
        const int8_t* from = weight + row * columns;
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
