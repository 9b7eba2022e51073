// The kernels that Python calls. `forward` is a Llama's decoder layers for tokens at any positions of any sequences: hidden states
// in, hidden states out.
//
// All widths of the buffers are padded to multiples of 64; the padding is 0.
#include "layer_attention.h"
#include "linear.h"
#include "model.h"
#include "quantize.h"
#include "work.h"

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
    with_product(matrix, [&](auto product) {
        quantize_for<decltype(product)>(worker, x, gain, factor, matrix, to, count, counts, lora);
    });
}

static void quantize(Worker& worker, const float* x, const Matrix& matrix, const Quantized& to, int64_t count,
                     OutlierCounts* counts, const LoraProduct* lora) {
    quantize(worker, x, nullptr, [](const float*) { return 1.0f; }, matrix, to, count, counts, lora);
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
            multiply_pair<Product>(matrix, i % pairs * 2, next * 2, q, first, std::min(first + stripe, count), lora, finish);
        }
    });
}

template <class Finish>
static void product(Worker& worker, const Matrix& matrix, const Quantized& q, int64_t count, const LoraProduct* lora,
                    const Finish& finish) {
    with_product(matrix, [&](auto product) {
        product_of<decltype(product)>(worker, matrix, q, count, lora, finish);
    });
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
        worker.each(matrix->outputs / GroupProduct<4>::PANEL_OUTPUTS, 16, [&](int64_t from, int64_t to) {
            const auto pack = matrix->bits == 4 ? GroupProduct<4>::pack : GroupProduct<8>::pack;
            for (int64_t panel = from; panel < to; panel++) pack(*matrix, weight, scales, offsets, source, panel, packed);
        });
    });
}

// Floats of Model::scratch that a thread needs.
extern "C" int64_t scratch_stride(int64_t positions, int head_dim) { return scratch_floats(positions, head_dim); }
