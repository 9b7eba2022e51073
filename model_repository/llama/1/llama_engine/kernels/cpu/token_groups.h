// Quantized::terms in groups of tokens, and their integer products in registers: AVX2's and AVX512-VNNI's.
//
// The products of a group read it from beginning to end:
//
//     group of 8 tokens          32 bytes: 8 tokens × 4 inputs (AVX2: 24 bytes: 6 tokens × 2 inputs of 16 bits)
//       inputs 0…3      t0: k0 k1 k2 k3 | t1: k0 k1 k2 k3 | … | t7: k0 k1 k2 k3
//       inputs 4…7      t0: k4 k5 k6 k7 | …
//
// `Set` is an instruction set, a struct of
//   GROUP                               tokens of a group, whose sums registers hold
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
template <class Set>
inline void store_in_group(const Quantized& to, int64_t token, int i, Lanes value) {
    using Term = typename Set::Term;
    Term q[LANES], *target = reinterpret_cast<Term*>(to.terms) + token / Set::GROUP * Set::GROUP * to.inputs;
    store(q, value);
    for (int k = 0; k < LANES; k += Set::INPUTS)
        std::memcpy(target + (i + k) * Set::GROUP + token % Set::GROUP * Set::INPUTS, q + k,
                    Set::INPUTS * sizeof(Term));
}

// result [COUNT][2] = the sums of COUNT tokens of a group over `inputs` inputs, with the outputs whose packed weights
// begin at `first` and those at `second`. Not inlined: in `products` GCC keeps AVX2's sums in memory, which takes half as long again.
template <class Set, int COUNT>
__attribute__((noinline)) static void sum_products(const uint8_t* first, const uint8_t* second,
                                                   const typename Set::Term* group, int64_t inputs, Prefetch next,
                                                   typename Set::Sums* result) {
    using Sums = typename Set::Sums;
    Sums sums[COUNT][2];
    unrolled<COUNT>([&](auto r) { sums[r][0] = sums[r][1] = Sums{}; });
    for (int64_t k = 0; k < inputs; k += Set::INPUTS, group += Set::INPUTS * Set::GROUP, next.advance()) {
        next.fetch();
        const Sums w0 = Set::load_weights(first + k * OUTPUTS), w1 = Set::load_weights(second + k * OUTPUTS);
        unrolled<COUNT>([&](auto r) {
            int32_t four;
            std::memcpy(&four, group + r * Set::INPUTS, 4);
            const Sums terms = Set::broadcast(four);
            sums[r][0] = Set::add_products(sums[r][0], w0, terms);
            sums[r][1] = Set::add_products(sums[r][1], w1, terms);
        });
    }
    unrolled<COUNT>([&](auto r) {
        result[2 * r] = sums[r][0];
        result[2 * r + 1] = sums[r][1];
    });
}
