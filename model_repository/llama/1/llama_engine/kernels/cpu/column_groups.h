// Products with weights in groups of columns: each group of an output has a scale, its weights 4 or 8 bits
// (GPTQ, AWQ, GGUF).
//
// The sums of products are exact integers, |Σ| ≤ 512 · 127 · 128 < 2²⁴, and so are their floats. For the low terms they are
// those of a group, for the high terms those of each quad of columns that has outliers. They are added in ascending order; a
// product with a scale and its addition are rounded apart, as in cpu_reference:
//
//     low total = low total + scale[g] · Σ low·w
//     low total = low total + offset[g] · Σ low      if there are offsets
//     high total: the same, by quad
//     Σ x·w = token's scale · (low total + 254 · high total)
//
// A packed weight of 4 bits is w + 8, one of 8 bits w + ZERO. The sums of low terms begin with what 8 or ZERO adds to them, negated;
// from those of high terms it is subtracted at the end.
//
// A panel is the outputs of two registers of sums: 2 blocks, with AVX2 one. Its scales and weights are one stream:
//
//     column group      scales: float [outputs] | offsets, if there are any: float [outputs]
//       inputs 0…7      4 bits: o0: 4 bytes | o1: 4 bytes | …
//                         k0 k4 | k1 k5 | k2 k6 | k3 k7, the first of two in the lower half of a byte
//       inputs 0…3      8 bits: o0: k0 k1 k2 k3 | o1: k0 k1 k2 k3 | …   (AVX2: inputs 0…1, two bytes)
//
// `Isa` has what token_blocks.h says, and
//   PANEL                     blocks of a panel
//   part_of_quad(high, part)  four bytes for `broadcast`: the part-th INPUTS of four high terms
//   ones()                    a register of weights that are 1
//   unpack(packed, part)      4 bits: a register of the weights of the part-th 4 of these 8 inputs
//   COLUMNS_IN_INT16          columns whose products are summed in 16 bits, not int32; 0: none
//   int32s(sums)              these sums, as int32
//   floats(first, second, b)  the b-th block of two registers of sums, rounded to float
// `Terms` stores the terms of tokens in the blocks that `Isa` reads; see linear.h for what it has.
#pragma once
#include "token_blocks.h"

constexpr int NIBBLES = 8;  // inputs of 4 bits in the four bytes of an output

template <class Isa, class Terms, int BITS>
struct ColumnGroups : Terms {
    static constexpr int TOKEN_BLOCK = Isa::TOKEN_BLOCK;
    static constexpr int64_t CHUNK_BYTES = 1 << 18, CHUNK_TOKENS = 4 * TOKEN_BLOCK;
    static constexpr int PANEL = Isa::PANEL, PANEL_OUTPUTS = PANEL * OUTPUTS;

    // Bytes of a panel's scales and offsets, and of its weights, in a column group; bytes of the whole panel.
    static int64_t scale_bytes(const Matrix& m) { return (m.has_offsets ? 2 : 1) * PANEL_OUTPUTS * sizeof(float); }
    static int64_t weight_bytes(const Matrix& m) { return PANEL_OUTPUTS * m.group_size * BITS / 8; }
    static int64_t panel_bytes(const Matrix& m) { return m.groups * (scale_bytes(m) + weight_bytes(m)); }

    static int64_t pair_bytes(const Matrix& m) { return 2 / PANEL * panel_bytes(m); }
    static int64_t steps(const Matrix& m) { return 2 / PANEL * (m.groups * m.group_size / STEP_INPUTS); }

    static Lanes scaled(Lanes total, const Matrix&, float scale, int64_t) { return total * set(scale); }

    // Store the sum of a token's low terms in column group g.
    static void store_sum(const Quantized& to, const Matrix& m, int64_t token, int64_t g, float low) {
        const int64_t at = sums_at(m, token) + g * TOKEN_BLOCK;
        to.group_sum[at] = low;
        to.group_start[at] = -PACKED_ZERO * static_cast<int32_t>(low);
    }

    static void products(const Matrix& m, int64_t block, const Quantized& x, int64_t first, int64_t last, Prefetch next,
                         Lanes (*result)[2]) {
        const auto* terms = reinterpret_cast<const typename Isa::Term*>(x.terms) + first * x.inputs;
        const int64_t at = sums_at(m, first);
        for (int b = 0; b < 2; b += PANEL) {
            const uint8_t* panel = m.weight + (block + b) / PANEL * panel_bytes(m);
            with_count<TOKEN_BLOCK>(static_cast<int>(last - first), [&](auto n) {
                add_groups<decltype(n)::value>(m, panel, terms, x.group_start + at, x.group_sum + at, next, &result[0][b]);
            });
            for (int64_t token = first; token < last; token++) add_outliers(m, panel, x, token, &result[token - first][b]);
            next.advance(steps(m) / (2 / PANEL));
        }
    }

