// Gated layers: a dense one, and mixtures of experts that read routed experts alone. A token's sum over its experts
// goes in the order of its routing, whatever other tokens are routed to.
#pragma once

#include <vector>

#include "layers.h"
#include "products.h"

struct GatedWeights {  // down(silu(gate x) * up x)
    Strips gate, up, down;
};

struct MixtureArgs {
    const GatedWeights* experts;  // [num_experts], all of one shape
    int32_t num_experts, top_k;
    const void* x;                // [rows, hidden_dim]
    const int32_t* ids;           // [rows, top_k]
    const float* weights;         // [rows, top_k]
    void* output;                 // [rows, hidden_dim]
    char* room;                   // bytes_of_mixture()
    int64_t rows;
    int32_t is_bf16, threads;
};

constexpr int64_t MIXTURE_ROWS = 1024;  // rows that go through the experts at a time

// Outputs of piece `piece` of gate and up, activated and multiplied, into out[rows][stride].
template <class T>
static void gate_piece(const GatedWeights& w, int64_t piece, int parts, const Inputs& x, int64_t rows, T* out,
                       int64_t stride) {
    alignas(64) float gates[BLOCK_ROWS * STRIP], ups[BLOCK_ROWS * STRIP];
    alignas(64) T pair[2 * STRIP];
    for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
        int count = int(std::min<int64_t>(BLOCK_ROWS, rows - first));
        Outputs o = dot_piece<T>(w.gate, piece, parts, x, first, count, gates);
        dot_piece<T>(w.up, piece, parts, x, first, count, ups);
        for (int r = 0; r < count; r++) {
            put<T>(gates + r * STRIP, o.width, pair), put<T>(ups + r * STRIP, o.width, pair + o.width);
            silu_and_multiply_row(pair, out + (first + r) * stride + o.begin, o.width);
        }
    }
}

static inline char* cut_room(char*& at, int64_t bytes) {
    char* begin = at;
    at += (bytes + 63) / 64 * 64;
    return begin;
}

template <class T>
class Mixture {
  public:
    // Divides `room`; `bytes` says how much is needed.
    Mixture(const MixtureArgs& a, int64_t rows) : a_(a), hidden_(a.experts[0].down.n), inner_(a.experts[0].down.k) {
        int64_t slots = rows * a.top_k, experts = std::min<int64_t>(a.num_experts, slots);
        input_bytes_ = std::max(bytes_of_input_row<T>(a.experts[0].gate), bytes_of_input_row<T>(a.experts[0].down));
        char* at = a.room;
        starts_ = (int32_t*)cut_room(at, (a.num_experts + 1) * sizeof(int32_t));
        routed_ = (int32_t*)cut_room(at, (a.num_experts + 1) * sizeof(int32_t));
        row_of_ = (int32_t*)cut_room(at, slots * sizeof(int32_t));
        slot_of_ = (int32_t*)cut_room(at, slots * sizeof(int32_t));
        gathered_ = (T*)cut_room(at, slots * hidden_ * sizeof(T));  // later the experts' outputs
        inner_rows_ = (T*)cut_room(at, slots * inner_ * sizeof(T));
        inputs_ = cut_room(at, (slots + 16 * experts) * input_bytes_);
        bytes = at - a.room;
    }
    int64_t bytes;

    // Rows [first, first + rows). Called by all members of the team.
    void run(Team& team, int member, int64_t first, int64_t rows) {
        const T* x = (const T*)a_.x + first * hidden_;
        const int32_t* ids = a_.ids + first * a_.top_k;
        const float* weights = a_.weights + first * a_.top_k;
        team.share(member, 1, [&](int64_t) { sort(ids, rows); });
        const int32_t num_routed = routed_[a_.num_experts];
        team.share(member, num_routed, [&](int64_t i) {
            for (int32_t slot = starts_[routed_[i]]; slot < starts_[routed_[i] + 1]; slot++)
                std::memcpy(gathered_ + slot * hidden_, x + row_of_[slot] * hidden_, hidden_ * sizeof(T));
            lay_out_expert(i, &GatedWeights::gate, gathered_);
        });
        const Strips &gate = a_.experts[0].gate, &down = a_.experts[0].down;
        int parts = parts_of_strip(num_routed * gate.count(), team.size());
        int64_t pieces = gate.count() * parts;
        team.share(member, num_routed * pieces, [&](int64_t i) {
            int32_t e = routed_[i / pieces], slot = starts_[e], count = starts_[e + 1] - slot;
            Inputs in = inputs_of(i / pieces, gate, gathered_);
            gate_piece(a_.experts[e], i % pieces, parts, in, count, inner_rows_ + slot * inner_, inner_);
        });
        team.share(member, num_routed, [&](int64_t i) { lay_out_expert(i, &GatedWeights::down, inner_rows_); });
        parts = parts_of_strip(num_routed * down.count(), team.size()), pieces = down.count() * parts;
        team.share(member, num_routed * pieces, [&](int64_t i) {
            int32_t e = routed_[i / pieces], slot = starts_[e], count = starts_[e + 1] - slot;
            Inputs in = inputs_of(i / pieces, down, inner_rows_);
            multiply_piece<T>(a_.experts[e].down, i % pieces, parts, in, count, gathered_ + slot * hidden_, hidden_);
        });
        T* output = (T*)a_.output + first * hidden_;
        team.share(member, rows, [&](int64_t row) { combine(row, weights, output + row * hidden_); });
    }

