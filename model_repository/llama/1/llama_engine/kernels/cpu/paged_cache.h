// The KV cache of a layer: keys and values as floats, bfloat16 or int8.
//
// It is a pool of pages of 16 positions. A sequence's pages may lie anywhere: its slot of the page table names them. Keys
// are cached transposed, so that 16 scores are one register, and STEP elements that are multiplied at a time, two of
// bfloat16 (`CachedProducts`), side by side:
//
//     keys    [KV head][page][head dim / STEP][16][STEP]
//     values  [KV head][page][16 / STEP][head dim][STEP]
//     scales  [KV head][page][16], of int8 keys and of int8 values
//
// A head's pages are adjacent, because pages at a stride of several heads would share few sets of the caches.
#pragma once
#include "cached_products.h"

constexpr int PAGE = 16;  // positions

struct Cache {  // the keys and values of a layer
    void *keys, *values;
    float *key_scales, *value_scales;  // null unless int8
};

// One KV head of one sequence.
template <class Element>
class KVHead {
public:
    static constexpr bool SCALED = std::is_same_v<Element, int8_t>;
    static constexpr int STEP = CachedProducts<Element>::STEP;
    const int dim;

    // pages: the sequence's entries of the page table. first: index of the head's first page.
    KVHead(const Cache& cache, const int32_t* pages, int64_t first, int dim)
        : dim(dim),
          first_keys(static_cast<Element*>(cache.keys) + first * PAGE * dim),
          first_values(static_cast<Element*>(cache.values) + first * PAGE * dim),
          first_key_scales(cache.key_scales + (SCALED ? first * PAGE : 0)),
          first_value_scales(cache.value_scales + (SCALED ? first * PAGE : 0)),
          pages(pages) {}

    // The start of the page that has a position.
    Element* keys(int64_t at) const { return first_keys + page(at) * PAGE * dim; }
    Element* values(int64_t at) const { return first_values + page(at) * PAGE * dim; }
    float* key_scales(int64_t at) const { return first_key_scales + page(at) * PAGE; }
    float* value_scales(int64_t at) const { return first_value_scales + page(at) * PAGE; }

    void write(int64_t position, const float* key, const float* value) const {
        const int64_t within = position % PAGE;
        Element* to_key = keys(position) + within * STEP;
        Element* to_value = values(position) + within / STEP * STEP * dim + within % STEP;
        if constexpr (SCALED) {
            key_scales(position)[within] = quantize(key, [&](int i, Lanes q) {
                int8_t lane[LANES];
                // GCC 12 has miscompiled such a copy: the kernels' self-test compares cached keys with a reference.
                store(lane, q);
                for (int j = 0; j < LANES; j++) to_key[(i + j) * PAGE] = lane[j];
            });
            value_scales(position)[within] = quantize(value, [&](int i, Lanes q) { store(to_value + i, q); });
        } else {
            for (int i = 0; i < dim; i += LANES) {
                Element keys[LANES], values[LANES];
                for (int j = 0; j < LANES; j++) keys[j] = Element(key[i + j]), values[j] = Element(value[i + j]);
                for (int j = 0; j < LANES; j += STEP) std::memcpy(to_key + (i + j) * PAGE, keys + j, STEP * sizeof(Element));
                for (int j = 0; j < LANES; j++) to_value[(i + j) * STEP] = values[j];
            }
        }
    }

private:
    Element *first_keys, *first_values;
    float *first_key_scales, *first_value_scales;
    const int32_t* pages;

    int64_t page(int64_t at) const { return pages[at / PAGE]; }

    // Quantize to put(i, 16 integers) and return the scale: NaN if an element isn't finite.
    template <class Put>
    float quantize(const float* x, const Put& put) const {
        const Range range(dim, 1.0f, [&](int i) { return load(x + i); });
        for (int i = 0; i < dim; i += LANES) put(i, round(range.scaled(load(x + i))));
        return range.finite ? range.largest / 127.0f : NAN;
    }
};
