// LoRA: what an adapter adds to the linear layers for the tokens of its sequences, scaling · (x · Aᵀ) · Bᵀ in float32.
//
// x are a token's activations before they are quantized. All sums have one order, for each token by itself: Σ x·A over the
// inputs in CHAINS sums of every CHAINS-th input, Σ (x·A)·B over the ranks in two such sums. So a token's result is the same
// bits in any batch and on any instruction set.
//
// The ranks of layers that are computed together (query, key and value) lie side by side, padded to blocks of 16 together:
//
//     A         [blocks of 16 ranks][inputs][16 ranks]
//     B         [blocks of 16 outputs][ranks of the layer that the outputs belong to][16 outputs]
#pragma once
#include <vector>

#include "lanes.h"

// The ranks of a block of outputs, and the place of its first element in B.
struct RankRange {
    int32_t first, count;
    int64_t at;
};

// An adapter's weights of a linear layer; zeros if it has none there.
struct Lora {
    const void *a, *b;       // bfloat16 or float
    const float* scaling;    // [ranks]
    const RankRange* range;  // [outputs / 16]
    int32_t rank_blocks, is_bfloat16;
};

// The tokens of a pass, and their adapters.
class LoraTokens {
public:
    // Adjacent tokens with one adapter. table: the weights of all its linear layers.
    struct Segment {
        const Lora* table;
        int64_t first;
        int count;
    };
#ifdef __AVX512F__
    static constexpr int MAX_SEGMENT = 4;  // tokens whose sums registers hold
#else
    static constexpr int MAX_SEGMENT = 1;
#endif

    // table_of(token): null for a token without an adapter. shrunk: [count][stride], room for x · Aᵀ.
    template <class TableOf>
    LoraTokens(int64_t count, float* shrunk, int64_t stride, const TableOf& table_of)
        : tables(static_cast<size_t>(count)), shrunk(shrunk), stride(stride) {
        for (int64_t token = 0; token < count; token++) {
            const Lora* table = tables[token] = table_of(token);
            if (!table) continue;
            const bool joins = !segments.empty() && segments.back().table == table &&
                               segments.back().count < MAX_SEGMENT &&
                               segments.back().first + segments.back().count == token;
            if (joins)
                segments.back().count++;
            else
                segments.push_back({table, token, 1});
        }
    }

    bool empty() const { return segments.empty(); }
    float* shrunk_of(int64_t token) const { return shrunk + token * stride; }

    std::vector<const Lora*> tables;  // of each token
    std::vector<Segment> segments;
    float* shrunk;                    // [tokens][stride]: scaling · x · Aᵀ
    int64_t stride;
};

// result[t] = Σ x·A of a block of ranks. values(t, i): 16 activations of the t-th token from i on.
template <class Element, int TOKENS, class Values>
inline void sum_inputs(const Element* a, int inputs, const Values& values, Lanes* result) {
    constexpr int CHAINS = 4;
    constexpr int STRIPE = 512;  // inputs that are stored long before they are loaded, and stay in the L1 cache
    Lanes sums[TOKENS][CHAINS];
    unrolled<TOKENS>([&](auto t) { unrolled<CHAINS>([&](auto c) { sums[t][c] = set(0.0f); }); });
    for (int first = 0; first < inputs; first += STRIPE) {
        const int count = std::min(inputs - first, STRIPE);
        float x[TOKENS][STRIPE];
        for (int i = 0; i < count; i += LANES)
            unrolled<TOKENS>([&](auto t) { store(x[t] + i, values(t, first + i)); });
        for (int i = 0; i < count; i += CHAINS, a += CHAINS * LANES)
            unrolled<CHAINS>([&](auto c) {
                const Lanes weights = load(a + c * LANES);
                unrolled<TOKENS>([&](auto t) { sums[t][c] = fma(set(x[t][i + c]), weights, sums[t][c]); });
            });
    }
    unrolled<TOKENS>([&](auto t) { result[t] = (sums[t][0] + sums[t][2]) + (sums[t][1] + sums[t][3]); });
}

