// A decoder layer's recurrent part within a step: what its input product gave goes through the short convolution,
// the scan, a norm and a gate (Gated DeltaNet, Mamba 2). See scan.h for states.
#pragma once

#include <cmath>

#include "layers.h"
#include "scan.h"
#include "team.h"

enum RecurrentKind : int32_t { NOT_RECURRENT = 0, DELTA_RULE = 1, MAMBA2 = 2 };

struct RecurrentWeights {
    int32_t kind;                             // RecurrentKind
    int32_t heads, key_heads, key_dim, value_dim, conv_width;
    int32_t conv_at, gate_at, step_at, beta_at;  // columns of the layer's input product
    int32_t norm_dim;                         // numbers that are normed together
    int32_t gates_first;                      // whether the gate comes before the norm
    const float* conv_weight;                 // [conv_width, channels()]
    const float* conv_bias;                   // [channels()]; null: none
    const float *step_bias, *rate;            // [heads]; rates are negative
    const float* skip;                        // [heads]: of values past the scan; null: none
    const float* norm;                        // [heads * value_dim], or [norm_dim] for all
    int64_t norm_size;                        // of `norm`
    int64_t conv_offset, scan_offset;         // of the layer's parts in a state, in bytes
    float eps, least_step, most_step;

    int64_t key_width() const { return int64_t(key_heads) * key_dim; }
    int64_t width() const { return int64_t(heads) * value_dim; }
    int64_t channels() const { return 2 * key_width() + width(); }
    // Where queries, keys and values are among the channels
    int64_t query_at() const { return kind == DELTA_RULE ? 0 : width() + key_width(); }
    int64_t key_at() const { return kind == DELTA_RULE ? key_width() : width(); }
    int64_t value_at() const { return kind == DELTA_RULE ? 2 * key_width() : 0; }
};

