// A Llama's decoder layers for tokens at any positions of any sequences: hidden states in, hidden states out.
//
// All widths of the buffers are padded to multiples of 64; the padding is 0.
#include "activation_functions.h"
#include "attention.h"
#include "linear.h"
#include "lora.h"
#include "quantize.h"
#include "work.h"

// A null pointer is no norm, or no RoPE.
struct Layer {
    const float *attention_norm, *attention_output_norm;  // [width]: gains of the norms before and after
    const float *query_norm, *key_norm;                   // gains of each head, or of all heads together
    Matrix query_key_value, attention_output;
    const float *mlp_norm, *mlp_output_norm;
    Matrix gate_up, down;  // gate and up in alternate blocks of 16 outputs
    Cache cache;
    const float *cosine, *sine;  // [positions][rotary / 2]
    int64_t window;              // positions that a token attends to, its own included; 0 is all
};

enum CacheType : int32_t { FLOAT32, BFLOAT16, INT8 };

// As LINEAR_LAYERS in activation_terms.py. An adapter has weights of those before the head.
enum LinearLayer { QUERY_KEY_VALUE, ATTENTION_OUTPUT, GATE_UP, DOWN, HEAD };

// Tokens in a linear layer, and their quads of columns with outliers.
struct OutlierCounts {
    int64_t tokens;
    std::atomic<int64_t> quads;
};

struct Model {
    int32_t layers, hidden, heads, kv_heads;
    int32_t head_dim, unpadded_head_dim;  // head_dim: padded to a multiple of 16
    int32_t rotary;                       // dimensions of a head that RoPE rotates
    int32_t norm_of_all_heads;            // whether query_norm and key_norm are of all heads together
    Activation activation;
    CacheType cache_type;
    float epsilon;
    Scoring scoring;
    float logits_softcap;        // 0 is none
    const int32_t* page_table;   // [slots][columns]: the page of each 16 positions of a sequence; 0 is no page
    int64_t slots, columns;
    int64_t pages;               // pages in the pool, the null page included
    int64_t positions;           // maximum positions of a sequence
    const float* norm;
    Matrix head;
    const Layer* layer;
    float *qkv, *attended, *gated;  // [room][width of each]
    float* output;                  // [room][width], of a linear layer before a norm; null if there is none
    Quantized hidden_terms, attended_terms, gated_terms;
    OutlierCounts* counts;  // [linear layers], of all decoder layers; only ever increased here
    const int32_t* adapters;  // [slots]: the adapter of each slot's sequence; 0 is none
    const Lora* loras;        // [adapters + 1][layers][HEAD]
    float* lora_shrunk;       // [room][lora_stride]
    int64_t lora_stride;
    float* scratch;  // [threads][scratch_stride]
    int64_t scratch_stride;
};

struct Tokens {
    const int64_t *slots, *positions;
    int64_t count;
};

// The KV head that a token reads and writes.
template <class Element>
static KVHead<Element> head_of(const Model& model, const Layer& layer, const Tokens& tokens, int64_t token,
                               int64_t head) {
    return {layer.cache, model.page_table + tokens.slots[token] * model.columns, head * model.pages, model.head_dim};
}

// Quantize factor(x) · x · gain of each token x, for a product with `matrix`; gain may be null. Adapters' first products
// take the same activations.
template <class Product, class Factor>
static void quantize_for(Worker& worker, const float* x, const float* gain, const Factor& factor, const Matrix& matrix,
                         const Quantized& to, int64_t count, OutlierCounts* counts, const LoraProduct* lora) {
    // Tokens that share cache lines of terms are stored by one thread.
    constexpr int64_t SIZE = Product::INTERLEAVED;
    const int64_t blocks = (count + SIZE - 1) / SIZE;
    worker.each(blocks + (lora ? lora->items() : 0), 1, [&](int64_t block, int64_t) {
        if (block >= blocks) return lora->shrink(block - blocks, x, gain, factor, to.inputs);
        const int64_t from = block * SIZE, end = std::min(from + SIZE, count);
        int64_t quads = 0;
        for (int64_t t = from; t < end; t++) {
            const float* values = x + t * to.inputs;
            quantize_token<Product>(values, gain, factor(values), matrix, to, t);
            quads += to.outliers[t];
        }
        pad_outliers(to, from, end);
        counts->quads.fetch_add(quads, std::memory_order_relaxed);
        if (from == 0) counts->tokens += count;
    });
}

template <class Factor>
static void quantize(Worker& worker, const float* x, const float* gain, const Factor& factor, const Matrix& matrix,
                     const Quantized& to, int64_t count, OutlierCounts* counts, const LoraProduct* lora) {
    if (matrix.groups)
        quantize_for<GroupProduct>(worker, x, gain, factor, matrix, to, count, counts, lora);
    else
        quantize_for<ChannelProduct>(worker, x, gain, factor, matrix, to, count, counts, lora);
}

