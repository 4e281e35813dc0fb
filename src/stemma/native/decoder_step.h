// A whole step through a decoder of the Llama pattern, in one parallel region (see team.h).
#pragma once

#include "attention.h"
#include "layers.h"
#include "strips.h"
#include "team.h"

struct LayerWeights {
    Strips qkv, output, gate_up, down;
    const bf16 *input_norm, *post_norm, *q_norm, *k_norm;  // the last two may be null
    int32_t window;
    float scale;
};

struct StepArgs {
    const LayerWeights* layers;
    int32_t num_layers, threads;
    const bf16* final_norm;
    Strips head;
    int64_t rows, num_logits;
    const int64_t* logits_rows;  // [num_logits]
    int64_t hidden_dim;
    bf16* hidden;                // [rows, hidden_dim]: embeddings of the tokens; overwritten
    bf16* logits;                // [num_logits, head.n]
    char* room;                  // room_of_step() bytes
    int64_t layer_bytes;         // from a layer's blocks to the next one's
    RotateArgs rotate;           // qkv, norms and query are set here
    AttendArgs attend;           // of layer 0; query and output are set here
    float eps;
};

constexpr int64_t PASS_ROWS = 256;  // rows that go through a product at a time: their inputs stay in the caches

#if STEMMA_BF16_DOT
// What a step works in, cut out of StepArgs::room.
struct Room {
    bf16 *normed, *qkv, *query, *attended, *activated, *delta, *last;
    int64_t bytes;

    explicit Room(const StepArgs& a) {
        int64_t heads = int64_t(a.rotate.heads) * a.rotate.dim;
        const LayerWeights& layer = a.layers[0];
        char* at = a.room;
        auto cut = [&](int64_t width, int64_t rows) {
            bf16* begin = (bf16*)at;
            at += (rows * width * int64_t(sizeof(bf16)) + 63) / 64 * 64;
            return begin;
        };
        normed = cut(a.hidden_dim, a.rows), qkv = cut(layer.qkv.n, a.rows);
        query = cut(heads, a.rows), attended = cut(heads, a.rows);
        activated = cut(layer.down.k, std::min(PASS_ROWS, a.rows));
        delta = cut(a.hidden_dim, a.rows), last = cut(a.hidden_dim, a.num_logits);
        bytes = at - a.room;
    }
};

class DecoderStep {
  public:
    DecoderStep(const StepArgs& args, Plan& plan, Team& team, int member)
        : a_(args), plan_(plan), team_(team), member_(member), room_(args) {}

    void run() {
        int64_t rows = a_.rows;
        bf16* hidden = a_.hidden;
        const bf16* delta = nullptr;
        for (int l = 0; l < a_.num_layers; l++) {
            const LayerWeights& layer = a_.layers[l];
            norm(hidden, delta, layer.input_norm, rows);
            multiply(layer.qkv, room_.normed, rows, room_.qkv);
            attend(layer, l);
            const bf16* attended = room_.attended;
            if (l == a_.num_layers - 1) {  // what follows serves logits alone
                if (a_.num_logits == 0) return;
                keep_logits_rows(hidden);
                hidden = room_.last, attended = room_.query, rows = a_.num_logits;
            }
            multiply(layer.output, attended, rows, room_.delta);
            norm(hidden, room_.delta, layer.post_norm, rows);
            for (int64_t first = 0; first < rows; first += PASS_ROWS) {
                int64_t count = std::min(PASS_ROWS, rows - first);
                gate(layer.gate_up, first, count);
                multiply(layer.down, room_.activated, count, room_.delta + first * a_.hidden_dim);
            }
            delta = room_.delta;
        }
        norm(hidden, delta, a_.final_norm, rows);
        multiply(a_.head, room_.normed, rows, a_.logits);
    }

  private:
    const StepArgs& a_;
    Plan& plan_;
    Team& team_;
    const int member_;
    const Room room_;

