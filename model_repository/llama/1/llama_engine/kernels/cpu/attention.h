// Attention of each token over its own positions, from the KV cache.
//
// A token's result depends on its own positions alone, in their order: alone or in a batch, in a prefill of any cut or
// a decode step, it is the same bits.
#pragma once
#include "activation_functions.h"
#include "prefetch.h"
#include "queries.h"
#ifdef __AMX_BF16__
#include "tile_attention.h"
#endif

// Rotate the first 2 · half dimensions of a head by its position (RoPE). cosine, sine: [half].
inline void rotate(float* __restrict head, const float* __restrict cosine, const float* __restrict sine, int half) {
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cosine[i] - b * sine[i];
        head[half + i] = b * cosine[i] + a * sine[i];
    }
}

#ifdef __AVX512F__
constexpr int REGISTER_QUERIES = 8;  // of an `Attention`; bounded by the registers
constexpr int MAX_PARTS = 4;    // lanes of a value at a time
#else
constexpr int REGISTER_QUERIES = 2, MAX_PARTS = 2;
#endif

// OPTIONS: a soft cap, and queries that start after position 0. Without, the code has neither.
template <class Element, int QUERIES, bool OPTIONS>
class Attention {
public:
    // scratch: see `scratch_floats`.
    static void attend(const KVHead<Element>& head, const Query* queries, const Scoring& scoring, float* scratch) {
        const AttendedRange range(queries, QUERIES);
        Factor* interleaved = reinterpret_cast<Factor*>(scratch);
        float* scores = scratch + QUERIES * head.dim;
        for (int q = 0; q < QUERIES; q++) {
            for (int i = 0; i < head.dim; i += LANES) {
                Factor factors[LANES / STEP];
                Products::convert(load(queries[q].query + i) * set(scoring.scaling), factors);
                for (int j = 0; j < LANES / STEP; j++) interleaved[(i / STEP + j) * QUERIES + q] = factors[j];
            }
        }
        const int64_t begin = OPTIONS ? range.begin : 0;
        score(head, queries, interleaved, scoring.softcap, begin, range.end, scores);
        Lanes inverse[QUERIES];
        for (int q = 0; q < QUERIES; q++)
            inverse[q] = set(1.0f / softmax(head, q, queries[q], begin, scores + q * PAGE));
        int i = 0;
        for (; i + PARTS * LANES <= head.dim; i += PARTS * LANES)
            mix<PARTS>(head, queries, scores, inverse, range, i);
        for (; i < head.dim; i += LANES) mix<1>(head, queries, scores, inverse, range, i);
    }

private:
    using Products = CachedProducts<Element>;
    using Factor = typename Products::Factor;
    static constexpr int STEP = Products::STEP;
    static constexpr int ALL = (1 << STEP) - 1;  // elements of a step, as bits
    static constexpr int PARTS = QUERIES > 4 ? MAX_PARTS / 2 : MAX_PARTS;

    // scores [pages][QUERIES][16]: -inf at positions that a query doesn't attend to.
    static void score(const KVHead<Element>& head, const Query* queries, const Factor* interleaved, float softcap,
                      int64_t begin, int64_t longest, float* scores) {
        const int dim = head.dim;
        for (int64_t at = begin; at < std::min<int64_t>(longest, begin + PREFETCH_AHEAD); at += PAGE)
            prefetch<1>(head.keys(at), PAGE * dim);
        for (int64_t at = begin; at < longest; at += PAGE) {
            const Element *keys = head.keys(at), *values = head.values(at);
            const Element* later = head.keys(std::min(at + PREFETCH_AHEAD, longest - 1));
            Lanes sums[QUERIES][2];
            for (auto& s : sums) s[0] = s[1] = set(0.0f);
            const Factor* factors = interleaved;
            for (int i = 0; i < dim; i += 2 * STEP, factors += 2 * QUERIES) {
                prefetch<1>(later + i * PAGE, 2 * STEP * PAGE);
                if (at < begin + PREFETCHED_WITH_KEYS) prefetch<2>(values + i * PAGE, 2 * STEP * PAGE);  // for `mix`
                for (int s = 0; s < 2; s++) {
                    const auto key = Products::values(keys + (i + s * STEP) * PAGE);
                    for (int q = 0; q < QUERIES; q++)
                        sums[q][s] = Products::add(sums[q][s], key, factors[s * QUERIES + q]);
                }
            }
            for (int q = 0; q < QUERIES; q++) {
                Lanes s = sums[q][0] + sums[q][1];
                if constexpr (KVHead<Element>::SCALED) s = s * load(head.key_scales(at));
                if (OPTIONS && softcap > 0) s = soft_cap(s, softcap);
                store(scores + at * QUERIES + q * PAGE, attended<OPTIONS>(queries[q], at, s, -INFINITY));
            }
        }
    }

