// A whole step through a decoder in one parallel region (see team.h): layers of the Llama pattern, of DeepSeek's with
// latent attention, and recurrent ones (recurrent.h).
#pragma once

#include "attention.h"
#include "latent.h"
#include "layers.h"
#include "low_rank.h"
#include "mixture.h"
#include "products.h"
#include "recurrent.h"
#include "team.h"

struct LayerWeights {
    Strips qkv, output;           // with latents: the query or its latent, then the token's latent and rotary key;
                                  // of a recurrent layer: all that its scan reads
    LatentWeights latent;
    RecurrentWeights recurrent;
    GatedWeights dense;           // or, if there are routed experts, those that all tokens share; n = 0: none
    Router router;
    const GatedWeights* experts;  // [router.num_experts]
    const void *input_norm, *post_norm, *q_norm, *k_norm;  // the last two may be null
    const float *attended_norm, *mlp_norm;  // [hidden_dim]: norms of what attention and MLP give; null: none
    const float* sinks;           // [heads], as in AttendArgs; null: none
    const float* shared_gate;     // [hidden_dim]: shared experts count by its sigmoid; null: whole
    int32_t kv_layer;             // number of the layer among those with KV in blocks, or of those in pages
    int32_t in_pages;             // 1: its KV lies where StepArgs::pages say
    int32_t gates;                // 1: behind the values, qkv has gates of what is attended, one for each number
    int32_t window;
    int32_t unrotated;            // 1: queries and keys know no positions
    int32_t is_local;             // 1: they are rotated by the local angles
    float scale;
};

// KV of layers with windows, if it lies apart from the others'; its rows are theirs, and so is layer_bytes.
struct PageArgs {
    void *keys, *values;   // layer 0's pages, as in AttendArgs
    const int64_t* slots;  // [rows]
    int64_t block_stride;
    Plan* plan;            // null: no layer lies in pages
};

struct StepArgs {
    const LayerWeights* layers;
    int32_t num_layers, threads;
    const void* final_norm;
    Strips head;
    int64_t rows, num_logits;
    const int64_t* logits_rows;  // [num_logits]
    int64_t hidden_dim;
    void* hidden;                // [rows, hidden_dim]: embeddings of the tokens; overwritten
    float* logits;               // [num_logits, head.n], rounded to the model's type
    void* states;                // [rows, hidden_dim]: all rows behind the final norm; null: not wanted
    char* room;                  // bytes_of_step()
    int64_t layer_bytes;         // from a layer's blocks to the next one's
    RotateArgs rotate;           // qkv, norms and query are set here; not used with latents
    LatentArgs latent;
    AttendArgs attend;           // of layer 0; query and output are set here
    PageArgs pages;
    StateRows state_rows;        // of recurrent layers; its offset is set here
    const AdapterRowsArgs* adapters;  // [num_adapters], in order of rows
    const void* features;        // [feature_layers, num_features, hidden_dim]: added behind the first layers
    const int64_t* feature_rows; // [num_features]: the rows that get them
    int64_t num_features;
    int32_t feature_layers;      // fewer than num_layers
    int32_t num_adapters;
    int32_t is_bf16;
    int32_t centered;            // norms are centered_norm_row(), with weights in floats
    float eps;
    float residual_scale;        // of what a layer adds to the residual; 0: as it is
};

// Up to so many rows every member norms them and lays inputs out for itself: that takes less time than to wait for one
// that does, and to fetch what it wrote.
constexpr int64_t ROWS_ALONE = 2;

// What a member works in, cut out of StepArgs::room.
template <class T>
struct Room {
    bool alone;  // `summed`, `normed` and `inputs` are this member's own
    T *summed, *normed;
    char* inputs;
    T *qkv, *query, *attended, *gates, *activated, *delta, *last, *spare;
    T *query_latent, *expanded, *projected, *shared;  // of latent attention; of shared experts
    float *router_logits, *routing_weights;
    int32_t* routing;
    char *mixture, *low_rank, *recurrent;
    int64_t query_width, attended_width;  // of a row
    int64_t widest, bytes;

