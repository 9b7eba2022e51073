// A linear layer with INT8 weights, or INT4 in groups: quantized tokens, exact integer products, scales. Weights are packed
// here, too.
#pragma once
#include "lanes.h"
#include "lora.h"
#include "matrix.h"
#include "prefetch.h"
#if defined(__AMX_INT8__)
#include "amx.h"
#include "avx512_vnni.h"
using IntegerProduct = ByteTerms<Amx>;
using GroupIsa = Avx512Vnni;  // AMX's tiles are for products per channel
using GroupTerms = ByteTerms<Avx512Vnni>;
#elif defined(__AVX512VNNI__)
#include "avx512_vnni.h"
using IntegerProduct = ByteTerms<Avx512Vnni>;
using GroupIsa = Avx512Vnni;
using GroupTerms = IntegerProduct;
#else
#include "avx2.h"
using IntegerProduct = Avx2;
using GroupIsa = Avx2;
using GroupTerms = IntegerProduct;
#endif
#include "column_groups.h"

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
// A Product, ChannelProduct or GroupProduct, has besides
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
using GroupProduct = ColumnGroups<GroupIsa, GroupTerms>;

// The largest magnitude of a token's values that are no outliers. values(i): 16 of them from i on, scaled to at most 127.
//
// Outliers exceed outlier_ratio times the mean magnitude of the others, which two rounds approach from that of all. The sums
// are floats in one order: every instruction set finds the same outliers.
template <class Values>
inline float largest_inlier(const Quantized& token, const Values& values) {
    constexpr int ROUNDS = 2, CHAINS = 4;
    if (token.outlier_ratio == 0) return 0.0f;
    if (std::isinf(token.outlier_ratio)) return 127.0f;
    Lanes limit = set(INFINITY);
    auto each = [&](const auto& body) {
        for (int i = 0; i < token.inputs; i += CHAINS * LANES)
            unrolled<CHAINS>([&](auto c) {
                const Lanes magnitude = abs(values(i + c * LANES));
                body(c, where_at_most(magnitude, limit, magnitude));
            });
    };
    for (int round = 0; round < ROUNDS; round++) {
        Lanes total[CHAINS] = {set(0.0f), set(0.0f), set(0.0f), set(0.0f)};
        each([&](int c, Lanes magnitude) { total[c] = total[c] + magnitude; });
        limit = set(sum((total[0] + total[2]) + (total[1] + total[3])) * token.outlier_factor);
    }
    Lanes largest[CHAINS] = {set(0.0f), set(0.0f), set(0.0f), set(0.0f)};
    each([&](int c, Lanes magnitude) { largest[c] = max(largest[c], magnitude); });
    return largest_lane(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
}

// The high terms of a token: quads of columns with one that isn't 0, in ascending order.
class Outliers {
public:
    Outliers(const Quantized& to, int64_t token)
        : quad(to.outlier_quad + to.outliers_at(token)), terms(to.outlier_high + to.outliers_at(token)) {}

    void append(int i, Lanes high) {
        int32_t four[LANES / QUAD];
        store(reinterpret_cast<int8_t*>(four), high);
        total = total + high;
        for (int k = 0; k < LANES / QUAD; k++) {
            quad[count * OUTLIER_BLOCK] = i / QUAD + k;
            terms[count * OUTLIER_BLOCK] = four[k];
            count += four[k] != 0;
        }
    }

    int32_t count = 0;
    Lanes total = set(0.0f);  // exact: integers below 2²⁴

private:
    int32_t* quad;
    int32_t* terms;
};

// The values of a token, x or x · gain.
template <bool GAIN>
struct Activations {
    const float *x, *gain;

    Lanes from(int i) const { return GAIN ? load(x + i) * load(gain + i) : load(x + i); }
    Lanes gathered(const int32_t* index) const {
        return GAIN ? gather(x, index) * gather(gain, index) : gather(x, index);
    }
};

// Quantize `factor` times a token that is multiplied with `m`.
template <class Product, bool GAIN>
inline void quantize_values(const Activations<GAIN>& values, float factor, const Matrix& m, const Quantized& to,
                            int64_t token) {
    const Range range(to.inputs, factor, [&](int i) { return values.from(i); });
    const float inlier = largest_inlier(to, [&](int i) { return values.from(i) * range.inverse; });
    // Steps of q in 1 / 127 of the largest value: at most 254, so that high terms are at most 127.
    const float steps = std::min(127.0f / inlier, static_cast<float>(SPLIT));
    Outliers outliers(to, token);
    auto quantize = [&](const auto& value) {
        const Lanes inverse = range.inverse * set(steps);
        const int groups = std::max(m.groups, 1), size = m.groups ? m.group_size : to.inputs;
        for (int g = 0, i = 0; g < groups; g++) {
            Lanes sum_low = set(0.0f);  // exact: integers below 2²⁴
            for (const int end = i + size; i < end; i += LANES) {
                const Lanes q = round(value(i) * inverse);
                Lanes low = q;
                if (any_above(abs(q), set(127.0f))) {
                    const Lanes high = round(q * set(1.0f / SPLIT));
                    low = q - high * set(SPLIT);
                    outliers.append(i, high);
                }
                sum_low = sum_low + low;
                Product::store(to, token, i, m.groups ? low : q, low);
            }
            Product::store_sum(to, m, token, g, sum(sum_low));
        }
    };
    if (!range.finite)
        quantize([](int) { return set(0.0f); });
    else if (m.order)
        quantize([&](int i) { return values.gathered(m.order + i); });
    else
        quantize([&](int i) { return values.from(i); });
    to.outliers[token] = outliers.count;
    to.offset[2 * token + 1] = ZERO * static_cast<int32_t>(sum(outliers.total));
    to.scale[token] = range.finite ? range.largest / 127.0f * factor / steps : NAN;
}

// Quantize `factor · x · gain`; gain may be null.
template <class Product>
inline void quantize_token(const float* x, const float* gain, float factor, const Matrix& m, const Quantized& to,
                           int64_t token) {
    if (gain)
        quantize_values<Product>(Activations<true>{x, gain}, factor, m, to, token);
    else
        quantize_values<Product>(Activations<false>{x, gain}, factor, m, to, token);
}

// Append zeros to the outliers of the tokens from `first` to `end`, a token block, up to their largest number.
inline void pad_outliers(const Quantized& q, int64_t first, int64_t end) {
    const int most = *std::max_element(q.outliers + first, q.outliers + end);
    for (int64_t token = first; token < end; token++)
        for (int i = q.outliers[token]; i < most; i++) {
            q.outlier_quad[q.outliers_at(token) + i * OUTLIER_BLOCK] = 0;
            q.outlier_high[q.outliers_at(token) + i * OUTLIER_BLOCK] = 0;
        }
}

// The scaled products of the tokens from `first` to `end` with two blocks, and what `lora` adds unless it is null;
// finish(token, block, Lanes[2]). `next`: this thread's next two blocks.
template <class Product, class Finish>
inline void tile(const Matrix& m, int64_t block, int64_t next, const Quantized& x, int64_t first, int64_t end,
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
