// Gated layers: a dense one, and mixtures of experts that read routed experts alone. A token's sum over its experts
// goes in the order of its routing, whatever other tokens are routed to.
#pragma once

#include <vector>

#include "layers.h"
#include "products.h"

struct GatedWeights {  // down(silu(gate x) * up x), or as clamped_and_multiply() says
    Strips gate, up, down;
    float sharpness, limit;  // of clamped gates; 0: they are plain
    int32_t is_gelu;         // 1: gelu() instead of silu()
};

struct MixtureArgs {
    const GatedWeights* experts;  // [num_experts], all of one shape
    int32_t num_experts, top_k;
    const void* x;                // [rows, hidden_dim]
    const int32_t* ids;           // [rows, top_k]
    const float* weights;         // [rows, top_k]
    void* output;                 // [rows, hidden_dim]
    const void* added;            // [rows, hidden_dim], e.g. of experts that all tokens share; null: nothing
    char* room;                   // bytes_of_mixture()
    int64_t rows;
    int32_t is_bf16, threads;
};

constexpr int64_t MIXTURE_ROWS = 1024;  // rows that go through the experts at a time

template <class T, class X>
static inline void activate(const GatedWeights& w, const X* gate, const X* up, T* out, int64_t dim) {
    if (w.is_gelu) return activate_and_multiply(gate, up, out, dim, gelu);
    if (w.sharpness == 0.0f) return silu_and_multiply(gate, up, out, dim);
    clamped_and_multiply(gate, up, out, dim, w.sharpness, w.limit);
}

