// The data of exact INT8 products: sums of integers, which no order of summation changes.
//
// A token's activations x are scale · q, and q = 254 · high + low with both terms from -127 to 127: 15 bits. The scale is
// chosen so that only the token's outliers need a high term. A product is
//
//     Σ x·w = scale · weight_scale · (Σ low·w + 254 · Σ high·w)
//
// whose second sum is over the outliers alone, in quads of four adjacent columns. All sums are int32, exact:
// |Σ| ≤ inputs · 127 · 128 < 2³¹ for up to 132,000 inputs.
//
// Weights with a scale per channel are packed in blocks of 16 outputs; outputs and inputs are padded with zeros to multiples of 64:
//
//     block of 16 outputs        64 bytes: 16 outputs × 4 inputs (AVX2: 32 bytes: 16 outputs × 2 inputs)
//       inputs 0…3      o0: k0 k1 k2 k3 | o1: k0 k1 k2 k3 | … | o15: k0 k1 k2 k3
//       inputs 4…7      o0: k4 k5 k6 k7 | …
//
// Weights with scales for groups of columns are packed in panels, see column_groups.h.
#pragma once
#include <cstdint>

constexpr int OUTPUTS = 16;  // outputs of a block
constexpr int SPLIT = 254;   // q = SPLIT · high + low
constexpr int QUAD = 4;      // columns
constexpr int OUTLIER_BLOCK = 8;  // tokens whose outliers are multiplied at once

struct Matrix {
    const uint8_t* weight;  // packed [outputs / 16][inputs / INPUTS][16][INPUTS], or panels
    const float* scale;     // [outputs]; null for groups
    const float* bias;      // [outputs] or null
    const int32_t* order;   // [groups · group_size]: the input of each column; null: the column's own
    int32_t outputs, inputs;
    int32_t groups, group_size;  // groups of columns; 0 is a scale per channel
    int32_t bits, has_offsets;   // properties of groups
};

// Quantized tokens.
struct Quantized {
    int8_t* terms;          // low terms, or q itself; room for [tokens, to a multiple of 24][2][inputs]: whole blocks
    int32_t* outliers;      // [tokens]: number of quads with a high term
    int32_t* outlier_quad;  // [tokens / 8][inputs / 4][8]: their places, ascending
    int32_t* outlier_high;  // the same: their four high terms; for ByteTerms zeros up to the largest number of the 8
    float* scale;           // [tokens]; NaN if a value isn't finite
    int32_t* offset;        // [tokens][2]: what the packed weights' zero adds to the sums of low and of high terms
    int32_t* group_start;   // [token blocks][column groups][TOKEN_BLOCK]: what sums of products of low terms begin with
    float* group_sum;       // the same: Σ low
    float outlier_ratio;    // see largest_inlier in quantize.h; 0: every value is an outlier, infinity: none is
    float outlier_factor;   // outlier_ratio / inputs without padding
    int32_t inputs;

    // The place of a token's first quad in outlier_quad and outlier_high; the next is OUTLIER_BLOCK after it.
    int64_t outliers_at(int64_t token) const {
        return token / OUTLIER_BLOCK * OUTLIER_BLOCK * (inputs / QUAD) + token % OUTLIER_BLOCK;
    }
};