    explicit Room(const StepArgs& a, int member = 0) {
        const LatentArgs& latent = a.latent;
        query_width = attended_width = int64_t(a.rotate.heads) * a.rotate.dim;
        if (latent.heads > 0) {
            query_width = int64_t(latent.heads) * latent.width();
            attended_width = int64_t(latent.heads) * latent.rank;
        }
        int64_t inner = 0, experts = 0, top_k = 0, input_bytes = 0, mixture_bytes = 0, query_rank = 0, shared_rows = 0;
        int64_t joined = 0, recurrent_bytes = 0;
        widest = a.hidden_dim;
        auto multiplied = [&](const Strips& w) { input_bytes = std::max(input_bytes, bytes_of_inputs<T>(a.rows, w)); };
        multiplied(a.head);
        for (int l = 0; l < a.num_layers; l++) {
            const LayerWeights& layer = a.layers[l];
            multiplied(layer.qkv), multiplied(layer.output);
            joined = std::max(joined, layer.qkv.n), widest = std::max(widest, layer.output.k);
            if (layer.recurrent.kind != NOT_RECURRENT) {
                recurrent_bytes = std::max(recurrent_bytes, RecurrentStep<T>::bytes(layer.recurrent, a.rows));
                query_width = std::max(query_width, layer.recurrent.width());
                attended_width = std::max(attended_width, layer.recurrent.width());
            }
            if (layer.latent.expand.n > 0) {
                query_rank = std::max(query_rank, layer.latent.expand.k);
                multiplied(layer.latent.expand);
            }
            if (layer.dense.down.n > 0) {
                inner = std::max(inner, layer.dense.down.k);
                multiplied(layer.dense.gate), multiplied(layer.dense.down);
            }
            if (layer.router.num_experts == 0) continue;
            if (layer.router.by == ROUNDED_SOFTMAX) multiplied(layer.router.weight);
            if (layer.dense.down.n > 0) shared_rows = a.rows;
            experts = std::max<int64_t>(experts, layer.router.num_experts);
            top_k = std::max<int64_t>(top_k, layer.router.top_k);
            MixtureArgs args = mixture_args(a, layer, a.rows);
            mixture_bytes = std::max(mixture_bytes, bytes_of_mixture<T>(args));
        }
        char* at = a.room;
        auto cut = [&](int64_t width, int64_t rows) { return (T*)cut_room(at, rows * width * int64_t(sizeof(T))); };
        qkv = cut(joined, a.rows);
        recurrent = cut_room(at, recurrent_bytes);
        query = cut(query_width, a.rows), attended = cut(attended_width, a.rows);
        query_latent = cut(query_rank, a.rows);
        expanded = cut(query_rank > 0 ? latent.heads * latent.head_width() : 0, a.rows);
        projected = cut(latent.heads * latent.value, a.rows);
        activated = cut(inner, std::min(PASS_ROWS, a.rows));
        gates = cut(a.num_adapters > 0 ? 2 * inner : 0, std::min(PASS_ROWS, a.rows));
        delta = cut(a.hidden_dim, a.rows), last = cut(a.hidden_dim, a.num_logits);
        shared = cut(a.hidden_dim, shared_rows);
        router_logits = (float*)cut_room(at, a.rows * experts * int64_t(sizeof(float)));
        routing_weights = (float*)cut_room(at, a.rows * top_k * int64_t(sizeof(float)));
        routing = (int32_t*)cut_room(at, a.rows * top_k * int64_t(sizeof(int32_t)));
        mixture = cut_room(at, mixture_bytes);
        alone = a.rows <= ROWS_ALONE && a.num_logits <= a.rows;
        spare = cut(a.hidden_dim, alone ? a.rows : 0);
        auto cut_own = [&](char* from) {
            at = from;
            summed = cut(a.hidden_dim, alone ? a.rows : 0);
            normed = cut(a.hidden_dim, a.rows), inputs = cut_room(at, input_bytes);
            return at - from;
        };
        char* own = at;
        const int64_t own_bytes = cut_own(own);
        if (alone) cut_own(own + member * own_bytes), at = own + a.threads * own_bytes;
        widest = std::max(std::max(widest, inner), query_rank);
        low_rank = at, at += LowRankStep<T>(a.adapters, a.num_adapters, a.num_layers, widest, at).bytes;
        bytes = at - a.room;
    }

    static MixtureArgs mixture_args(const StepArgs& a, const LayerWeights& layer, int64_t rows) {
        MixtureArgs args{};
        args.experts = layer.experts, args.num_experts = layer.router.num_experts, args.top_k = layer.router.top_k;
        args.rows = rows;
        return args;
    }
};

template <class T>
class DecoderStep {
  public:
    DecoderStep(const StepArgs& args, Plan& plan, Team& team, int member)
        : a_(args),
          plan_(plan),
          team_(team),
          member_(member),
          room_(args, member),
          spare_(room_.spare),
          low_rank_(args.adapters, args.num_adapters, args.num_layers, room_.widest, room_.low_rank) {}

