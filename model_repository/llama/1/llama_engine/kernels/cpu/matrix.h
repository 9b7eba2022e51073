// The data of exact INT8 products: sums of integers, which no order of summation changes.
//
// A token's activations x are scale · q. With two terms q = 254 · high + low, both from -127 to 127: 15 bits. With one term
// q = high. A token has two terms if its largest value is an outlier, so that the other values' high terms are small:
// 0 < Σ high² < limit. A product is
//
//     Σ x·w = scale · weight_scale · (254 · Σ high·w + Σ low·w)
//
// and all sums are int32, exact: |Σ| ≤ inputs · 127 · 128 < 2³¹ for up to 132,000 inputs.
//
// An operand is what one integer product takes of a token: a term (AVX512-VNNI, AMX), or q itself (AVX2).
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

struct Matrix {
    const uint8_t* weight;  // packed [outputs / 16][inputs / INPUTS][16][INPUTS], or panels
    const float* scale;     // [outputs]; null for groups
    const float* bias;      // [outputs] or null
    const int32_t* order;   // [groups · group_size]: the input of each column; null: the column's own
    int32_t outputs, inputs;
    int32_t groups, group_size;  // groups of columns; 0 is a scale per channel
    int32_t bits, has_offsets;   // properties of groups
};

// Quantized tokens. Their terms are sorted, tokens with two terms first, so that no product computes a missing term.
struct Quantized {
    int8_t* terms;     // sorted; room for [tokens, to a multiple of 12][2][inputs]: whole groups
    int32_t* token;    // [tokens]: index of the token at each position
    uint8_t* has_two;  // [tokens]
    float* largest;    // [tokens]: absolute value; NaN if a value isn't finite
    float* scale;      // [tokens]
    int32_t* offset;   // [tokens][2]: what the packed weights' zero adds to the sums of each term
    int32_t* group_start;  // [operands / GROUP][column groups][GROUP]: what the sums of products begin with
    float* group_sum;      // the same for a token's first operand: Σ q
    double limit;      // of Σ high² of a token with two terms; 0: no token has two, infinity: all have
    int32_t inputs;
};
