// Threads that go through the phases of one step together. A parallel region of OpenMP for each phase costs
// microseconds to begin and to end, and a step has some 200 phases; here they spin, so a phase ends in less
// than one. Work is claimed piece by piece: a thread that loses its core for a while holds up one piece, not
// half of the phase.
#pragma once

#include <atomic>
#include <cstdint>
#include <immintrin.h>
#include <omp.h>
#include <sched.h>

constexpr int SPINS_BEFORE_YIELD = 2000;  // some 20 us; then others may have the core

class Team {
  public:
    explicit Team(int size) : size_(size) {}

    // Run body(0) .. body(count - 1), each once, by whichever member is free; return when all are done.
    template <class F>
    void share(int64_t count, F&& body) {
        for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
        wait();
    }

  private:
    const int size_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};

    void wait() {
        uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++)
            spins < SPINS_BEFORE_YIELD ? _mm_pause() : (void)sched_yield();
    }
};

// Run body(team) on `threads` threads at once.
template <class F>
static void with_team(int threads, F&& body) {
    if (threads < 2) {
        Team team(1);
        body(team);
        return;
    }
    alignas(64) char room[sizeof(Team)];
    Team* team = nullptr;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single  // the runtime may give fewer threads than asked for
        team = new (room) Team(omp_get_num_threads());
        body(*team);
    }
}
