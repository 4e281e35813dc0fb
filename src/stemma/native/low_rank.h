// Adapters (LoRA): what they add to a product's outputs, y += scale * (x down^T) up^T, for the rows they serve.
//
// All adapters of a step go through each phase together, so its cost in waiting doesn't grow with their number.
// The base product isn't touched, and a row's addition has one order of sums, whatever rows are beside it.
#pragma once

#include <initializer_list>
#include <vector>

#include "products.h"

struct LowRankArgs {
    Strips down, up;  // [rank, k] and [n, rank]; up.n is 0 where the adapter leaves a product alone
    float scale;
};

// With latents: query is what makes the query or its latent, key what makes the token's latent. Of a recurrent layer and
// one with gates, query adds to all that reads the hidden states
struct AdapterLayerArgs {
    LowRankArgs query, key, value, expand, output, gate, up, down;
};

// Rows [begin, end) of a step, and those of its logits, served by one adapter. Those of a step don't overlap.
struct AdapterRowsArgs {
    const AdapterLayerArgs* layers;  // [num_layers]
    int64_t begin, end, first_logit, last_logit;
};

// A product that adapters may add to: its outputs begin `offset` elements into a row.
struct AdaptedProduct {
    LowRankArgs AdapterLayerArgs::*pair;
    int64_t offset;
};

constexpr int MAX_ADAPTED_AT_ONCE = 3;  // query, key and value, which read the same rows

template <class T>
class LowRankStep {
  public:
    // Divides `room`; `bytes` says how much is needed. `k`: the widest rows that are read.
    LowRankStep(const AdapterRowsArgs* adapters, int num_adapters, int num_layers, int64_t k, char* room)
        : adapters_(adapters), num_adapters_(num_adapters) {
        int64_t rank = 0;
        for (int g = 0; g < num_adapters; g++)
            for (int l = 0; l < num_layers; l++)
                for (auto pair : ALL) rank = std::max(rank, (adapters[g].layers[l].*pair).down.n);
        const int64_t blocks = PASS_ROWS / 16 + num_adapters, jobs = MAX_ADAPTED_AT_ONCE * blocks;
        inputs_ = room;
        middles_ = inputs_ + aligned(blocks * 16 * bytes_of_input_row<T>(k));
        middle_inputs_ = middles_ + jobs * aligned(16 * rank * int64_t(sizeof(T)));
        bytes = num_adapters == 0 ? 0 : middle_inputs_ + jobs * aligned(16 * bytes_of_input_row<T>(rank)) - room;
    }
    int64_t bytes;

    bool touches(int layer, LowRankArgs AdapterLayerArgs::*pair) const {
        for (int g = 0; g < num_adapters_; g++)
            if ((adapters_[g].layers[layer].*pair).up.n > 0) return true;
        return false;
    }

    // Add to y[row * y_stride + offset ..] of the adapters' rows among `rows` rows from `first` on, of which x and y
    // are the first; `of_logits`: rows are those of logits. Called by all members of the team.
    void add(Team& team, int member, int layer, std::initializer_list<AdaptedProduct> products, bool of_logits,
             const T* x, int64_t x_stride, int64_t first, int64_t rows, T* y, int64_t y_stride) const {
        if (num_adapters_ == 0) return;
        static thread_local std::vector<Job> jobs;
        for (int64_t pass = 0; pass < rows; pass += PASS_ROWS) {
            const int64_t count = std::min(PASS_ROWS, rows - pass);
            find_jobs(jobs, layer, products, of_logits, first + pass, count);
            if (jobs.empty()) continue;  // every member finds the same
            run(team, member, jobs, x + pass * x_stride, x_stride, y + pass * y_stride, y_stride);
        }
    }

  private:
    using Layer = AdapterLayerArgs;
    static constexpr LowRankArgs Layer::*ALL[] = {&Layer::query,  &Layer::key,  &Layer::value, &Layer::expand,
                                                  &Layer::output, &Layer::gate, &Layer::up,    &Layer::down};

    struct Job {  // one pair over one adapter's rows of a pass
        const LowRankArgs* pair;
        int64_t row, rows, offset;
        int64_t input_block;  // where these rows are laid out, in blocks of 16; the same for all products of an adapter
        bool lays_out;
        char *middle, *middle_inputs;
    };

    const AdapterRowsArgs* adapters_;
    const int num_adapters_;
    char *inputs_, *middles_, *middle_inputs_;

