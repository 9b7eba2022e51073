// Quantized::terms in blocks of tokens, and their integer products in registers: AVX2's and AVX512-VNNI's.
//
// The products of a token block read it from beginning to end:
//
//     block of 8 tokens          32 bytes: 8 tokens × 4 inputs (AVX2: 24 bytes, 6 tokens × 2 inputs of 16 bits, or × 4 inputs)
//       inputs 0…3      t0: k0 k1 k2 k3 | t1: k0 k1 k2 k3 | … | t7: k0 k1 k2 k3
//       inputs 4…7      t0: k4 k5 k6 k7 | …
//
// `Isa` is an instruction set, a struct of
//   TOKEN_BLOCK                         tokens of a block, whose sums registers hold
//   Term, INPUTS                        an integer of a token, and how many of them are four bytes
//   Sums                                a register of int32
//   load_weights(packed)                the weights of as many outputs
//   broadcast(four)                     four bytes of a token, for each output
//   add_products(sums, weights, terms)  the sums with the products of these added
#pragma once
#include "lanes.h"
#include "matrix.h"
#include "prefetch.h"

// Store 16 inputs of a token.
template <class Isa>
inline void store_in_block(const Quantized& to, int64_t token, int i, Lanes value) {
    using Term = typename Isa::Term;
    Term q[LANES], *block = reinterpret_cast<Term*>(to.terms) + token / Isa::TOKEN_BLOCK * Isa::TOKEN_BLOCK * to.inputs;
    store(q, value);
    for (int k = 0; k < LANES; k += Isa::INPUTS)
        std::memcpy(block + (i + k) * Isa::TOKEN_BLOCK + token % Isa::TOKEN_BLOCK * Isa::INPUTS, q + k,
                    Isa::INPUTS * sizeof(Term));
}

// result [COUNT][2] = the sums of COUNT tokens of a block over `inputs` inputs, with the outputs whose packed weights
// begin at `first` and those at `second`. Not inlined: in `products` GCC keeps AVX2's sums in memory, which takes half as long again.
template <class Isa, int COUNT>
__attribute__((noinline)) static void sum_products(const uint8_t* first, const uint8_t* second,
                                                   const typename Isa::Term* terms, int64_t inputs, Prefetch next,
                                                   typename Isa::Sums* result) {
    using Sums = typename Isa::Sums;
    Sums sums[COUNT][2];
    unrolled<COUNT>([&](auto t) { sums[t][0] = sums[t][1] = Sums{}; });
    for (int64_t k = 0; k < inputs; k += Isa::INPUTS, terms += Isa::INPUTS * Isa::TOKEN_BLOCK, next.advance()) {
        next.fetch();
        const Sums w0 = Isa::load_weights(first + k * OUTPUTS), w1 = Isa::load_weights(second + k * OUTPUTS);
        unrolled<COUNT>([&](auto t) {
            int32_t four;
            std::memcpy(&four, terms + t * Isa::INPUTS, 4);
            const Sums term = Isa::broadcast(four);
            sums[t][0] = Isa::add_products(sums[t][0], w0, term);
            sums[t][1] = Isa::add_products(sums[t][1], w1, term);
        });
    }
    unrolled<COUNT>([&](auto t) {
        result[2 * t] = sums[t][0];
        result[2 * t + 1] = sums[t][1];
    });
}