    void run() {
        TileScope tiles;
        int64_t rows = a_.rows;
        T* hidden = (T*)a_.hidden;
        const T* delta = nullptr;
        const float* mlp_norm = nullptr;  // of the layer before
        for (int l = 0; l < a_.num_layers; l++) {
            const LayerWeights& layer = a_.layers[l];
            if (l > 0 && l <= a_.feature_layers) add_features(hidden, l - 1);
            hidden = norm(hidden, delta, layer.input_norm, rows, mlp_norm);
            multiply(layer.qkv, room_.normed, rows, room_.qkv, layer.qkv.n);
            const bool at_end = l == a_.num_layers - 1 && a_.states == nullptr;
            adapt_qkv(layer, l);
            if (layer.recurrent.kind != NOT_RECURRENT) {
                RecurrentStep<T>(layer.recurrent, a_.state_rows, room_.qkv, layer.qkv.n, a_.rows, room_.recurrent)
                    .run(team_, member_, room_.attended);
            } else {
                prepare_and_attend(layer, l, at_end);
                if (layer.gates) gate_attended(layer);
            }
            const T* attended = room_.attended;
            if (at_end) {  // what follows serves logits alone
                if (a_.num_logits == 0) return;
                keep_logits_rows(hidden, a_.latent.heads > 0 ? room_.attended_width : layer.output.k);
                hidden = room_.last, attended = room_.query, rows = a_.num_logits;
            }
            if (a_.latent.heads > 0) {
                project(layer.latent, attended, rows);
                attended = room_.projected;
            }
            multiply(layer.output, attended, rows, room_.delta, a_.hidden_dim);
            low_rank_.add(team_, member_, l, {{&Adapted::output, 0}}, at_end, attended, layer.output.k, 0, rows,
                          room_.delta, a_.hidden_dim);
            hidden = norm(hidden, room_.delta, layer.post_norm, rows, layer.attended_norm);
            if (layer.router.num_experts > 0)
                mix(layer, l, at_end, rows);
            else
                gate(layer.dense, l, at_end, rows, room_.delta);
            delta = room_.delta, mlp_norm = layer.mlp_norm;
        }
        norm(hidden, delta, a_.final_norm, rows, mlp_norm);
        const T* states = room_.normed;
        if (a_.states) {
            share_behind_norm(rows, [&](int64_t i) { copy_row(room_.normed, i, (T*)a_.states, i); });
            team_.share(member_, a_.num_logits,
                        [&](int64_t i) { copy_row((T*)a_.states, a_.logits_rows[i], room_.last, i); });
            states = room_.last;
        }
        multiply(a_.head, states, a_.num_logits, a_.logits, a_.head.n);
    }

  private:
    using Adapted = AdapterLayerArgs;

    const StepArgs& a_;
    Plan& plan_;
    Team& team_;
    const int member_;
    const Room<T> room_;
    T* spare_;              // where the next sums of residual and delta go, if members work alone
    T* sums_to_ = nullptr;  // where room_.summed is to be kept; null: nowhere
    int64_t num_sums_ = 0;
    const LowRankStep<T> low_rank_;

    void copy_row(const T* from, int64_t row, T* to, int64_t i) const {
        std::memcpy(to + i * a_.hidden_dim, from + row * a_.hidden_dim, a_.hidden_dim * sizeof(T));
    }

    // Add what layer `l` left in room_.delta to the residual of the rows that have features, and then these.
    void add_features(T* residual, int l) {
        const T* features = (const T*)a_.features + l * a_.num_features * a_.hidden_dim;
        team_.share(member_, a_.num_features, [&](int64_t i) {
            const int64_t at = a_.feature_rows[i] * a_.hidden_dim;
            for (int64_t d = 0; d < a_.hidden_dim; d++) {
                const T sum = from_float<T>(to_float(residual[at + d]) + to_float(room_.delta[at + d]));
                residual[at + d] = from_float<T>(to_float(sum) + to_float(features[i * a_.hidden_dim + d]));
                room_.delta[at + d] = from_float<T>(0.0f);
            }
        });
    }

