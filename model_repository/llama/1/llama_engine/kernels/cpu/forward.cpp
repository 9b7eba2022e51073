// A Llama's decoder layers for tokens at any positions of any sequences: hidden states in, hidden states out.
//
// `rows` are tokens. All widths of the buffers are padded to multiples of 64; the padding is 0.
#include "attention.h"
#include "linear.h"
#include "work.h"

struct Layer {
    const float* attention_norm;  // [width]
    Matrix query_key_value, attention_output;
    const float* mlp_norm;
    Matrix gate_up, down;  // gate and up in alternate blocks of 16 outputs
    Cache cache;
};

enum CacheType : int32_t { FLOAT32, BFLOAT16, INT8 };

enum LinearLayer { QUERY_KEY_VALUE, ATTENTION_OUTPUT, GATE_UP, DOWN, HEAD };

// Input rows of a linear layer, and those with two terms.
struct TermCounts {
    int64_t rows, two_terms;
};

struct Model {
    int32_t layers, hidden, heads, kv_heads;
    int32_t head_dim, rotary;  // head_dim: padded to a multiple of 16; rotary: without the padding
    CacheType cache_type;
    float epsilon, scaling;
    const int32_t* page_table;   // [slots][columns]: the page of each 16 positions of a sequence; 0 is no page
    int64_t slots, columns;
    int64_t pages;               // in the pool, the null page included
    int64_t positions;           // of a sequence
    const float *cosine, *sine;  // [positions][rotary / 2]
    const float* norm;
    Matrix head;
    const Layer* layer;
    float *qkv, *attended, *gated;  // [room][width of each]
    Quantized hidden_terms, attended_terms, gated_terms;
    TermCounts* counts;  // [linear layers], of all decoder layers; only ever increased here
    float* scratch;  // [threads][scratch_stride]
    int64_t scratch_stride;
};

struct Tokens {
    const int64_t *slots, *positions;
    int64_t rows;
};

// The KV head that a token reads and writes.
template <class Element>
static Head<Element> cached_head(const Model& m, const Layer& layer, const Tokens& tokens, int64_t row, int64_t head) {
    return {layer.cache, m.page_table + tokens.slots[row] * m.columns, head * m.pages, m.head_dim};
}

// The number of the first rows that have two terms.
static int64_t count_two(const Quantized& q, int64_t rows) {
    int64_t count = 0;
    for (int64_t r = 0; r < rows; r++) count += q.has_two[r];
    return count;
}

// Quantize factor(row) · row · gain of each row; gain may be null.
template <class Factor>
static void quantize(Worker& worker, const float* x, const float* gain, const Factor& factor, const Quantized& to,
                     int64_t rows, TermCounts* counts) {
    worker.each(rows, 4, [&](int64_t from, int64_t end) {
        for (int64_t r = from; r < end; r++) {
            const float* row = x + r * to.inputs;
            choose_terms(row, gain, factor(row), to, r);
        }
    });
    // Operands that share cache lines are mostly stored by one thread.
    constexpr int64_t GROUP = Product::INTERLEAVED;
    worker.each((rows + GROUP - 1) / GROUP, 1, [&](int64_t group, int64_t) {
        const int64_t two_rows = count_two(to, rows), from = group * GROUP, end = std::min(from + GROUP, rows);
        int64_t next_two = count_two(to, from), next_one = two_rows + from - next_two;
        for (int64_t r = from; r < end; r++)
            store_terms(x + r * to.inputs, gain, to, r, to.has_two[r] ? next_two++ : next_one++, two_rows);
        if (from > 0) return;
        counts->rows += rows;
        counts->two_terms += two_rows;
    });
}

static void normalize_and_quantize(Worker& worker, const Model& m, const float* x, const float* gain, int64_t rows,
                                   TermCounts* counts) {
    const int width = m.hidden_terms.inputs;
    auto factor = [&](const float* row) {
        Lanes squares = set(0.0f);
        for (int i = 0; i < width; i += LANES) squares = fma(load(row + i), load(row + i), squares);
        return 1.0f / std::sqrt(sum(squares) / static_cast<float>(m.hidden) + m.epsilon);
    };
    quantize(worker, x, gain, factor, m.hidden_terms, rows, counts);
}

static void quantize(Worker& worker, const float* x, const Quantized& to, int64_t rows, TermCounts* counts) {
    quantize(worker, x, nullptr, [](const float*) { return 1.0f; }, to, rows, counts);
}