    // Pack a panel: as pack_block, with scales and offsets [any][groups].
    static void pack(const Matrix& m, const int8_t* weight, const float* scales, const float* offsets,
                     const int32_t* source, int64_t panel, uint8_t* packed) {
        uint8_t* target = packed + panel * panel_bytes(m);
        std::memset(target, 0, panel_bytes(m));
        const int64_t bytes = BITS == 4 ? 4 : Terms::INPUTS, columns = m.groups * m.group_size;
        for (int o = 0; o < PANEL_OUTPUTS; o++) {
            const int64_t channel = source[panel * PANEL_OUTPUTS + o];
            if (channel < 0) continue;
            uint8_t* to = target;
            for (int64_t g = 0; g < m.groups; g++, to += weight_bytes(m)) {
                std::memcpy(to + o * sizeof(float), scales + channel * m.groups + g, sizeof(float));
                if (m.has_offsets)
                    std::memcpy(to + (PANEL_OUTPUTS + o) * sizeof(float), offsets + channel * m.groups + g, sizeof(float));
                to += scale_bytes(m);
                const int8_t* from = weight + channel * columns + g * m.group_size;
                for (int64_t k = 0; k < m.group_size; k += STEP_INPUTS) {
                    uint32_t word = 0;
                    if constexpr (BITS == 4)
                        for (int i = 0; i < NIBBLES; i++) word |= ((from[k + i] + 8u) & 15) << (i % 4 * 8 + i / 4 * 4);
                    else
                        for (int i = 0; i < Terms::INPUTS; i++) word |= ((from[k + i] + Terms::ZERO) & 255u) << 8 * i;
                    std::memcpy(to + k / STEP_INPUTS * PANEL_OUTPUTS * bytes + o * bytes, &word, bytes);
                }
            }
        }
    }

private:
    using Sums = typename Isa::Sums;
    // The type that the products have: with another GCC copies each sum in each step.
    using Int32s [[gnu::vector_size(sizeof(Sums))]] = int32_t;

    static constexpr int STEP_INPUTS = BITS == 4 ? NIBBLES : Terms::INPUTS;
    static constexpr int PACKED_ZERO = BITS == 4 ? 8 : Terms::ZERO;
    static constexpr int PARTS = STEP_INPUTS / Isa::INPUTS;                         // of a register of weights
    static constexpr int HALF = PANEL_OUTPUTS / 2 * (BITS == 4 ? 4 : Isa::INPUTS);  // bytes of a register
    static constexpr int SUM_COLUMNS = std::max(Isa::COLUMNS_IN_INT16, STEP_INPUTS);
    static constexpr int64_t AHEAD = 6 << 10;  // bytes from the packed weights that are read to those that are fetched

    static Sums weights(const uint8_t* packed, int part) {
        if constexpr (BITS == 4)
            return Isa::unpack(packed, part);
        else
            return Isa::load_weights(packed);
    }
    static Int32s int32s(Int32s sums) { return reinterpret_cast<Int32s>(Isa::int32s(reinterpret_cast<Sums>(sums))); }
    // The place of a token's sum of the first column group.
    static int64_t sums_at(const Matrix& m, int64_t token) {
        return token / TOKEN_BLOCK * TOKEN_BLOCK * m.groups + token % TOKEN_BLOCK;
    }

    // Add the products with STEP_INPUTS columns, whose weights are at `panel`, to sums [TOKENS][2].
    template <int TOKENS>
    __attribute__((always_inline)) static void add_step(const uint8_t* panel, const typename Isa::Term* terms,
                                                        Prefetch next, Int32s (*sums)[2]) {
        next.fetch();
        prefetch<1>(panel + AHEAD, 2 * HALF);
        unrolled<PARTS>([&](auto part) {
            Sums w[2];
            for (int half = 0; half < 2; half++) w[half] = weights(panel + half * HALF, part);
            unrolled<TOKENS>([&](auto t) {
                int32_t four;
                std::memcpy(&four, terms + (part * TOKEN_BLOCK + t) * Isa::INPUTS, 4);
                const Sums term = Isa::broadcast(four);
                for (int half = 0; half < 2; half++) {
                    Int32s& sum = sums[t][half];
                    sum = reinterpret_cast<Int32s>(Isa::add_products(reinterpret_cast<Sums>(sum), w[half], term));
                }
            });
        });
    }

    // The same with SUM_COLUMNS columns. Not inlined: in `add_groups` GCC would keep the 16-bit sums in memory.
    template <int TOKENS>
    __attribute__((noinline)) static void add_columns(const uint8_t* panel, const typename Isa::Term* terms,
                                                      Prefetch next, Int32s (*sums)[2]) {
        Int32s narrow[TOKENS][2];
        unrolled<TOKENS>([&](auto t) { narrow[t][0] = narrow[t][1] = Int32s{}; });
        for (int columns = 0; columns < SUM_COLUMNS; columns += STEP_INPUTS) {
            add_step<TOKENS>(panel, terms, next, narrow);
            panel += 2 * HALF, terms += STEP_INPUTS * TOKEN_BLOCK, next.advance();
        }
        unrolled<TOKENS>([&](auto t) {
            for (int half = 0; half < 2; half++) sums[t][half] += int32s(narrow[t][half]);
        });
    }