    void norm(bf16* residual, const bf16* delta, const bf16* weight, int64_t rows) {
        NormArgs args{delta, residual, weight, room_.normed, rows, a_.hidden_dim, 1, 1, a_.eps};
        team_.share(member_, rows, [&](int64_t i) { add_rms_norm_row<bf16>(args, i); });
    }

    void multiply(const Strips& w, const bf16* x, int64_t rows, bf16* out) {
        for (; rows > PASS_ROWS; rows -= PASS_ROWS, x += PASS_ROWS * w.k, out += PASS_ROWS * w.n)
            multiply_pass(w, x, PASS_ROWS, out);
        multiply_pass(w, x, rows, out);
    }

    void multiply_pass(const Strips& w, const bf16* x, int64_t rows, bf16* out) {
        int parts = parts_of_strip(w.count(), a_.threads);
        team_.share(member_, w.count() * parts, [&](int64_t piece) {
            alignas(64) float acc[BLOCK_ROWS * STRIP];
            for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
                int count = int(std::min<int64_t>(BLOCK_ROWS, rows - first));
                Outputs o = dot_piece(w, piece, parts, x + first * w.k, w.k, count, acc);
                for (int r = 0; r < count; r++) put(acc + r * STRIP, o.width, out + (first + r) * w.n + o.begin);
            }
        });
    }

    // Gate and up lie below each other in one weight, so that piece i and piece i + pieces belong together.
    void gate(const Strips& w, int64_t begin, int64_t rows) {
        int64_t half = w.n / 2;
        int parts = half % STRIP ? LINES : parts_of_strip(half / STRIP, a_.threads);
        int64_t pieces = half * parts / STRIP;
        team_.share(member_, pieces, [&](int64_t piece) {
            alignas(64) float gates[BLOCK_ROWS * STRIP], ups[BLOCK_ROWS * STRIP];
            alignas(64) bf16 pair[2 * STRIP];
            for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
                int count = int(std::min<int64_t>(BLOCK_ROWS, rows - first));
                const bf16* x = room_.normed + (begin + first) * w.k;
                Outputs o = dot_piece(w, piece, parts, x, w.k, count, gates);
                dot_piece(w, pieces + piece, parts, x, w.k, count, ups);
                for (int r = 0; r < count; r++) {
                    put(gates + r * STRIP, o.width, pair), put(ups + r * STRIP, o.width, pair + o.width);
                    silu_and_multiply_row(pair, room_.activated + (first + r) * half + o.begin, o.width);
                }
            }
        });
    }

    void attend(const LayerWeights& layer, int index) {
        RotateArgs rotate = a_.rotate;
        rotate.qkv = room_.qkv, rotate.query = room_.query;
        rotate.q_norm = layer.q_norm, rotate.k_norm = layer.k_norm;
        rotate.keys = (char*)a_.rotate.keys + index * a_.layer_bytes;
        rotate.values = (char*)a_.rotate.values + index * a_.layer_bytes;
        AttendArgs attend = a_.attend;
        attend.query = room_.query, attend.output = room_.attended;
        attend.keys = rotate.keys, attend.values = rotate.values;
        attend.window = layer.window, attend.scale = layer.scale;
        team_.share(member_, a_.rows, [&](int64_t i) { rotate_and_write_token<bf16>(rotate, i); });
        static thread_local Scratch scratch;
        team_.share(member_, plan_.items.size(),
                    [&](int64_t i) { run_item_any<bf16>(attend, plan_, plan_.items[i], scratch); });
        if (!plan_.merged.empty())
            team_.share(member_, plan_.merged.size(), [&](int64_t i) { merge_token<bf16>(attend, plan_, int(i)); });
    }

    void keep_logits_rows(const bf16* hidden) {
        int64_t width = int64_t(a_.rotate.heads) * a_.rotate.dim;
        team_.share(member_, a_.num_logits, [&](int64_t i) {
            int64_t row = a_.logits_rows[i];
            std::memcpy(room_.last + i * a_.hidden_dim, hidden + row * a_.hidden_dim, a_.hidden_dim * sizeof(bf16));
            std::memcpy(room_.query + i * width, room_.attended + row * width, width * sizeof(bf16));
        });
    }
};
#endif