    // Add `delta`, if any, to the residual, normed by `delta_norm` if that is given, and norm the sums into
    // room_.normed. Returns where the sums are, once share_behind_norm() was called.
    T* norm(T* residual, const T* delta, const void* weight, int64_t rows, const float* delta_norm) {
        NormArgs args{delta, delta_norm, residual, weight,           room_.normed, rows, a_.hidden_dim, a_.is_bf16,
                      1,     a_.eps,     a_.residual_scale, a_.centered};
        if (!room_.alone) {
            team_.share(member_, rows, [&](int64_t i) { add_rms_norm_row<T>(args, i); });
            return residual;
        }
        if (delta) {  // others may still read the residual
            args.residual = room_.summed, sums_to_ = spare_, num_sums_ = rows, spare_ = residual;
            std::memcpy(room_.summed, residual, rows * a_.hidden_dim * sizeof(T));
        }
        for (int64_t i = 0; i < rows; i++) add_rms_norm_row<T>(args, i);
        return delta ? sums_to_ : residual;
    }

    // The phase that follows norm(): one more piece keeps the sums, if members work alone.
    template <class F>
    void share_behind_norm(int64_t count, F&& body) {
        if (sums_to_ == nullptr) return team_.share(member_, count, body);
        team_.share(member_, count + 1, [&](int64_t i) {
            if (i < count) return body(i);
            std::memcpy(sums_to_, room_.summed, num_sums_ * a_.hidden_dim * sizeof(T));
        });
        sums_to_ = nullptr;
    }

    // The same for pieces of a product, see share_pass().
    template <class F>
    void share_pass_behind_norm(int64_t pieces, int64_t rows, F&& body) {
        if (sums_to_ == nullptr) return share_pass(team_, member_, pieces, rows, body);
        share_behind_norm(pieces, [&](int64_t piece) { body(piece, 0, rows); });
    }

    Inputs lay_out(const Strips& w, const T* x, int64_t rows) {
        if (room_.alone) return lay_out_alone(w, x, w.k, rows, room_.inputs);
        return ::lay_out(team_, member_, w, x, w.k, rows, room_.inputs);
    }

    template <class Out>
    void multiply(const Strips& w, const T* x, int64_t rows, Out* out, int64_t out_stride) {
        for (int64_t first = 0; first < rows; first += PASS_ROWS) {
            const int64_t count = std::min(PASS_ROWS, rows - first);
            const Inputs inputs = lay_out(w, x + first * w.k, count);
            const int parts = parts_of_strip(w.count(), team_.size());
            share_pass_behind_norm(w.count() * parts, count, [&](int64_t piece, int64_t begin, int64_t some) {
                multiply_piece<T>(w, piece, parts, inputs.from(begin), some, out + (first + begin) * out_stride,
                                  out_stride);
            });
        }
    }

    void adapt_qkv(const LayerWeights& layer, int index) {
        const T* x = room_.normed;
        const int64_t width = layer.qkv.n;
        if (a_.latent.heads > 0) {
            low_rank_.add(team_, member_, index,
                          {{&Adapted::query, 0}, {&Adapted::key, width - a_.latent.width()}}, false, x,
                          a_.hidden_dim, 0, a_.rows, room_.qkv, width);
            return;
        }
        const int64_t heads = int64_t(a_.rotate.heads) * a_.rotate.dim;
        const int64_t kv_heads = int64_t(a_.rotate.kv_heads) * a_.rotate.dim;
        low_rank_.add(team_, member_, index,
                      {{&Adapted::query, 0}, {&Adapted::key, heads}, {&Adapted::value, heads + kv_heads}},
                      false, x, a_.hidden_dim, 0, a_.rows, room_.qkv, width);
    }

    void gate(const GatedWeights& w, int index, bool at_end, int64_t rows, T* out) {
        const bool is_adapted =
            low_rank_.touches(index, &Adapted::gate) || low_rank_.touches(index, &Adapted::up);
        const int parts = parts_of_strip(w.gate.count(), team_.size());
        for (int64_t first = 0; first < rows; first += PASS_ROWS) {
            int64_t count = std::min(PASS_ROWS, rows - first);
            const T* normed = room_.normed + first * w.gate.k;
            T* output = out + first * a_.hidden_dim;
            if (is_adapted) {
                gate_and_adapt(w, index, at_end, normed, first, count);
            } else {
                const Inputs x = lay_out(w.gate, normed, count);
                share_pass_behind_norm(w.gate.count() * parts, count, [&](int64_t piece, int64_t begin, int64_t some) {
                    gate_piece(w, piece, parts, x.from(begin), some, room_.activated + begin * w.down.k, w.down.k);
                });
            }
            multiply(w.down, room_.activated, count, output, a_.hidden_dim);
            low_rank_.add(team_, member_, index, {{&Adapted::down, 0}}, at_end, room_.activated, w.down.k, first,
                          count, output, a_.hidden_dim);
        }
    }

