// Quantization of tokens for exact INT8 products: their outliers, their scales, and their low and high terms (matrix.h).
#pragma once
#include "lanes.h"
#include "matrix.h"

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
    to.offset[2 * token + 1] = Product::ZERO * static_cast<int32_t>(sum(outliers.total));
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
