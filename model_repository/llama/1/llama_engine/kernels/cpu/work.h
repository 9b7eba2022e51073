// The threads of one call: phases of chunks that any thread may compute.
//
// A phase begins when every chunk of the phases before is done, not when every thread has arrived. So a thread whose
// core was taken away delays the others by the one chunk that it holds, and by nothing while it holds none. Results
// don't depend on which thread computes a chunk.
#pragma once
#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

// The one function of the OpenMP runtime in use: GNU's, which LLVM's and Intel's export too. It is torch's own runtime,
// found at load, so that there is one pool of threads.
extern "C" void GOMP_parallel(void (*body)(void*), void* argument, unsigned threads, unsigned flags);

struct Progress {
    alignas(64) std::atomic<int64_t> taken{0};
    alignas(64) std::atomic<int64_t> done{0};
    alignas(64) std::atomic<int> threads{0};
};

class Worker {
public:
    explicit Worker(Progress& progress, int threads)
        : thread(progress.threads.fetch_add(1)), threads(threads), progress(progress) {}

    // Run body(from, to) for all of `items`, in chunks of at most `grain`, after all earlier phases. `items` and `grain`
    // must not depend on what a phase writes: a thread without a chunk may get here when later phases have begun, and
    // every thread must count the same chunks. `body` may read what earlier phases wrote.
    template <class Body>
    void each(int64_t items, int64_t grain, const Body& body) {
        grain = std::clamp<int64_t>(items / (CHUNKS_PER_THREAD * threads), 1, grain);
        const int64_t end = begin + (items + grain - 1) / grain;
        wait();
        for (int64_t at = progress.taken.load(std::memory_order_relaxed); at < end;) {
            if (!progress.taken.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) continue;
            const int64_t from = (at - begin) * grain;
            body(from, std::min(from + grain, items));
            progress.done.fetch_add(1, std::memory_order_release);
            at = progress.taken.load(std::memory_order_relaxed);
        }
        begin = end;
    }

    const int thread, threads;

private:
    static constexpr int CHUNKS_PER_THREAD = 4;
    static constexpr int SPINS = 2000;  // some 20 to 80 µs, more than a chunk takes on a core of its own

    void wait() const {
        for (int spins = 0; progress.done.load(std::memory_order_acquire) < begin; spins++) {
            if (spins < SPINS)
                _mm_pause();
            else
                sched_yield();
        }
    }

    Progress& progress;
    int64_t begin = 0;  // chunks of all earlier phases
};

// Run body(Worker&) on `threads` threads.
template <class Body>
inline void parallel(int threads, const Body& body) {
    struct Call {
        const Body& body;
        int threads;
        Progress progress;
    } call{body, threads, {}};
    auto run = [](void* argument) {
        Call& shared = *static_cast<Call*>(argument);
        Worker worker(shared.progress, shared.threads);
        shared.body(worker);
    };
    GOMP_parallel(run, &call, static_cast<unsigned>(threads), 0);
}