    // As the fused pieces do, to the bit, with room for what adapters add before the activation.
    void gate_and_adapt(const GatedWeights& w, int index, bool at_end, const T* normed, int64_t first, int64_t rows) {
        const int64_t inner = w.down.k;
        multiply(w.gate, normed, rows, room_.gates, 2 * inner);
        multiply(w.up, normed, rows, room_.gates + inner, 2 * inner);
        low_rank_.add(team_, member_, index, {{&Adapted::gate, 0}, {&Adapted::up, inner}}, at_end, normed,
                      w.gate.k, first, rows, room_.gates, 2 * inner);
        team_.share(member_, rows, [&](int64_t i) {
            const T* row = room_.gates + i * 2 * inner;
            activate(w, row, row + inner, room_.activated + i * inner, inner);
        });
    }

    void mix(const LayerWeights& layer, int index, bool at_end, int64_t rows) {
        const bool shares = layer.dense.down.n > 0;
        if (shares) gate(layer.dense, index, at_end, rows, room_.shared);
        if (shares && layer.shared_gate)
            team_.share(member_, rows, [&](int64_t i) { weigh_shared(layer.shared_gate, i); });
        route(layer.router, rows);
        MixtureArgs args = Room<T>::mixture_args(a_, layer, rows);
        args.x = room_.normed, args.ids = room_.routing, args.weights = room_.routing_weights;
        args.added = shares ? room_.shared : nullptr;
        args.output = room_.delta, args.room = room_.mixture;
        run_mixture<T>(team_, member_, args);
    }

    // What shared experts give a row, times the sigmoid of the row's product with `gate`
    void weigh_shared(const float* gate, int64_t row) {
        const T* x = room_.normed + row * a_.hidden_dim;
        T* shared = room_.shared + row * a_.hidden_dim;
        v16f parts = {};
        float sum = 0;
        int64_t d = 0;
        for (; d + LANES <= a_.hidden_dim; d += LANES) parts = fma(load(x + d), load(gate + d), parts);
        for (; d < a_.hidden_dim; d++) sum = fma_one(to_float(x[d]), gate[d], sum);
        const float weight = sigmoid_one(sum + sum_lanes(parts));
        for (d = 0; d < a_.hidden_dim; d++) shared[d] = from_float<T>(to_float(shared[d]) * weight);
    }

    // What is attended, times the sigmoids of the gates behind the values
    void gate_attended(const LayerWeights& layer) {
        const int64_t width = layer.output.k, stride = layer.qkv.n;
        team_.share(member_, a_.rows, [&](int64_t i) {
            const T* gates = room_.qkv + i * stride + stride - width;
            T* attended = room_.attended + i * width;
            for (int64_t d = 0; d < width; d += LANES) {
                const int some = int(std::min<int64_t>(LANES, width - d));
                const v16f open = vmin(-load_few(gates + d, some), splat(80.0f));
                store_few(attended + d, load_few(attended + d, some) / (vexp(open) + 1.0f), some);
            }
        });
    }

    void route(const Router& router, int64_t rows) {
        const int64_t experts = router.num_experts;
        if (router.by == ROUNDED_SOFTMAX) {
            T* logits = (T*)room_.router_logits;
            multiply(router.weight, room_.normed, rows, logits, experts);
            team_.share(member_, rows, [&](int64_t i) {
                route_rounded(router, logits + i * experts, room_.routing + i * router.top_k,
                              room_.routing_weights + i * router.top_k);
            });
            return;
        }
        float* logits = room_.router_logits;
        const int parts = parts_of_strip(router.weight.count(), team_.size());
        share_behind_norm(router.weight.count() * parts, [&](int64_t piece) {
            multiply_piece_alone<float>(router.weight, piece, parts, (const T*)room_.normed, a_.hidden_dim, rows, logits,
                                        experts);
        });
        team_.share(member_, rows, [&](int64_t i) {
            route_by_groups(router, logits + i * experts, room_.routing + i * router.top_k,
                            room_.routing_weights + i * router.top_k);
        });
    }