// result[t] = Σ shrunk·B of a block of outputs. shrunk: scaled; a token's values are `stride` after the former's.
template <class Element, int TOKENS>
inline void sum_ranks(const Element* b, const float* shrunk, int64_t stride, int count, Lanes* result) {
    Lanes even[TOKENS], odd[TOKENS];
    unrolled<TOKENS>([&](auto t) { even[t] = odd[t] = set(0.0f); });
    int rank = 0;
    auto add = [&](Lanes* sums) {
        const Lanes weights = load(b + rank * LANES);
        unrolled<TOKENS>([&](auto t) { sums[t] = fma(set(shrunk[t * stride + rank]), weights, sums[t]); });
        rank++;
    };
    while (rank + 1 < count) add(even), add(odd);
    if (rank < count) add(even);
    unrolled<TOKENS>([&](auto t) { result[t] = even[t] + odd[t]; });
}

// The product of one linear layer, the `layer`-th of an adapter's table, with the tokens of a pass.
struct LoraProduct {
    const LoraTokens& tokens;
    int64_t layer;

    // Number of items of `shrink`: a block of ranks of a segment each.
    int64_t items() const {
        int blocks = 0;
        for (const auto& segment : tokens.segments) blocks = std::max(blocks, segment.table[layer].rank_blocks);
        return blocks * static_cast<int64_t>(tokens.segments.size());
    }

    // Shrink an item's activations to scaling · x · Aᵀ. A token's are factor(x) · x · gain; gain may be null.
    template <class Factor>
    void shrink(int64_t item, const float* x, const float* gain, const Factor& factor, int inputs) const {
        const int64_t segments = static_cast<int64_t>(tokens.segments.size()), block = item / segments;
        const LoraTokens::Segment& segment = tokens.segments[item % segments];
        const Lora& lora = segment.table[layer];
        if (block >= lora.rank_blocks) return;
        with_count<LoraTokens::MAX_SEGMENT>(segment.count, [&](auto n) {
            constexpr int TOKENS = decltype(n)::value;
            const float* from = x + segment.first * inputs;
            Lanes factors[TOKENS], result[TOKENS];
            for (int t = 0; t < TOKENS; t++) factors[t] = set(factor(from + t * inputs));
            auto values = [&](int t, int i) {
                const Lanes value = load(from + t * inputs + i);
                return (gain ? value * load(gain + i) : value) * factors[t];
            };
            auto sum = [&](const auto* a) { sum_inputs<std::decay_t<decltype(*a)>, TOKENS>(a, inputs, values, result); };
            const int64_t at = block * LANES * inputs;
            if (lora.is_bfloat16)
                sum(static_cast<const BFloat16*>(lora.a) + at);
            else
                sum(static_cast<const float*>(lora.a) + at);
            const Lanes scaling = load(lora.scaling + block * LANES);
            for (int t = 0; t < TOKENS; t++)
                store(tokens.shrunk_of(segment.first + t) + block * LANES, result[t] * scaling);
        });
    }

    // Add the products of the tokens from `first` to `last` with two blocks of outputs, after `shrink`.
    void add(int64_t first, int64_t last, int64_t block, Lanes (*value)[2]) const {
        for (int64_t token = first; token < last;) {
            const Lora* table = tokens.tables[token];
            int count = 1;
            while (count < LoraTokens::MAX_SEGMENT && token + count < last && tokens.tables[token + count] == table)
                count++;
            if (table && table[layer].rank_blocks) {
                const bool begins = token == 0 || tokens.tables[token - 1] != table;
                if (table[layer].is_bfloat16)
                    add_segment<BFloat16>(table[layer], token, count, block, begins, value + (token - first));
                else
                    add_segment<float>(table[layer], token, count, block, begins, value + (token - first));
            }
            token += count;
        }
    }

private:
    // begins: whether the tokens are the first ones with this adapter.
    template <class Element>
    void add_segment(const Lora& lora, int64_t token, int count, int64_t block, bool begins, Lanes (*value)[2]) const {
        for (int i = 0; i < 2; i++) {
            const RankRange& range = lora.range[block + i];
            const Element* b = static_cast<const Element*>(lora.b) + range.at;
            // Other adapters are read in between: without this, each one waits for its next blocks.
            const int64_t size = range.count * LANES * sizeof(Element);
            for (int64_t byte = 0; begins && byte < size; byte += 64)
                _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(b) + 2 * size + byte), _MM_HINT_T0);
            Lanes sums[LoraTokens::MAX_SEGMENT];
            with_count<LoraTokens::MAX_SEGMENT>(count, [&](auto n) {
                const float* shrunk = tokens.shrunk_of(token) + range.first;
                sum_ranks<Element, decltype(n)::value>(b, shrunk, tokens.stride, range.count, sums);
            });
            for (int t = 0; t < count; t++) value[t][i] = value[t][i] + sums[t];
        }
    }
};
