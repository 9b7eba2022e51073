// Attention of each token over its own positions, from a KV cache of floats, bfloat16 or int8.
//
// Keys are cached transposed in blocks of 16 positions, so that 16 scores are one register:
//
//     keys    [slot][KV head][position / 16][head dim][16]
//     values  [slot][KV head][position][head dim]
//     scales  [slot][KV head][position], of int8 keys and of int8 values
//
// A token's result depends on its own positions alone, in the order 0 … p: alone or in a batch, in a prefill of any cut or
// a decode step, it is the same bits.
#pragma once
#include <type_traits>

#include "lanes.h"
#include "prefetch.h"

constexpr int BLOCK = 16;  // positions

struct Cache {  // of a layer
    void *keys, *values;
    float *key_scales, *value_scales;  // null unless int8
};

// One KV head of one slot.
template <class Element>
struct Head {
    static constexpr bool SCALED = std::is_same_v<Element, int8_t>;
    Element *keys, *values;
    float *key_scales, *value_scales;
    int dim;

    // index: slot · KV heads + KV head.
    Head(const Cache& cache, int64_t index, int64_t positions, int dim)
        : keys(static_cast<Element*>(cache.keys) + index * positions * dim),
          values(static_cast<Element*>(cache.values) + index * positions * dim),
          key_scales(cache.key_scales + (SCALED ? index * positions : 0)),
          value_scales(cache.value_scales + (SCALED ? index * positions : 0)),
          dim(dim) {}

    void write(int64_t position, const float* key, const float* value) const {
        Element* to = keys + position / BLOCK * BLOCK * dim + position % BLOCK;
        if constexpr (SCALED) {
            key_scales[position] = quantize(key, [&](int i, Lanes q) {
                int8_t lane[LANES];
                // GCC 12 has miscompiled such a copy: the kernels' trial at load compares cached keys with a reference.
                store(lane, q);
                for (int j = 0; j < LANES; j++) to[(i + j) * BLOCK] = lane[j];
            });
            value_scales[position] = quantize(value, [&](int i, Lanes q) { store(values + position * dim + i, q); });
        } else {
            for (int i = 0; i < dim; i++) {
                to[i * BLOCK] = Element(key[i]);
                values[position * dim + i] = Element(value[i]);
            }
        }
    }

private:
    // Quantize to put(i, 16 integers) and return the scale: NaN if an element isn't finite.
    template <class Put>
    float quantize(const float* x, const Put& put) const {
        const Range range(dim, 1.0f, [&](int i) { return load(x + i); });
        for (int i = 0; i < dim; i += LANES) put(i, round(range.scaled(load(x + i))));
        return range.finite ? range.largest / 127.0f : NAN;
    }
};

// Rotate a head by its position (RoPE). cosine, sine: [half].
inline void rotate(float* __restrict head, const float* __restrict cosine, const float* __restrict sine, int half) {
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cosine[i] - b * sine[i];
        head[half + i] = b * cosine[i] + a * sine[i];
    }
}

#ifdef __AVX512F__
constexpr int MAX_QUERIES = 8;  // of one call of `attend`; bounded by the registers
constexpr int MAX_PARTS = 4;    // lanes of a value at a time
#else
constexpr int MAX_QUERIES = 2;
constexpr int MAX_PARTS = 2;
#endif

// A query head of a token: attends positions 0 … length - 1.
struct Query {
    const float* query;  // [dim]
    float* result;       // [dim]
    int64_t length;
};

// Floats of scratch that `attend` needs: the queries, interleaved, and the scores of whole blocks.
inline int64_t scratch_floats(int64_t positions, int dim) { return MAX_QUERIES * (positions + dim); }

template <class Element, int QUERIES>
class Attention {
public:
    // scratch: see `scratch_floats`.
    static void attend(const Head<Element>& head, const Query* queries, float scaling, float* scratch) {
        int64_t longest = 0;
        float* interleaved = scratch;
        float* scores = scratch + QUERIES * head.dim;
        for (int q = 0; q < QUERIES; q++) {
            for (int i = 0; i < head.dim; i++) interleaved[i * QUERIES + q] = queries[q].query[i] * scaling;
            longest = std::max(longest, queries[q].length);
        }
        score(head, queries, interleaved, longest, scores);
        Lanes inverse[QUERIES];
        for (int q = 0; q < QUERIES; q++) inverse[q] = set(1.0f / softmax(head, queries[q].length, scores + q * BLOCK));
        int i = 0;
        for (; i + PARTS * LANES <= head.dim; i += PARTS * LANES)
            mix<PARTS>(head, queries, scores, inverse, longest, i);
        for (; i < head.dim; i += LANES) mix<1>(head, queries, scores, inverse, longest, i);
    }

private:
    static constexpr int PARTS = QUERIES > 4 ? MAX_PARTS / 2 : MAX_PARTS;