// Outputs of piece `piece` of gate and up, activated and multiplied, into out[rows][stride].
template <class T>
static void gate_piece(const GatedWeights& w, int64_t piece, int parts, const Inputs& x, int64_t rows, T* out,
                       int64_t stride) {
    alignas(64) float gates[PASS_ROWS * STRIP], ups[PASS_ROWS * STRIP];
    const int64_t most = std::min(rows_of_piece(w.gate), rows_of_piece(w.up));
    for (int64_t first = 0; first < rows; first += most) {
        int count = int(std::min(most, rows - first));
        Outputs o = dot_piece<T>(w.gate, piece, parts, x, first, count, gates);
        dot_piece<T>(w.up, piece, parts, x, first, count, ups);
        for (int r = 0; r < count; r++)
            activate(w, gates + r * STRIP, ups + r * STRIP, out + (first + r) * stride + o.begin, o.width);
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
        const T* added = a_.added ? (const T*)a_.added + first * hidden_ : nullptr;
        team.share(member, rows, [&](int64_t row) {
            combine(row, weights, added ? added + row * hidden_ : nullptr, output + row * hidden_);
        });
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

    void combine(int64_t row, const float* weights, const T* added, T* out) {
        const int k = a_.top_k;
        int64_t d = 0;
        for (; d + LANES <= hidden_; d += LANES) {
            v16f sum = splat(0.0f);
            for (int j = 0; j < k; j++) {
                const T* part = gathered_ + slot_of_[row * k + j] * hidden_ + d;
                sum += rounded<T>(load(part) * weights[row * k + j]);
            }
            store(out + d, added ? rounded<T>(sum) + load(added + d) : sum);
        }
        for (; d < hidden_; d++) {
            float sum = 0;
            for (int j = 0; j < k; j++) {
                float part = to_float(gathered_[slot_of_[row * k + j] * hidden_ + d]);
                sum += to_float(from_float<T>(part * weights[row * k + j]));
            }
            out[d] = from_float<T>(added ? to_float(from_float<T>(sum)) + to_float(added[d]) : sum);
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

enum RoutedBy : int32_t {
    ROUNDED_SOFTMAX = 0,  // Qwen3-MoE: logits in the model's type, and weights rounded to it
    SOFTMAX = 1,          // DeepSeek-V2: logits and weights are floats
    SIGMOID = 2,          // DeepSeek-V3: as above; a correction is added to scores for the choice alone
};

// How a layer chooses the experts of a token
struct Router {
    Strips weight;            // [num_experts, hidden_dim]; in floats but for ROUNDED_SOFTMAX
    const float* correction;  // [num_experts]; null: none
    int32_t num_experts;      // 0: the layer is dense
    int32_t top_k, by;        // `by`: RoutedBy
    int32_t normalize;        // divide the weights of a token by their sum
    int32_t num_groups, top_groups;  // experts outside the best groups aren't chosen; 0 groups: all may be
    float scale;                     // of the weights; not of ROUNDED_SOFTMAX
};

// The first of the largest of `count` scores that isn't among the `num_taken` ids already taken
static inline int best_of(const float* scores, int count, const int32_t* taken, int num_taken) {
    int best = -1;
    for (int e = 0; e < count; e++)
        if (std::find(taken, taken + num_taken, e) == taken + num_taken && (best < 0 || scores[e] > scores[best]))
            best = e;
    return best;
}

// Softmax over all experts' logits, the largest top_k (the first of equals), rounded to T.
template <class T>
static void route_rounded(const Router& router, const T* logits, int32_t* ids, float* weights) {
    static thread_local std::vector<float> scores;
    const int num_experts = router.num_experts;
    scores.resize(num_experts);
    for (int e = 0; e < num_experts; e++) scores[e] = to_float(logits[e]);
    const float top = *std::max_element(scores.begin(), scores.end());
    float total = 0, chosen = 0;
    for (int e = 0; e < num_experts; e++) total += std::exp(scores[e] - top);
    for (int j = 0; j < router.top_k; j++) {
        ids[j] = best_of(scores.data(), num_experts, ids, j);
        weights[j] = std::exp(scores[ids[j]] - top) / total;
        chosen += weights[j];
    }
    for (int j = 0; j < router.top_k; j++)
        weights[j] = to_float(from_float<T>(router.normalize ? weights[j] / chosen : weights[j]));
}

// The routers of DeepSeek-V2 and V3. Experts outside the best groups have the least score there is: 0 of a softmax.
static void route_by_groups(const Router& router, const float* logits, int32_t* ids, float* weights) {
    static thread_local std::vector<float> scores, choice, groups;
    static thread_local std::vector<int32_t> best;
    const int num_experts = router.num_experts;
    const bool is_softmax = router.by == SOFTMAX;
    scores.resize(num_experts), choice.resize(num_experts);
    if (is_softmax) {
        const float top = *std::max_element(logits, logits + num_experts);
        float total = 0;
        for (int e = 0; e < num_experts; e++) total += scores[e] = std::exp(logits[e] - top);
        for (int e = 0; e < num_experts; e++) scores[e] /= total;
    } else {
        for (int e = 0; e < num_experts; e++) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    }
    for (int e = 0; e < num_experts; e++) choice[e] = scores[e] + (router.correction ? router.correction[e] : 0.0f);
    if (router.num_groups > 0) {
        const int size = num_experts / router.num_groups;
        groups.resize(router.num_groups), best.resize(router.top_groups);
        for (int g = 0; g < router.num_groups; g++) {  // a group's best expert counts, of a sigmoid its best two
            const float* of_group = choice.data() + g * size;
            const int32_t first = best_of(of_group, size, nullptr, 0);
            groups[g] = of_group[first];
            if (!is_softmax && size > 1) groups[g] += of_group[best_of(of_group, size, &first, 1)];
        }
        for (int j = 0; j < router.top_groups; j++) best[j] = best_of(groups.data(), router.num_groups, best.data(), j);
        for (int e = 0; e < num_experts; e++) {
            if (std::find(best.begin(), best.end(), e / size) != best.end()) continue;
            choice[e] = is_softmax ? 0.0f : -INFINITY;
            if (is_softmax) scores[e] = 0.0f;
        }
    }
    float chosen = 0;
    for (int j = 0; j < router.top_k; j++) {
        ids[j] = best_of(choice.data(), num_experts, ids, j);
        chosen += weights[j] = scores[ids[j]];
    }
    for (int j = 0; j < router.top_k; j++)
        weights[j] = (router.normalize ? weights[j] / (chosen + 1e-20f) : weights[j]) * router.scale;
}