static void quantize(Worker& worker, const float* x, const Matrix& matrix, const Quantized& to, int64_t count,
                     OutlierCounts* counts, const LoraProduct* lora) {
    quantize(worker, x, nullptr, [](const float*) { return 1.0f; }, matrix, to, count, counts, lora);
}

// What an RMSNorm multiplies a token by, before its gain. count: number of elements without padding.
static float norm_factor(const float* values, int64_t width, int64_t count, float epsilon) {
    Lanes squares = set(0.0f);
    for (int64_t i = 0; i < width; i += LANES) squares = fma(load(values + i), load(values + i), squares);
    return 1.0f / std::sqrt(sum(squares) / static_cast<float>(count) + epsilon);
}

// gain: null quantizes x itself.
static void normalize_and_quantize(Worker& worker, const Model& model, const float* x, const float* gain,
                                   const Matrix& matrix, int64_t count, OutlierCounts* counts,
                                   const LoraProduct* lora) {
    if (!gain) return quantize(worker, x, matrix, model.hidden_terms, count, counts, lora);
    const int width = model.hidden_terms.inputs;
    auto factor = [&](const float* values) { return norm_factor(values, width, model.hidden, model.epsilon); };
    quantize(worker, x, gain, factor, matrix, model.hidden_terms, count, counts, lora);
}

// finish(token, block, Lanes[2]) takes each token's product with two blocks.
template <class Product, class Finish>
static void product_of(Worker& worker, const Matrix& matrix, const Quantized& q, int64_t count, const LoraProduct* lora,
                       const Finish& finish) {
    constexpr int64_t L2_BYTES = 1 << 19;      // for the tokens of a stripe
    constexpr int64_t UNIT = 96;               // a multiple of every IntegerProduct::TOKEN_BLOCK
    const int64_t stripe = std::max(L2_BYTES / (Product::BYTES * matrix.inputs) / UNIT * UNIT, UNIT);
    const int64_t stripes = (count + stripe - 1) / stripe, pairs = matrix.outputs / (2 * OUTPUTS);
    const int64_t grain = Product::CHUNK_BYTES / Product::pair_bytes(matrix) + 1;
    Product::begin();
    worker.each(stripes * pairs, count > Product::CHUNK_TOKENS ? 1 : grain, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            const int64_t first = i / pairs * stripe;
            // The next blocks are this thread's if the others keep pace.
            const int64_t next = (i + (i + 1 < to ? 1 : worker.threads)) % pairs;
            tile<Product>(matrix, i % pairs * 2, next * 2, q, first, std::min(first + stripe, count), lora, finish);
        }
    });
}

template <class Finish>
static void product(Worker& worker, const Matrix& matrix, const Quantized& q, int64_t count, const LoraProduct* lora,
                    const Finish& finish) {
    if (matrix.groups)
        product_of<GroupProduct>(worker, matrix, q, count, lora, finish);
    else
        product_of<ChannelProduct>(worker, matrix, q, count, lora, finish);
}

static void multiply(Worker& worker, const Matrix& matrix, const Quantized& q, int64_t count, const LoraProduct* lora,
                     float* y, bool add) {
    product(worker, matrix, q, count, lora, [&](int64_t token, int64_t block, const Lanes* value) {
        float* target = y + token * matrix.outputs + block * OUTPUTS;
        for (int b = 0; b < 2; b++, target += OUTPUTS) store(target, add ? load(target) + value[b] : value[b]);
    });
}

// activation(gate) · up
template <class Function>
static void multiply_gated(Worker& worker, const Matrix& matrix, const Quantized& q, int64_t count,
                           const LoraProduct* lora, float* y, const Function& activation) {
    product(worker, matrix, q, count, lora, [&](int64_t token, int64_t block, const Lanes* value) {
        store(y + token * (matrix.outputs / 2) + block / 2 * OUTPUTS, activation(value[0]) * value[1]);
    });
}

static void multiply_gated(Worker& worker, const Model& model, const Layer& layer, int64_t count,
                           const LoraProduct* lora) {
    auto multiply = [&](const auto& activation) {
        multiply_gated(worker, layer.gate_up, model.hidden_terms, count, lora, model.gated, activation);
    };
    switch (model.activation) {
        case SILU: return multiply([](Lanes gate) { return silu(gate); });
        case GELU_TANH: return multiply([](Lanes gate) { return gelu_tanh(gate); });
    }
}