// finish(row, block, Lanes[2]) takes each row's product with two blocks.
template <class Finish>
static void product(Worker& worker, const Matrix& m, const Quantized& q, int64_t rows, const Finish& finish) {
    constexpr int64_t L2_BYTES = 1 << 19;      // for the operands of a stripe
    constexpr int64_t CHUNK_BYTES = 1 << 16;   // of weights
    constexpr int64_t UNIT = 96;               // a multiple of every Product::GROUP
    // Of the most operands that these rows may have: their number isn't known before the phase begins (see `each`).
    const int64_t most = Product::operand(rows, q.limit > 0 ? rows : 0);
    const int64_t stripe = std::max(L2_BYTES / (Product::BYTES * m.inputs) / UNIT * UNIT, UNIT);
    const int64_t stripes = (most + stripe - 1) / stripe, pairs = m.outputs / (2 * OUTPUTS);
    const int64_t grain = CHUNK_BYTES / (2 * OUTPUTS * m.inputs) + 1;
    Product::begin();
    worker.each(stripes * pairs, most > Product::GROUP ? 1 : grain, [&](int64_t from, int64_t to) {
        const int64_t two_rows = count_two(q, rows), operands = Product::operand(rows, two_rows);
        for (int64_t i = from; i < to; i++) {
            const int64_t first = i / pairs * stripe;
            const int64_t next = (i + worker.threads) % pairs;  // of this thread, if the others keep pace
            tile(m, i % pairs * 2, next * 2, q, two_rows, first, std::min(first + stripe, operands), finish);
        }
    });
}

static void multiply(Worker& worker, const Matrix& m, const Quantized& q, int64_t rows, float* y, bool add) {
    product(worker, m, q, rows, [&](int64_t row, int64_t block, const Lanes* value) {
        float* target = y + row * m.outputs + block * OUTPUTS;
        for (int b = 0; b < 2; b++, target += OUTPUTS) store(target, add ? load(target) + value[b] : value[b]);
    });
}

// silu(gate) · up
static void multiply_gated(Worker& worker, const Matrix& m, const Quantized& q, int64_t rows, float* y) {
    product(worker, m, q, rows, [&](int64_t row, int64_t block, const Lanes* value) {
        Lanes gate = value[0], silu = gate / (set(1.0f) + exp(set(0.0f) - gate));
        store(y + row * (m.outputs / 2) + block / 2 * OUTPUTS, silu * value[1]);
    });
}

template <class Element>
static void write_cache(Worker& worker, const Model& m, const Layer& layer, const Tokens& tokens) {
    const int64_t dim = m.head_dim, group = m.heads / m.kv_heads, half = m.rotary / 2;
    worker.each(tokens.rows * m.kv_heads, 16, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            const int64_t row = i / m.kv_heads, head = i % m.kv_heads, position = tokens.positions[row];
            float* qkv = m.qkv + row * layer.query_key_value.outputs;
            const float *cosine = m.cosine + position * half, *sine = m.sine + position * half;
            for (int64_t h = 0; h < group; h++)
                rotate(qkv + (head * group + h) * dim, cosine, sine, static_cast<int>(half));
            float* key = qkv + (m.heads + head) * dim;
            rotate(key, cosine, sine, static_cast<int>(half));
            cached_head<Element>(m, layer, tokens, row, head).write(position, key, key + m.kv_heads * dim);
        }
    });
}

// The number of rows from `row` on, at most `limit`, at successive positions of one slot: they read the same keys and values.
static int64_t run_length(const Tokens& tokens, int64_t row, int64_t limit) {
    int64_t n = 1;
    while (n < limit && row + n < tokens.rows && tokens.slots[row + n] == tokens.slots[row] &&
           tokens.positions[row + n] == tokens.positions[row] + n)
        n++;
    return n;
}