    void prepare_and_attend(const LayerWeights& layer, int index, bool at_end) {
        AttendArgs attend = a_.attend;
        Plan& plan = layer.in_pages ? *a_.pages.plan : plan_;
        if (a_.latent.heads > 0) {
            void* latents = (char*)a_.latent.latents + layer.kv_layer * a_.layer_bytes;
            fold(layer, index, latents);
            attend.keys = attend.values = latents;
        } else {
            RotateArgs rotate = a_.rotate;
            rotate.qkv = room_.qkv, rotate.query = room_.query;
            if (layer.is_local) rotate.cos = rotate.local_cos, rotate.sin = rotate.local_sin;
            if (layer.unrotated) rotate.cos = rotate.sin = nullptr;
            rotate.qkv_stride = layer.qkv.n, rotate.centered = a_.centered;
            rotate.q_norm = layer.q_norm, rotate.k_norm = layer.k_norm;
            if (layer.in_pages) {
                rotate.keys = a_.pages.keys, rotate.values = a_.pages.values;
                rotate.slots = a_.pages.slots, rotate.block_stride = attend.block_stride = a_.pages.block_stride;
            }
            rotate.keys = (char*)rotate.keys + layer.kv_layer * a_.layer_bytes;
            rotate.values = (char*)rotate.values + layer.kv_layer * a_.layer_bytes;
            team_.share(member_, a_.rows, [&](int64_t i) { rotate_and_write_token<T>(rotate, i); });
            attend.keys = rotate.keys, attend.values = rotate.values;
        }
        attend.query = room_.query, attend.output = room_.attended;
        attend.window = layer.window, attend.scale = layer.scale, attend.sinks = layer.sinks;
        static thread_local Scratch scratch;
        auto merge = [&](int64_t i) { merge_token<T>(attend, plan, int(i)); };
        const auto& bundles = at_end ? plan.needed_bundles : plan.bundles;
        team_.share(member_, bundles.size(), [&](int64_t i) { run_bundle<T>(attend, plan, bundles[i], scratch); });
        if (at_end && !plan.needed_merged.empty())
            team_.share(member_, plan.needed_merged.size(), [&](int64_t i) { merge(plan.needed_merged[i]); });
        if (!at_end && !plan.merged.empty()) team_.share(member_, plan.merged.size(), merge);
    }

    // Queries over latents into room_.query, and the tokens' latents into their slots.
    void fold(const LayerWeights& layer, int index, void* blocks) {
        const LatentArgs& a = a_.latent;
        const LatentWeights& w = layer.latent;
        const int64_t joined = layer.qkv.n;
        const T* query = room_.qkv;
        int64_t stride = joined;
        if (w.expand.n > 0) {
            const int64_t rank = w.expand.k;
            team_.share(member_, a_.rows, [&](int64_t i) {
                rms_norm_row(room_.qkv + i * joined, (const T*)w.query_norm, room_.query_latent + i * rank, rank,
                             w.query_eps);
            });
            multiply(w.expand, room_.query_latent, a_.rows, room_.expanded, w.expand.n);
            low_rank_.add(team_, member_, index, {{&Adapted::expand, 0}}, false, room_.query_latent, rank, 0,
                          a_.rows, room_.expanded, w.expand.n);
            query = room_.expanded, stride = w.expand.n;
        }
        const HeadProducts<T> products(w.fold, a.heads, team_.size(), a_.rows, query, stride, a.head_width(),
                                       room_.query, room_.query_width, a.width());
        const int64_t pieces = products.pieces();
        team_.share(member_, pieces + a_.rows, [&](int64_t piece) {
            if (piece < pieces) return products.run(piece);
            const int64_t i = piece - pieces;
            write_latent(a, w, blocks, room_.qkv + i * joined + joined - a.width(), i);
            for (int h = 0; h < a.heads; h++)
                rotate_part(a, query + i * stride + h * a.head_width() + a.nope, i,
                            room_.query + i * room_.query_width + h * a.width() + a.rank);
        });
    }

    // Of each head, weighted latents to its values.
    void project(const LatentWeights& w, const T* attended, int64_t rows) {
        const LatentArgs& a = a_.latent;
        const HeadProducts<T> products(w.project, a.heads, team_.size(), rows, attended, room_.attended_width, a.rank,
                                       room_.projected, int64_t(a.heads) * a.value, a.value);
        team_.share(member_, products.pieces(), [&](int64_t piece) { products.run(piece); });
    }

    void keep_logits_rows(const T* hidden, int64_t width) {
        team_.share(member_, a_.num_logits, [&](int64_t i) {
            int64_t row = a_.logits_rows[i];
            copy_row(hidden, row, room_.last, i);
            std::memcpy(room_.query + i * width, room_.attended + row * width, width * sizeof(T));
        });
    }
};