    // scores [blocks][QUERIES][16]; of positions beyond a query's length, -inf.
    static void score(const Head<Element>& head, const Query* queries, const float* interleaved, int64_t longest,
                      float* scores) {
        const int dim = head.dim;
        for (int64_t at = 0; at < longest; at += BLOCK) {
            const Element* block = head.keys + at * dim;
            prefetch(head.values + at * dim, BLOCK * dim);  // for `mix`
            Lanes sums[QUERIES][2];
            for (auto& s : sums) s[0] = s[1] = set(0.0f);
            for (int i = 0; i < dim; i += 2) {
                Lanes even = load(block + i * BLOCK), odd = load(block + (i + 1) * BLOCK);
                for (int q = 0; q < QUERIES; q++) {
                    sums[q][0] = fma(set(interleaved[i * QUERIES + q]), even, sums[q][0]);
                    sums[q][1] = fma(set(interleaved[(i + 1) * QUERIES + q]), odd, sums[q][1]);
                }
            }
            for (int q = 0; q < QUERIES; q++) {
                Lanes s = sums[q][0] + sums[q][1];
                if constexpr (Head<Element>::SCALED) s = s * load(head.key_scales + at);
                store(scores + at * QUERIES + q * BLOCK, first(count_below(queries[q].length, at), s, set(-INFINITY)));
            }
        }
    }

    // Scores to weights in place, and return their sum. The weights of int8 values include the values' scales.
    static float softmax(const Head<Element>& head, int64_t length, float* scores) {
        Lanes top = set(-INFINITY), total = set(0.0f);
        for (int64_t at = 0; at < length; at += BLOCK) top = max(top, load(scores + at * QUERIES));
        const Lanes highest = set(largest_lane(top));
        for (int64_t at = 0; at < length; at += BLOCK) {
            Lanes weights = first(count_below(length, at), exp(load(scores + at * QUERIES) - highest), set(0.0f));
            total = total + weights;
            if constexpr (Head<Element>::SCALED) weights = weights * load(head.value_scales + at);
            store(scores + at * QUERIES, weights);
        }
        return sum(total);
    }

    // The dimensions from i on, COUNT · 16 of them.
    template <int COUNT>
    static void mix(const Head<Element>& head, const Query* queries, const float* weights, const Lanes* inverse,
                    int64_t longest, int i) {
        Lanes mixed[QUERIES][COUNT];
        for (auto& m : mixed)
            for (auto& part : m) part = set(0.0f);
        int64_t shared = longest;
        for (int q = 0; q < QUERIES; q++) shared = std::min(shared, queries[q].length);
        auto add = [&](int64_t p, auto includes) {
            const Element* value = head.values + p * head.dim + i;
            const float* weight = weights + p / BLOCK * BLOCK * QUERIES + p % BLOCK;
            Lanes v[COUNT];
            for (int j = 0; j < COUNT; j++) v[j] = load(value + j * LANES);
            for (int q = 0; q < QUERIES; q++)
                if (includes(q))
                    for (int j = 0; j < COUNT; j++) mixed[q][j] = fma(set(weight[q * BLOCK]), v[j], mixed[q][j]);
        };
        for (int64_t p = 0; p < shared; p++) add(p, [](int) { return true; });
        for (int64_t p = shared; p < longest; p++) add(p, [&](int q) { return p < queries[q].length; });
        for (int q = 0; q < QUERIES; q++)
            for (int j = 0; j < COUNT; j++) store(queries[q].result + i + j * LANES, mixed[q][j] * inverse[q]);
    }

    // The number of the 16 positions from `at` on that lie below `length`.
    static int count_below(int64_t length, int64_t at) {
        return static_cast<int>(std::clamp<int64_t>(length - at, 0, BLOCK));
    }
};

template <class Element>
inline void attend(const Head<Element>& head, const Query* queries, int count, float scaling, float* scratch) {
    with_count<MAX_QUERIES>(
        count, [&](auto n) { Attention<Element, decltype(n)::value>::attend(head, queries, scaling, scratch); });
}