  private:
    const MixtureArgs& a_;
    const int64_t hidden_, inner_;
    int64_t input_bytes_;
    int32_t *starts_, *routed_, *row_of_, *slot_of_;  // by expert; experts in use, then how many; by slot; by routing
    T *gathered_, *inner_rows_;
    char* inputs_;

    // Give every (row, expert) pair a slot: those of an expert follow each other.
    void sort(const int32_t* ids, int64_t rows) {
        int64_t slots = rows * a_.top_k;
        std::fill(starts_, starts_ + a_.num_experts + 1, 0);
        for (int64_t i = 0; i < slots; i++) starts_[ids[i] + 1]++;
        int32_t num_routed = 0;
        for (int e = 0; e < a_.num_experts; e++) {
            if (starts_[e + 1]) routed_[num_routed++] = e;
            starts_[e + 1] += starts_[e];
        }
        routed_[a_.num_experts] = num_routed;
        std::vector<int32_t> next(starts_, starts_ + a_.num_experts);
        for (int64_t i = 0; i < slots; i++) {
            slot_of_[i] = next[ids[i]]++;
            row_of_[slot_of_[i]] = int32_t(i / a_.top_k);
        }
    }

    // Routed expert i has its rows in `rows` from its first slot on, and its inputs in whole tiles of 16 rows.
    Inputs inputs_of(int64_t i, const Strips& w, const T* rows) const {
        const int64_t bytes = bytes_of_input_row<T>(w), slot = starts_[routed_[i]];
        if (bytes == 0) return {(const char*)(rows + slot * w.k), w.k * int64_t(sizeof(T))};
        return {inputs_ + (slot + 16 * i) / 16 * 16 * input_bytes_, bytes};
    }
    void lay_out_expert(int64_t i, Strips GatedWeights::*part, const T* rows) {
        const int32_t expert = routed_[i], slot = starts_[expert], count = starts_[expert + 1] - slot;
        const Strips& w = a_.experts[expert].*part;
        if (bytes_of_input_row<T>(w) == 0) return;
        char* to = (char*)inputs_of(i, w, rows).at;
        for (int64_t block = 0; block < (count + 15) / 16; block++)
            lay_out_block(w, rows + slot * w.k, w.k, count, block, to);
    }

    void combine(int64_t row, const float* weights, T* out) {
        const int k = a_.top_k;
        int64_t d = 0;
        for (; d + LANES <= hidden_; d += LANES) {
            v16f sum = splat(0.0f);
            for (int j = 0; j < k; j++) {
                const T* part = gathered_ + slot_of_[row * k + j] * hidden_ + d;
                sum += rounded<T>(load(part) * weights[row * k + j]);
            }
            store(out + d, sum);
        }
        for (; d < hidden_; d++) {
            float sum = 0;
            for (int j = 0; j < k; j++) {
                float part = to_float(gathered_[slot_of_[row * k + j] * hidden_ + d]);
                sum += to_float(from_float<T>(part * weights[row * k + j]));
            }
            out[d] = from_float<T>(sum);
        }
    }
};

// The experts of all rows, pass by pass.
template <class T>
static void run_mixture(Team& team, int member, const MixtureArgs& args) {
    Mixture<T> mixture(args, std::min(args.rows, MIXTURE_ROWS));
    for (int64_t first = 0; first < args.rows; first += MIXTURE_ROWS)
        mixture.run(team, member, first, std::min(MIXTURE_ROWS, args.rows - first));
}
template <class T>
static int64_t bytes_of_mixture(const MixtureArgs& args) {
    return Mixture<T>(args, std::min(args.rows, MIXTURE_ROWS)).bytes;
}

// The router of Qwen3-MoE: softmax over all experts' logits, the largest top_k (the first of equals), divided by
// their sum if `normalize`, and rounded to T.
template <class T>
static void route_row(const T* logits, int num_experts, int top_k, bool normalize, int32_t* ids, float* weights) {
    float top = to_float(logits[0]), total = 0, chosen = 0;
    for (int e = 1; e < num_experts; e++) top = std::max(top, to_float(logits[e]));
    for (int e = 0; e < num_experts; e++) total += std::exp(to_float(logits[e]) - top);
    for (int j = 0; j < top_k; j++) {
        int best = -1;
        for (int e = 0; e < num_experts; e++) {
            if (std::find(ids, ids + j, e) != ids + j) continue;
            if (best < 0 || to_float(logits[e]) > to_float(logits[best])) best = e;
        }
        ids[j] = best;
        chosen += std::exp(to_float(logits[best]) - top) / total;
    }
    for (int j = 0; j < top_k; j++) {
        float weight = std::exp(to_float(logits[ids[j]]) - top) / total;
        weights[j] = to_float(from_float<T>(normalize ? weight / chosen : weight));
    }
}