static inline float softplus_one(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
static inline float sigmoid_one(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Numbers to length 1, times a factor
static inline void normalize(float* x, int64_t count, float factor) {
    v16f parts = {};
    float sum = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) parts = fma(load(x + i), load(x + i), parts);
    for (; i < count; i++) sum = fma_one(x[i], x[i], sum);
    sum += sum_lanes(parts);
    factor /= std::sqrt(sum + 1e-6f);
    for (i = 0; i < count; i++) x[i] *= factor;
}

template <class T>
class RecurrentStep {
  public:
    // `inputs` [rows, stride]: of the layer's input product; `room`: bytes()
    RecurrentStep(const RecurrentWeights& w, const StateRows& states, const T* inputs, int64_t stride, int64_t rows,
                  char* room)
        : w_(w), states_(states), inputs_(inputs), stride_(stride), rows_(rows) {
        mixed_ = (float*)room, scanned_ = mixed_ + rows * w.channels();
        decay_ = scanned_ + rows * w.width(), scale_ = decay_ + rows * w.heads;
    }

    static int64_t bytes(const RecurrentWeights& w, int64_t rows) {
        return rows * (w.channels() + w.width() + 2 * w.heads) * int64_t(sizeof(float));
    }

    // Write output [rows, width()].
    void run(Team& team, int member, T* output) {
        const ConvolveArgs convolution = convolution_args();
        const ScanArgs scan = scan_args();
        const int64_t across = pieces(w_.channels());
        team.share(member, states_.num_sequences * across, [&](int64_t i) {
            convolve_piece<T>(convolution, i / across, i % across * LANES);
        });
        team.share(member, rows_, [&](int64_t row) { prepare(row); });
        constexpr int64_t wide = PANELS * LANES;
        const int64_t columns = (w_.value_dim + wide - 1) / wide, each = w_.heads * columns;
        team.share(member, states_.num_sequences * each, [&](int64_t i) {
            scan_piece(scan, i / each, i % each / columns, i % columns * wide);
        });
        team.share(member, rows_, [&](int64_t row) { finish(row, output + row * w_.width()); });
    }

  private:
    const RecurrentWeights& w_;
    const StateRows states_;
    const T* inputs_;
    const int64_t stride_, rows_;
    float *mixed_, *scanned_, *decay_, *scale_;

    static int64_t pieces(int64_t columns) { return (columns + LANES - 1) / LANES; }

    ConvolveArgs convolution_args() const {
        ConvolveArgs a{};
        a.rows = states_, a.rows.offset = w_.conv_offset;
        a.x = inputs_ + w_.conv_at, a.x_stride = stride_;
        a.weight = w_.conv_weight, a.bias = w_.conv_bias, a.output = mixed_;
        a.channels = int32_t(w_.channels()), a.width = w_.conv_width, a.is_activated = 1;
        return a;
    }

    ScanArgs scan_args() const {
        ScanArgs a{};
        a.rows = states_, a.rows.offset = w_.scan_offset;
        a.query = mixed_ + w_.query_at(), a.key = mixed_ + w_.key_at(), a.value = mixed_ + w_.value_at();
        a.key_stride = a.value_stride = w_.channels();
        a.decay = decay_, a.output = scanned_;
        (w_.kind == DELTA_RULE ? a.beta : a.scale) = scale_;
        a.key_heads = w_.key_heads, a.heads = w_.heads, a.key_dim = w_.key_dim, a.value_dim = w_.value_dim;
        return a;
    }

    // Decays and scales of a row; of the delta rule, queries and keys to length 1.
    void prepare(int64_t row) {
        const T* x = inputs_ + row * stride_;
        float *decay = decay_ + row * w_.heads, *scale = scale_ + row * w_.heads;
        for (int h = 0; h < w_.heads; h++) {
            const float step = softplus_one(to_float(x[w_.step_at + h]) + w_.step_bias[h]);
            const float bounded = std::min(std::max(step, w_.least_step), w_.most_step);
            decay[h] = w_.rate[h] * bounded;
            scale[h] = w_.kind == DELTA_RULE ? sigmoid_one(to_float(x[w_.beta_at + h])) : bounded;
        }
        if (w_.kind != DELTA_RULE) return;
        float* mixed = mixed_ + row * w_.channels();
        for (int h = 0; h < w_.key_heads; h++) {
            normalize(mixed + w_.query_at() + h * w_.key_dim, w_.key_dim, 1.0f / std::sqrt(float(w_.key_dim)));
            normalize(mixed + w_.key_at() + h * w_.key_dim, w_.key_dim, 1.0f);
        }
    }

    // Skip, norm and gate of a row.
    void finish(int64_t row, T* output) {
        float* y = scanned_ + row * w_.width();
        const T* gate = inputs_ + row * stride_ + w_.gate_at;
        if (w_.skip) {
            const float* value = mixed_ + row * w_.channels() + w_.value_at();
            for (int h = 0; h < w_.heads; h++)
                for (int64_t i = h * w_.value_dim; i < (h + 1) * int64_t(w_.value_dim); i++)
                    y[i] = fma_one(w_.skip[h], value[i], y[i]);
        }
        if (w_.gates_first) apply_gate(y, gate);
        for (int64_t first = 0; first < w_.width(); first += w_.norm_dim) norm(y + first, first % w_.norm_size);
        if (!w_.gates_first) apply_gate(y, gate);
        for (int64_t i = 0; i < w_.width(); i += LANES) {
            const int width = int(std::min<int64_t>(LANES, w_.width() - i));
            store_few(output + i, load_few(y + i, width), width);
        }
    }

    void apply_gate(float* y, const T* gate) const {
        for (int64_t i = 0; i < w_.width(); i += LANES) {
            const int width = int(std::min<int64_t>(LANES, w_.width() - i));
            store_few(y + i, load_few(y + i, width) * silu<float>(load_few(gate + i, width)), width);
        }
    }

    void norm(float* y, int64_t weights_at) const {
        v16f parts = {};
        float sum = 0;
        int64_t i = 0;
        for (; i + LANES <= w_.norm_dim; i += LANES) parts = fma(load(y + i), load(y + i), parts);
        for (; i < w_.norm_dim; i++) sum = fma_one(y[i], y[i], sum);
        sum += sum_lanes(parts);
        const float factor = 1.0f / std::sqrt(sum / w_.norm_dim + w_.eps);
        for (i = 0; i < w_.norm_dim; i++) y[i] = y[i] * factor * w_.norm[weights_at + i];
    }
};
