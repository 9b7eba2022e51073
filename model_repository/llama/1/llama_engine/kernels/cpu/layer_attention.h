// The attention of a layer: norms of the heads, RoPE, new keys and values into the cache, and each token's attention from it.
#pragma once
#include "attention.h"
#include "model.h"
#include "work.h"

// The KV head that a token reads and writes.
template <class Element>
inline KVHead<Element> head_of(const Model& model, const Layer& layer, const Tokens& tokens, int64_t token,
                               int64_t head) {
    return {layer.cache, model.page_table + tokens.slots[token] * model.columns, head * model.pages, model.head_dim};
}

// RMSNorm of each query and key head, or of all of them together.
inline void normalize_heads(Worker& worker, const Model& model, const Layer& layer, int64_t count) {
    if (!layer.query_norm) return;
    auto normalize = [&](float* x, int64_t heads, const float* gain) {
        const int64_t together = model.norm_of_all_heads ? heads : 1, width = together * model.head_dim;
        for (int64_t h = 0; h < heads; h += together, x += width) {
            const Lanes factor = set(norm_factor(x, width, together * model.unpadded_head_dim, model.epsilon));
            for (int64_t i = 0; i < width; i += LANES) store(x + i, load(x + i) * factor * load(gain + i));
        }
    };
    worker.each(count, 4, [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++) {
            float* qkv = model.qkv + t * layer.query_key_value.outputs;
            normalize(qkv, model.heads, layer.query_norm);
            normalize(qkv + model.heads * model.head_dim, model.kv_heads, layer.key_norm);
        }
    });
}

template <class Element>
inline void write_cache(Worker& worker, const Model& model, const Layer& layer, const Tokens& tokens) {
    const int64_t dim = model.head_dim, heads_per_kv = model.heads / model.kv_heads, half = model.rotary / 2;
    worker.each(tokens.count * model.kv_heads, 16, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            const int64_t token = i / model.kv_heads, head = i % model.kv_heads, position = tokens.positions[token];
            float* qkv = model.qkv + token * layer.query_key_value.outputs;
            float* key = qkv + (model.heads + head) * dim;
            if (layer.cosine) {
                const float *cosine = layer.cosine + position * half, *sine = layer.sine + position * half;
                for (int64_t h = 0; h < heads_per_kv; h++)
                    rotate(qkv + (head * heads_per_kv + h) * dim, cosine, sine, static_cast<int>(half));
                rotate(key, cosine, sine, static_cast<int>(half));
            }
            head_of<Element>(model, layer, tokens, token, head).write(position, key, key + model.kv_heads * dim);
        }
    });
}

// The number of tokens from `token` on, at most `limit`, at successive positions of one slot:
// they read the same keys and values.
inline int64_t run_length(const Tokens& tokens, int64_t token, int64_t limit) {
    int64_t n = 1;
    while (n < limit && token + n < tokens.count && tokens.slots[token + n] == tokens.slots[token] &&
           tokens.positions[token + n] == tokens.positions[token] + n)
        n++;
    return n;
}

template <class Element, bool OPTIONS>
inline void attend_all(Worker& worker, const Model& model, const Layer& layer, const Tokens& tokens) {
    constexpr int64_t STRIPE = 16, DECODE_STRIPE = 4;  // tokens of an item, of which runs share their reads
    const int64_t dim = model.head_dim, heads_per_kv = model.heads / model.kv_heads;
    const int64_t stripe = tokens.count > 64 ? STRIPE : DECODE_STRIPE, stripes = (tokens.count + stripe - 1) / stripe;
    float* scratch = model.scratch + worker.thread * model.scratch_stride;
    begin_attention();
    worker.each(stripes * model.kv_heads, 1, [&](int64_t item, int64_t) {
        const int64_t kv_head = item % model.kv_heads;
        const int64_t begin = item / model.kv_heads * stripe, end = std::min(begin + stripe, tokens.count);
        for (int64_t first = begin; first < end;) {
            const int64_t run = run_length(tokens, first, end - first);
            const KVHead<Element> head = head_of<Element>(model, layer, tokens, first, kv_head);
            Query queries[max_queries<Element>];
            int count = 0;
            for (int64_t i = 0; i < run * heads_per_kv; i++) {
                const int64_t token = first + i / heads_per_kv, at = (kv_head * heads_per_kv + i % heads_per_kv) * dim;
                const int64_t length = tokens.positions[token] + 1;
                queries[count++] = {model.qkv + token * layer.query_key_value.outputs + at,
                                    model.attended + token * layer.attention_output.inputs + at,
                                    layer.window > 0 ? std::max<int64_t>(length - layer.window, 0) : 0, length};
                if (count < max_queries<Element> && i + 1 < run * heads_per_kv) continue;
                attend<Element, OPTIONS>(head, queries, count, model.scoring, scratch);
                count = 0;
            }
            first += run;
        }
    });
}

inline void attend_from_cache(Worker& worker, const Model& model, const Layer& layer, const Tokens& tokens) {
    auto attend = [&](auto element) {
        using Element = decltype(element);
        write_cache<Element>(worker, model, layer, tokens);
        if (layer.window > 0 || model.scoring.softcap > 0)
            attend_all<Element, true>(worker, model, layer, tokens);
        else
            attend_all<Element, false>(worker, model, layer, tokens);
    };
    normalize_heads(worker, model, layer, tokens.count);
    switch (model.cache_type) {
        case FLOAT32: return attend(float());
        case BFLOAT16: return attend(BFloat16(0.0f));
        case INT8: return attend(int8_t());
    }
}