    // Scores to weights in place, as factors, and return the sum of what they are rounded to. The weights of int8 values
    // include the values' scales.
    static float softmax(const KVHead<Element>& head, int q, const Query& query, int64_t begin, float* scores) {
        const int64_t length = query.length;
        const int share = PAGE * head.dim / QUERIES;  // part of a page's values that this query prefetches
        Lanes top = set(-INFINITY), total = set(0.0f);
        for (int64_t at = begin; at < length; at += PAGE) top = max(top, load(scores + at * QUERIES));
        const Lanes highest = set(largest_lane(top));
        for (int64_t at = begin; at < length; at += PAGE) {
            Factor* factors = reinterpret_cast<Factor*>(scores + at * QUERIES);
            Lanes weights = attended<OPTIONS>(query, at, exp(load(scores + at * QUERIES) - highest), 0.0f);
            if constexpr (!KVHead<Element>::SCALED) weights = Products::convert(weights, factors);
            total = total + weights;
            if (at >= begin + PREFETCHED_WITH_KEYS) prefetch<2>(head.values(at) + q * share, share);
            if constexpr (KVHead<Element>::SCALED) store(factors, weights * load(head.value_scales(at)));
        }
        return sum(total);
    }

    // The dimensions from i on, COUNT · 16 of them.
    template <int COUNT>
    static void mix(const KVHead<Element>& head, const Query* queries, const float* weights, const Lanes* inverse,
                    const AttendedRange& range, int i) {
        const int64_t begin = OPTIONS ? range.begin : 0, longest = range.end;
        Lanes mixed[QUERIES][COUNT];
        for (auto& m : mixed)
            for (auto& part : m) part = set(0.0f);
        // attended_bits(q): bit p is set if the query attends to position p of the step.
        auto add = [&](const Element* value, const float* weight, int step, auto attended_bits) {
            for (int j = 0; j < COUNT; j++) {
                const auto values = Products::values(value + (step * head.dim + j * LANES) * STEP);
                for (int q = 0; q < QUERIES; q++) {
                    const Factor& factor = reinterpret_cast<const Factor*>(weight + q * PAGE)[step];
                    if (const int bits = attended_bits(q); bits == ALL)
                        mixed[q][j] = Products::add(mixed[q][j], values, factor);
                    else if (bits)
                        mixed[q][j] = Products::add(mixed[q][j], Products::keep(values, bits), factor);
                }
            }
        };
        for (int64_t at = begin; at < longest; at += PAGE) {
            const Element* value = head.values(at) + i * STEP;
            const Element* later = head.values(std::min(at + PREFETCH_AHEAD, longest - 1)) + i * STEP;
            const float* weight = weights + at * QUERIES;
            const int end = (count_below(longest, at) + STEP - 1) / STEP;
            const int all_from = OPTIONS ? std::min((count_below(range.shared_begin, at) + STEP - 1) / STEP, end) : 0;
            const int all_to = std::max(count_below(range.shared_end, at) / STEP, all_from);
            auto add_to_some = [&](int step) {
                add(value, weight, step, [&](int q) {
                    int bits = 0;
                    for (int64_t p = 0; p < STEP; p++) {
                        const int64_t position = at + step * STEP + p;
                        const bool started = !OPTIONS || position >= queries[q].start;
                        bits |= (started && position < queries[q].length) << p;
                    }
                    return bits;
                });
            };
            for (int step = 0; step < all_from; step++) add_to_some(step);
            for (int step = all_from; step < all_to; step++) {
                prefetch<1>(later + step * STEP * head.dim, STEP * COUNT * LANES);
                add(value, weight, step, [](int) { return ALL; });
            }
            for (int step = all_to; step < end; step++) add_to_some(step);
        }
        for (int q = 0; q < QUERIES; q++)
            for (int j = 0; j < COUNT; j++) store(queries[q].result + i + j * LANES, mixed[q][j] * inverse[q]);
    }
};

// The attention of `count` queries, at most max_queries<Element>. scratch: scratch_floats of them.
template <class Element, bool OPTIONS>
inline void attend(const KVHead<Element>& head, const Query* queries, int count, const Scoring& scoring,
                   float* scratch) {
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<Element, BFloat16>) return TileAttention(head, queries, count, scoring, scratch).attend();
#endif
    with_count<REGISTER_QUERIES>(
        count, [&](auto n) { Attention<Element, n, OPTIONS>::attend(head, queries, scoring, scratch); });
}

// begin_attention: called by each thread before the attention of a phase.
// scratch_floats: for elements of any type; in registers, for the queries' factors, interleaved, and the scores of whole pages.
#ifdef __AMX_BF16__
template <class Element>
constexpr int max_queries = std::is_same_v<Element, BFloat16> ? TileAttention::QUERIES : REGISTER_QUERIES;
inline void begin_attention() { TileRegisters::begin(); }
inline int64_t scratch_floats(int64_t positions, int dim) { return TileAttention::scratch_floats(positions, dim); }
#else
template <class Element>
constexpr int max_queries = REGISTER_QUERIES;
inline void begin_attention() {}
inline int64_t scratch_floats(int64_t positions, int dim) { return REGISTER_QUERIES * (positions + dim); }
#endif
