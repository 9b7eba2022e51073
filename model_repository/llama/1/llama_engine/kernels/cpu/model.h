// A model with its cache and scratch memory, as bindings.py fills it.
#pragma once
#include <atomic>

#include "activation_functions.h"
#include "lora.h"
#include "matrix.h"
#include "queries.h"

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