    // result [TOKENS][2]: the totals of the low terms with a panel's blocks.
    template <int TOKENS>
    __attribute__((noinline)) static void add_groups(const Matrix& m, const uint8_t* panel,
                                                     const typename Isa::Term* terms, const int32_t* starts,
                                                     const float* sums_of_terms, Prefetch next, Lanes* result) {
        for (int t = 0; t < TOKENS; t++)
            for (int b = 0; b < PANEL; b++) result[2 * t + b] = set(0.0f);
        for (int64_t g = 0; g < m.groups; g++, starts += TOKEN_BLOCK, sums_of_terms += TOKEN_BLOCK) {
            const float* scales = reinterpret_cast<const float*>(panel);
            prefetch<1>(panel + AHEAD, scale_bytes(m));
            panel += scale_bytes(m);
            Int32s sums[TOKENS][2];
            unrolled<TOKENS>([&](auto t) {
                sums[t][0] = sums[t][1] = reinterpret_cast<Int32s>(Isa::broadcast(starts[t]));
            });
            int64_t columns = m.group_size;
            do {
                if constexpr (SUM_COLUMNS > STEP_INPUTS)
                    add_columns<TOKENS>(panel, terms, next, sums);
                else
                    add_step<TOKENS>(panel, terms, next, sums);
                panel += SUM_COLUMNS / STEP_INPUTS * 2 * HALF, terms += SUM_COLUMNS * TOKEN_BLOCK;
                next.advance(SUM_COLUMNS / STEP_INPUTS);
            } while ((columns -= SUM_COLUMNS) > 0);
            auto floats = [&](int t, int b) {
                return Isa::floats(reinterpret_cast<Sums>(sums[t][0]), reinterpret_cast<Sums>(sums[t][1]), b);
            };
            auto add = [&](auto has_offsets) {
                unrolled<PANEL>([&](auto b) {
                    const Lanes scale = load(scales + b * OUTPUTS);
                    const Lanes offset = has_offsets ? load(scales + PANEL_OUTPUTS + b * OUTPUTS) : scale;
                    unrolled<TOKENS>([&](auto t) {
                        Lanes& total = result[2 * t + b];
                        Lanes value = total + scale * floats(t, b);
                        if (has_offsets) value = value + offset * set(sums_of_terms[t]);
                        total = value;
                    });
                });
            };
            m.has_offsets ? add(std::true_type()) : add(std::false_type());
        }
    }

    // Add the products of a token's high terms to the totals of a panel's blocks.
    static void add_outliers(const Matrix& m, const uint8_t* panel, const Quantized& x, int64_t token, Lanes* result) {
        constexpr int STEPS = QUAD / Isa::INPUTS;
        const int32_t *quad = x.outlier_quad + x.outliers_at(token), *high = x.outlier_high + x.outliers_at(token);
        const int64_t group_bytes = scale_bytes(m) + weight_bytes(m), quads_of_group = m.group_size / QUAD;
        // q / quads_of_group is q · inverse / 2³² for all quads: they are fewer than 2¹⁶, and those of a group than 2⁸.
        const uint64_t inverse = ((uint64_t{1} << 32) + quads_of_group - 1) / quads_of_group;
        Lanes total[PANEL];
        for (Lanes& t : total) t = set(0.0f);
        for (int i = 0; i < x.outliers[token]; i++, quad += OUTLIER_BLOCK, high += OUTLIER_BLOCK) {
            const int64_t group = static_cast<int64_t>(*quad * inverse >> 32);
            const auto* scales = reinterpret_cast<const float*>(panel + group * group_bytes);
            const uint8_t* group_weights = panel + group * group_bytes + scale_bytes(m);
            const int64_t first = (*quad - group * quads_of_group) * STEPS;
            Int32s sums[2] = {}, sum_of_terms = {};
            unrolled<STEPS>([&](auto step) {
                const Sums terms = Isa::broadcast(Isa::part_of_quad(*high, step));
                auto add = [&](Int32s& sum, Sums w) {
                    sum = reinterpret_cast<Int32s>(Isa::add_products(reinterpret_cast<Sums>(sum), w, terms));
                };
                for (int half = 0; half < 2; half++) {
                    const uint8_t* packed = group_weights + ((first + step) / PARTS * 2 + half) * HALF;
                    add(sums[half], weights(packed, (first + step) % PARTS));
                }
                add(sum_of_terms, Isa::ones());
            });
            sum_of_terms = int32s(sum_of_terms);
            for (Int32s& sum : sums) sum = int32s(sum) - sum_of_terms * PACKED_ZERO;
            auto floats = [](const Int32s& a, const Int32s& b, int block) {
                return Isa::floats(reinterpret_cast<Sums>(a), reinterpret_cast<Sums>(b), block);
            };
            for (int b = 0; b < PANEL; b++) {
                total[b] = total[b] + load(scales + b * OUTPUTS) * floats(sums[0], sums[1], b);
                if (m.has_offsets)
                    total[b] = total[b] + load(scales + PANEL_OUTPUTS + b * OUTPUTS) * floats(sum_of_terms, sum_of_terms, b);
            }
        }
        for (int b = 0; b < PANEL; b++) result[b] = result[b] + set(SPLIT) * total[b];
    }
};
