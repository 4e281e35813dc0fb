// Threads that go through the phases of one step together. A parallel region of OpenMP for each phase costs
// microseconds to begin and to end, and a step has some 200 phases; here they spin, so a phase ends in less
// than one. Each member has a run of the phase's pieces, so that it reads on where it was; whoever is done takes
// pieces from the end of another's run: a thread that loses its core for a while holds up one piece.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <omp.h>
#include <sched.h>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

static inline void rest_a_little() {
#if defined(__SSE2__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr int SPINS_BEFORE_YIELD = 2000;  // some 20 us; then others may have the core

class Team {
  public:
    explicit Team(int size) : size_(size), runs_(size) {}

    int size() const { return size_; }

    // Member `me` does its part of body(0) .. body(count - 1), each done once, and returns when all are done.
    template <class F>
    void share(int me, int64_t count, F&& body) {
        runs_[me].set(count * me / size_, count * (me + 1) / size_);
        for (int64_t i; (i = runs_[me].take_first()) >= 0;) body(i);
        for (int other = 1; other < size_; other++)
            for (int64_t i; (i = runs_[(me + other) % size_].take_last()) >= 0;) body(i);
        wait();
    }

  private:
    // Pieces [begin, end) nobody has begun, in one word. Empty between phases, so a member that is late for a
    // phase is found to have nothing, and does its run by itself.
    class alignas(64) Run {
      public:
        void set(int64_t begin, int64_t end) { word_.store(uint64_t(begin) << 32 | end, std::memory_order_release); }
        int64_t take_first() { return take(uint64_t(1) << 32, 0); }
        int64_t take_last() { return take(-1, -1); }

      private:
        std::atomic<uint64_t> word_{0};

        int64_t take(uint64_t change, int64_t from_end) {
            uint64_t word = word_.load(std::memory_order_acquire);
            for (;;) {
                int64_t begin = word >> 32, end = word & 0xFFFFFFFF;
                if (begin >= end) return -1;
                if (word_.compare_exchange_weak(word, word + change, std::memory_order_acq_rel))
                    return from_end ? end - 1 : begin;
            }
        }
    };

    const int size_;
    std::vector<Run> runs_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};

    void wait() {
        uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++)
            spins < SPINS_BEFORE_YIELD ? rest_a_little() : (void)sched_yield();
    }
};

// Run body(team, member) on `threads` threads at once.
template <class F>
static void with_team(int threads, F&& body) {
    std::unique_ptr<Team> team;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp single  // the runtime may give fewer threads than asked for
        team = std::make_unique<Team>(omp_get_num_threads());
        body(*team, omp_get_thread_num());
    }
}