template <class Element>
static void attend_all(Worker& worker, const Model& m, const Layer& layer, const Tokens& tokens) {
    constexpr int64_t STRIPE = 16, DECODE_STRIPE = 4;  // tokens of an item, of which runs share their reads
    const int64_t dim = m.head_dim, group = m.heads / m.kv_heads;
    const int64_t stripe = tokens.rows > 64 ? STRIPE : DECODE_STRIPE, stripes = (tokens.rows + stripe - 1) / stripe;
    float* scratch = m.scratch + worker.thread * m.scratch_stride;
    worker.each(stripes * m.kv_heads, 1, [&](int64_t item, int64_t) {
        const int64_t kv_head = item % m.kv_heads;
        const int64_t begin = item / m.kv_heads * stripe, end = std::min(begin + stripe, tokens.rows);
        for (int64_t row = begin; row < end;) {
            const int64_t run = run_length(tokens, row, end - row);
            const Head<Element> head = cached_head<Element>(m, layer, tokens, row, kv_head);
            Query queries[MAX_QUERIES];
            int count = 0;
            for (int64_t i = 0; i < run * group; i++) {
                const int64_t token = row + i / group, at = (kv_head * group + i % group) * dim;
                queries[count++] = {m.qkv + token * layer.query_key_value.outputs + at,
                                    m.attended + token * layer.attention_output.inputs + at, tokens.positions[token] + 1};
                if (count < MAX_QUERIES && i + 1 < run * group) continue;
                attend<Element>(head, queries, count, m.scaling, scratch);
                count = 0;
            }
            row += run;
        }
    });
}

static void attend_from_cache(Worker& worker, const Model& m, const Layer& layer, const Tokens& tokens) {
    auto attend = [&](auto element) {
        write_cache<decltype(element)>(worker, m, layer, tokens);
        attend_all<decltype(element)>(worker, m, layer, tokens);
    };
    switch (m.cache_type) {
        case FLOAT32: return attend(float());
        case BFLOAT16: return attend(BFloat16(0.0f));
        case INT8: return attend(int8_t());
    }
}

// The first token that is outside the page table or has no page, or -1. Other functions don't check.
extern "C" int64_t find_without_page(const Model* model, const int64_t* slots, const int64_t* positions, int64_t rows) {
    const Model& m = *model;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t slot = slots[r], position = positions[r];
        if (slot < 0 || slot >= m.slots || position < 0 || position >= m.positions) return r;
        if (m.page_table[slot * m.columns + position / PAGE] == 0) return r;
    }
    return -1;
}

// x: [rows][width], changed in place.
extern "C" void forward(const Model* model, float* x, const int64_t* slots, const int64_t* positions, int64_t rows,
                        int threads) {
    const Model& m = *model;
    const Tokens tokens{slots, positions, rows};
    parallel(threads, [&](Worker& worker) {
        for (int l = 0; l < m.layers; l++) {
            const Layer& layer = m.layer[l];
            normalize_and_quantize(worker, m, x, layer.attention_norm, rows, m.counts + QUERY_KEY_VALUE);
            multiply(worker, layer.query_key_value, m.hidden_terms, rows, m.qkv, false);
            attend_from_cache(worker, m, layer, tokens);
            quantize(worker, m.attended, m.attended_terms, rows, m.counts + ATTENTION_OUTPUT);
            multiply(worker, layer.attention_output, m.attended_terms, rows, x, true);
            normalize_and_quantize(worker, m, x, layer.mlp_norm, rows, m.counts + GATE_UP);
            multiply_gated(worker, layer.gate_up, m.hidden_terms, rows, m.gated);
            quantize(worker, m.gated, m.gated_terms, rows, m.counts + DOWN);
            multiply(worker, layer.down, m.gated_terms, rows, x, true);
        }
    });
}

// x: [rows][width] after the last layer. result: [rows][head.outputs].
extern "C" void logits(const Model* model, const float* x, int64_t rows, float* result, int threads) {
    const Model& m = *model;
    parallel(threads, [&](Worker& worker) {
        normalize_and_quantize(worker, m, x, m.norm, rows, m.counts + HEAD);
        multiply(worker, m.head, m.hidden_terms, rows, result, false);
    });
}

// One linear layer: x [rows][inputs] → y [rows][outputs]. q: room for the quantized rows.
extern "C" void linear(const Matrix* matrix, const Quantized* q, const float* x, int64_t rows, float* y, int threads) {
    TermCounts counts{};
    parallel(threads, [&](Worker& worker) {
        quantize(worker, x, *q, rows, &counts);
        multiply(worker, *matrix, *q, rows, y, false);
    });
}

// RoPE, cache write and attention of one layer: Model::qkv → Model::attended.
extern "C" void attention(const Model* model, int layer, const int64_t* slots, const int64_t* positions, int64_t rows,
                          int threads) {
    parallel(threads, [&](Worker& worker) {
        attend_from_cache(worker, *model, model->layer[layer], Tokens{slots, positions, rows});
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

// Floats of Model::scratch that a thread needs.
extern "C" int64_t scratch_stride(int64_t positions, int head_dim) { return scratch_floats(positions, head_dim); }