// Add the product to x; with a gain, the RMSNorm of the product.
static void multiply_and_add(Worker& worker, const Model& model, const Matrix& matrix, const Quantized& q,
                             const float* gain, int64_t count, const LoraProduct* lora, float* x) {
    if (!gain) return multiply(worker, matrix, q, count, lora, x, true);
    multiply(worker, matrix, q, count, lora, model.output, false);
    const int64_t width = matrix.outputs;
    worker.each(count, 4, [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++) {
            const float* values = model.output + t * width;
            float* target = x + t * width;
            const Lanes factor = set(norm_factor(values, width, model.hidden, model.epsilon));
            for (int64_t i = 0; i < width; i += LANES)
                store(target + i, load(target + i) + load(values + i) * factor * load(gain + i));
        }
    });
}

// RMSNorm of each query and key head, or of all of them together.
static void normalize_heads(Worker& worker, const Model& model, const Layer& layer, int64_t count) {
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
static void write_cache(Worker& worker, const Model& model, const Layer& layer, const Tokens& tokens) {
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
static int64_t run_length(const Tokens& tokens, int64_t token, int64_t limit) {
    int64_t n = 1;
    while (n < limit && token + n < tokens.count && tokens.slots[token + n] == tokens.slots[token] &&
           tokens.positions[token + n] == tokens.positions[token] + n)
        n++;
    return n;
}

template <class Element, bool OPTIONS>
static void attend_all(Worker& worker, const Model& model, const Layer& layer, const Tokens& tokens) {
    constexpr int64_t STRIPE = 16, DECODE_STRIPE = 4;  // tokens of an item, of which runs share their reads
    const int64_t dim = model.head_dim, heads_per_kv = model.heads / model.kv_heads;
    const int64_t stripe = tokens.count > 64 ? STRIPE : DECODE_STRIPE, stripes = (tokens.count + stripe - 1) / stripe;
    float* scratch = model.scratch + worker.thread * model.scratch_stride;
    worker.each(stripes * model.kv_heads, 1, [&](int64_t item, int64_t) {
        const int64_t kv_head = item % model.kv_heads;
        const int64_t begin = item / model.kv_heads * stripe, end = std::min(begin + stripe, tokens.count);
        for (int64_t first = begin; first < end;) {
            const int64_t run = run_length(tokens, first, end - first);
            const KVHead<Element> head = head_of<Element>(model, layer, tokens, first, kv_head);
            Query queries[MAX_QUERIES];
            int count = 0;
            for (int64_t i = 0; i < run * heads_per_kv; i++) {
                const int64_t token = first + i / heads_per_kv, at = (kv_head * heads_per_kv + i % heads_per_kv) * dim;
                const int64_t length = tokens.positions[token] + 1;
                queries[count++] = {model.qkv + token * layer.query_key_value.outputs + at,
                                    model.attended + token * layer.attention_output.inputs + at,
                                    layer.window > 0 ? std::max<int64_t>(length - layer.window, 0) : 0, length};
                if (count < MAX_QUERIES && i + 1 < run * heads_per_kv) continue;
                attend<Element, OPTIONS>(head, queries, count, model.scoring, scratch);
                count = 0;
            }
            first += run;
        }
    });
}

static void attend_from_cache(Worker& worker, const Model& model, const Layer& layer, const Tokens& tokens) {
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

// The first token that is outside the page table or has no page, or -1. Other functions don't check.
extern "C" int64_t find_without_page(const Model* pointer, const int64_t* slots, const int64_t* positions,
                                     int64_t count) {
    const Model& model = *pointer;
    for (int64_t t = 0; t < count; t++) {
        const int64_t slot = slots[t], position = positions[t];
        if (slot < 0 || slot >= model.slots || position < 0 || position >= model.positions) return t;
        if (model.page_table[slot * model.columns + position / PAGE] == 0) return t;
    }
    return -1;
}

// x: [tokens][width], changed in place.
extern "C" void forward(const Model* pointer, float* x, const int64_t* slots, const int64_t* positions, int64_t count,
                        int threads) {
    const Model& model = *pointer;
    const Tokens tokens{slots, positions, count};
    const LoraTokens adapted(model.loras ? count : 0, model.lora_shrunk, model.lora_stride, [&](int64_t token) {
        const int64_t adapter = model.adapters[slots[token]];
        return adapter ? model.loras + adapter * model.layers * HEAD : nullptr;
    });
    parallel(threads, [&](Worker& worker) {
        for (int l = 0; l < model.layers; l++) {
            const Layer& layer = model.layer[l];
            LoraProduct products[HEAD] = {{adapted, l * HEAD}, {adapted, l * HEAD + 1}, {adapted, l * HEAD + 2},
                                          {adapted, l * HEAD + 3}};
            auto lora = [&](LinearLayer linear) { return adapted.empty() ? nullptr : products + linear; };
            normalize_and_quantize(worker, model, x, layer.attention_norm, layer.query_key_value, count,
                                   model.counts + QUERY_KEY_VALUE, lora(QUERY_KEY_VALUE));
            multiply(worker, layer.query_key_value, model.hidden_terms, count, lora(QUERY_KEY_VALUE), model.qkv, false);
            attend_from_cache(worker, model, layer, tokens);
            quantize(worker, model.attended, layer.attention_output, model.attended_terms, count,
                     model.counts + ATTENTION_OUTPUT, lora(ATTENTION_OUTPUT));
            multiply_and_add(worker, model, layer.attention_output, model.attended_terms, layer.attention_output_norm,
                             count, lora(ATTENTION_OUTPUT), x);
            normalize_and_quantize(worker, model, x, layer.mlp_norm, layer.gate_up, count, model.counts + GATE_UP,
                                   lora(GATE_UP));
            multiply_gated(worker, model, layer, count, lora(GATE_UP));
            quantize(worker, model.gated, layer.down, model.gated_terms, count, model.counts + DOWN, lora(DOWN));
            multiply_and_add(worker, model, layer.down, model.gated_terms, layer.mlp_output_norm, count, lora(DOWN), x);
        }
    });
}

// x: [tokens][width] after the last layer. result: [tokens][head.outputs].
extern "C" void logits(const Model* pointer, const float* x, int64_t count, float* result, int threads) {
    const Model& model = *pointer;
    parallel(threads, [&](Worker& worker) {
        normalize_and_quantize(worker, model, x, model.norm, model.head, count, model.counts + HEAD, nullptr);
        if (model.logits_softcap == 0)
            return multiply(worker, model.head, model.hidden_terms, count, nullptr, result, false);
        auto capped = [&](int64_t token, int64_t block, const Lanes* value) {
            float* target = result + token * model.head.outputs + block * OUTPUTS;
            for (int b = 0; b < 2; b++) store(target + b * OUTPUTS, soft_cap(value[b], model.logits_softcap));
        };
        product(worker, model.head, model.hidden_terms, count, nullptr, capped);
    });
}

// One linear layer: x [tokens][inputs] → y [tokens][outputs]. q: room for the quantized tokens. lora: the adapter of all
// tokens, or null; shrunk: [tokens][16 · rank_blocks], room for it.
extern "C" void linear(const Matrix* matrix, const Quantized* q, const Lora* lora, float* shrunk, const float* x,
                       int64_t count, float* y, int threads) {
    OutlierCounts counts{};
    const LoraTokens tokens(count, shrunk, lora ? lora->rank_blocks * LANES : 0, [&](int64_t) { return lora; });
    const LoraProduct product{tokens, 0};
    parallel(threads, [&](Worker& worker) {
        quantize(worker, x, *matrix, *q, count, &counts, lora ? &product : nullptr);
        multiply(worker, *matrix, *q, count, lora ? &product : nullptr, y, false);
    });
}

// Norms of the heads, RoPE, cache write and attention of one layer: Model::qkv → Model::attended.
extern "C" void attention(const Model* model, int layer, const int64_t* slots, const int64_t* positions, int64_t count,
                          int threads) {
    parallel(threads, [&](Worker& worker) {
        attend_from_cache(worker, *model, model->layer[layer], Tokens{slots, positions, count});
    });
}

// weight: [any][columns], int8. source: [outputs], see pack_block. packed: outputs · inputs bytes.
extern "C" void pack(const int8_t* weight, const int32_t* source, int64_t columns, int64_t outputs, int64_t inputs,
                     uint8_t* packed, int threads) {
    parallel(threads, [&](Worker& worker) {
        worker.each(outputs / OUTPUTS, 16, [&](int64_t from, int64_t to) {
            for (int64_t block = from; block < to; block++) pack_block(weight, source, columns, inputs, block, packed);
        });
    });
}

// Pack a weight of the matrix's shape in groups: weight [any][columns], scales and offsets (or null) [any][groups].
extern "C" void pack_groups(const Matrix* matrix, const int8_t* weight, const float* scales, const float* offsets,
                            const int32_t* source, uint8_t* packed, int threads) {
    parallel(threads, [&](Worker& worker) {
        worker.each(matrix->outputs / GroupProduct::PANEL_OUTPUTS, 16, [&](int64_t from, int64_t to) {
            for (int64_t panel = from; panel < to; panel++)
                GroupProduct::pack(*matrix, weight, scales, offsets, source, panel, packed);
        });
    });
}

// Floats of Model::scratch that a thread needs.
extern "C" int64_t scratch_stride(int64_t positions, int head_dim) { return scratch_floats(positions, head_dim); }