    // Lines of 16 outputs: the pieces that a pair's products are cut into. Those beyond a small rank are skipped.
    static int64_t lines_of(const Strips& w) { return (w.n + 15) / 16; }
    static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    void find_jobs(std::vector<Job>& jobs, int layer, std::initializer_list<AdaptedProduct> products, bool of_logits,
                   int64_t first, int64_t count) const {
        jobs.clear();
        int64_t input_block = 0;
        char *middle = middles_, *middle_inputs = middle_inputs_;
        for (int g = 0; g < num_adapters_; g++) {
            const AdapterRowsArgs& a = adapters_[g];
            const int64_t begin = std::max(of_logits ? a.first_logit : a.begin, first);
            const int64_t end = std::min(of_logits ? a.last_logit : a.end, first + count);
            if (begin >= end) continue;
            const int64_t blocks = (end - begin + 15) / 16;
            bool lays_out = true;
            for (const AdaptedProduct& product : products) {
                const LowRankArgs& pair = a.layers[layer].*product.pair;
                if (pair.up.n == 0) continue;
                jobs.push_back({&pair, begin - first, end - begin, product.offset, input_block, lays_out, middle,
                                middle_inputs});
                lays_out = false;
                middle += blocks * aligned(16 * pair.down.n * int64_t(sizeof(T)));
                middle_inputs += blocks * aligned(16 * bytes_of_input_row<T>(pair.down.n));
            }
            input_block += blocks;
        }
    }

    // Share all pieces of all jobs: body(job, piece of the job).
    template <class Count, class Body>
    static void share_jobs(Team& team, int member, const std::vector<Job>& jobs, Count&& count, Body&& body) {
        int64_t total = 0;
        for (const Job& job : jobs) total += count(job);
        team.share(member, total, [&](int64_t piece) {
            const Job* job = jobs.data();
            for (int64_t num; piece >= (num = count(*job)); job++) piece -= num;
            body(*job, piece);
        });
    }

    void run(Team& team, int member, const std::vector<Job>& jobs, const T* x, int64_t x_stride, T* y,
             int64_t y_stride) const {
        const int64_t k = jobs[0].pair->down.k;  // all products of a call read the same rows
        const int64_t row_bytes = bytes_of_input_row<T>(k);
        auto inputs_of = [&](const Job& job) -> Inputs {
            if (row_bytes == 0) return {(const char*)(x + job.row * x_stride), x_stride * int64_t(sizeof(T))};
            return {inputs_ + job.input_block * 16 * row_bytes, row_bytes};
        };
        if (row_bytes > 0)
            share_jobs(
                team, member, jobs, [](const Job& job) { return job.lays_out ? (job.rows + 15) / 16 : 0; },
                [&](const Job& job, int64_t block) {
                    lay_out_block(job.pair->down, x + job.row * x_stride, x_stride, job.rows, block,
                                  (char*)inputs_of(job).at);
                });
        share_jobs(
            team, member, jobs, [](const Job& job) { return lines_of(job.pair->down); },
            [&](const Job& job, int64_t piece) {
                const Strips& down = job.pair->down;
                multiply_piece<T>(down, piece, LINES, inputs_of(job), job.rows, (T*)job.middle, down.n);
            });
        auto middles_of = [&](const Job& job) -> Inputs {
            const int64_t rank = job.pair->down.n, bytes = bytes_of_input_row<T>(rank);
            if (bytes == 0) return {job.middle, rank * int64_t(sizeof(T))};
            return {job.middle_inputs, bytes};
        };
        if (row_bytes > 0)
            share_jobs(
                team, member, jobs, [](const Job& job) { return (job.rows + 15) / 16; },
                [&](const Job& job, int64_t block) {
                    lay_out_block(job.pair->up, (const T*)job.middle, job.pair->down.n, job.rows, block,
                                  job.middle_inputs);
                });
        share_jobs(
            team, member, jobs, [](const Job& job) { return lines_of(job.pair->up); },
            [&](const Job& job, int64_t piece) {
                add_piece(*job.pair, piece, middles_of(job), job.rows, y + job.row * y_stride + job.offset, y_stride);
            });
    }

    static void add_piece(const LowRankArgs& pair, int64_t piece, const Inputs& middles, int64_t rows, T* y,
                          int64_t stride) {
        alignas(64) float acc[BLOCK_ROWS * STRIP];
        const v16f scale = splat(pair.scale);
        for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
            const int count = int(std::min<int64_t>(BLOCK_ROWS, rows - first));
            const Outputs o = dot_piece<T>(pair.up, piece, LINES, middles, first, count, acc);
            for (int r = 0; r < count; r++) {
                const float* sums = acc + r * STRIP;
                T* out = y + (first + r) * stride + o.begin;
                int i = 0;
                for (; i + LANES <= o.width; i += LANES) store(out + i, fma(load(sums + i), scale, load(out + i)));
                for (; i < o.width; i++) out[i] = from_float<T>(std::fma(sums[i], pair.scale, to_float(out[i])));
            }
        }
    }
};
