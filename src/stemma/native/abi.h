// What the argument structures look like in memory, as text: Python's mirrors of them are held against it when
// the library is loaded (structures.py). One line a structure: its name, its size, then `field:offset` of each.
#pragma once

#include <cstddef>
#include <string>

#include "compressing.h"
#include "decoder_step.h"
#include "layers.h"

template <class S>
class Described {
  public:
    [[gnu::noinline]] explicit Described(const char* name) : line_(std::string(name) + " " + std::to_string(sizeof(S))) {}
    [[gnu::noinline]] Described& field(const char* name, size_t offset) {
        line_ += std::string(" ") + name + ":" + std::to_string(offset);
        return *this;
    }
    operator std::string() const { return line_ + "\n"; }

  private:
    std::string line_;
};

[[gnu::cold, gnu::optimize("O1")]] static std::string describe_structures() {
    std::string text;
#define BEGIN(NAME) { using S = NAME; text += Described<S>(#NAME)
#define F(FIELD) .field(#FIELD, offsetof(S, FIELD))
#define END ; }
    BEGIN(Batch) F(num_seqs) F(query_starts) F(context_lens) F(tables) F(table_stride) F(block_size) F(limits) END
    BEGIN(AttendArgs) F(query) F(keys) F(values) F(output) F(query_token_stride) F(query_head_stride)
        F(block_stride) F(token_stride) F(head_stride) F(key_dim) F(value_dim) F(window) F(first_key) F(is_bf16)
        F(scale) F(softcap) F(sinks) F(format) F(lows) F(partials) END
    BEGIN(MergeArgs) F(parts) F(output) F(sinks) F(rows) F(num_parts) F(heads) F(value_dim) F(is_bf16) F(threads) END
    BEGIN(NormArgs) F(delta) F(residual) F(weight) F(output) F(rows) F(dim) F(is_bf16) F(threads) F(eps) END
    BEGIN(RotateArgs) F(qkv) F(cos) F(sin) F(q_norm) F(k_norm) F(query) F(keys) F(values) F(slots) F(tokens)
        F(block_stride) F(token_stride) F(head_stride) F(heads) F(kv_heads) F(dim) F(block_size) F(is_bf16)
        F(threads) F(eps) F(format) END
    BEGIN(KVFormat) F(stored) F(num_scales) F(first_dims) F(scale_offset) F(column_stride) END
    BEGIN(WriteArgs) F(source) F(target) F(slots) F(tokens) F(source_token_stride) F(source_head_stride)
        F(block_stride) F(token_stride) F(head_stride) F(heads) F(dim) F(block_size) F(is_bf16) F(threads)
        F(format) END
    BEGIN(GateArgs) F(gate_up) F(output) F(rows) F(dim) F(is_bf16) F(threads) END
    BEGIN(Codes) F(bits) F(group) F(scale_bytes) F(has_offsets) F(activations) F(input_scale) F(input_zero) END
    BEGIN(Strips) F(data) F(bias) F(n) F(k) F(codes) F(patches) END
    BEGIN(PackCodesArgs) F(codes) F(scales) F(offsets) F(rows) F(first) F(target) F(threads) END
    BEGIN(GatedWeights) F(gate) F(up) F(down) END
    BEGIN(CompressArgs) F(sources) F(num_sources) F(target) F(patches) F(counts) F(most_patches) F(threads) END
    BEGIN(PackArgs) F(weight) F(stride) F(rows) F(first) F(target) F(is_bf16) F(threads) END
    BEGIN(MultiplyArgs) F(weight) F(x) F(output) F(x_stride) F(output_stride) F(rows) F(is_bf16) F(threads) END
    BEGIN(MixtureArgs) F(experts) F(num_experts) F(top_k) F(x) F(ids) F(weights) F(output) F(added) F(room) F(rows)
        F(is_bf16) F(threads) END
    BEGIN(LatentWeights) F(fold) F(project) F(expand) F(query_norm) F(latent_norm) F(query_eps) F(latent_eps) END
    BEGIN(LatentArgs) F(cos) F(sin) F(latents) F(slots) F(block_stride) F(token_stride) F(heads) F(rank) F(nope)
        F(rope) F(value) F(block_size) F(rotation) F(format) END
    BEGIN(Router) F(weight) F(correction) F(num_experts) F(top_k) F(by) F(normalize) F(num_groups) F(top_groups)
        F(scale) END
    BEGIN(LayerWeights) F(qkv) F(output) F(latent) F(dense) F(router) F(experts) F(input_norm) F(post_norm) F(q_norm)
        F(k_norm) F(window) F(scale) END
    BEGIN(LowRank) F(down) F(up) F(scale) END
    BEGIN(AdapterLayer) F(query) F(key) F(value) F(expand) F(output) F(gate) F(up) F(down) END
    BEGIN(AdapterRows) F(layers) F(begin) F(end) F(first_logit) F(last_logit) END
    BEGIN(StepArgs) F(layers) F(num_layers) F(threads) F(final_norm) F(head) F(rows) F(num_logits) F(logits_rows)
        F(hidden_dim) F(hidden) F(logits) F(states) F(room) F(layer_bytes) F(rotate) F(latent) F(attend) F(adapters)
        F(num_adapters) F(is_bf16) F(eps) END
#undef BEGIN
#undef F
#undef END
    return text;
}
