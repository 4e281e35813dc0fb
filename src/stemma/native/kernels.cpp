// Kernels of a decoder on CPU, called from Python through ctypes (native/library.py): what lies between the
// matrix products of a layer (norm, rotary embedding, KV write, paged attention, gated activation), and whole
// steps.
#include <omp.h>

#include "abi.h"
#include "attention.h"
#include "copy.h"
#include "decoder_step.h"
#include "layers.h"

constexpr int64_t SERIAL_ELEMENTS = 1 << 15;  // less work than this isn't worth waking threads
constexpr int64_t SERIAL_COST = 1 << 10;      // keys x blocks of 16 rows, likewise

template <class F>
static void for_rows(int64_t rows, int64_t elements, int threads, F&& body) {
    if (threads < 2 || elements < SERIAL_ELEMENTS) {
        for (int64_t i = 0; i < rows; i++) body(i);
    } else {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t i = 0; i < rows; i++) body(i);
    }
}

template <class T>
static void add_rms_norm(const NormArgs& a) {
    for_rows(a.rows, a.rows * a.dim, a.threads, [&](int64_t i) { add_rms_norm_row<T>(a, i); });
}

template <class T>
static void rotate_and_write(const RotateArgs& a) {
    for_rows(a.tokens, a.tokens * a.width(), a.threads, [&](int64_t i) { rotate_and_write_token<T>(a, i); });
}

template <class T>
static void silu_and_multiply(const GateArgs& a) {
    for_rows(a.rows, a.rows * a.dim * 2, a.threads, [&](int64_t i) {
        silu_and_multiply_row((const T*)a.gate_up + i * 2 * a.dim, (T*)a.output + i * a.dim, a.dim);
    });
}

template <class T>
static void attend(Plan& plan, const AttendArgs& args) {
    plan.make_room(args.value_dim);
    int threads = plan.total_cost < SERIAL_COST ? 1 : plan.num_threads;
    int num_items = int(plan.items.size()), num_merged = int(plan.merged.size());
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        static thread_local Scratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < num_items; i++) run_item_any<T>(args, plan, plan.items[i], scratch);
#pragma omp for schedule(static)
        for (int i = 0; i < num_merged; i++) merge_token<T>(args, plan, i);
    }
}

extern "C" {

const char* stemma_structures() {
    static const std::string text = describe_structures();
    return text.c_str();
}
void stemma_copy(char* target, const char* source, int64_t num_bytes) { stream_copy(target, source, num_bytes); }

// Whether tiles may be used: the system may refuse them to a process although the processor has them.
int32_t stemma_tiles_ready() {
#if STEMMA_AMX
    return amx_ready();
#else
    return 0;
#endif
}
int32_t stemma_has_amx() { return STEMMA_AMX; }
int32_t stemma_has_bf16_dot() { return STEMMA_BF16_DOT; }

Plan* stemma_plan_new(const Batch* batch, int32_t num_kv_heads, int32_t group_size, int32_t num_threads) {
    Plan* plan = new Plan;
    plan->block_size = batch->block_size;
    plan->num_kv_heads = num_kv_heads;
    plan->group_size = group_size;
    plan->num_threads = num_threads;
    Planner(*batch, *plan);
    return plan;
}

void stemma_plan_free(Plan* plan) { delete plan; }
int64_t stemma_plan_cost(const Plan* plan) { return plan->total_cost; }

void stemma_attend(Plan* plan, const AttendArgs* args) {
    args->is_bf16 ? attend<bf16>(*plan, *args) : attend<float>(*plan, *args);
}
void stemma_add_rms_norm(const NormArgs* args) {
    args->is_bf16 ? add_rms_norm<bf16>(*args) : add_rms_norm<float>(*args);
}
void stemma_rotate_and_write(const RotateArgs* args) {
    args->is_bf16 ? rotate_and_write<bf16>(*args) : rotate_and_write<float>(*args);
}
void stemma_silu_and_multiply(const GateArgs* args) {
    args->is_bf16 ? silu_and_multiply<bf16>(*args) : silu_and_multiply<float>(*args);
}
#if STEMMA_BF16_DOT
int64_t stemma_decoder_step_room(const StepArgs* args) { return Room(*args).bytes; }
void stemma_decoder_step(Plan* plan, const StepArgs* args) {
    plan->make_room(args->attend.value_dim);
    with_team(args->threads, [&](Team& team, int member) { DecoderStep(*args, *plan, team, member).run(); });
}
void stemma_take_rows(const Strips* weight, const int64_t* ids, int64_t count, bf16* out, int32_t threads) {
    for_rows(count, count * weight->k, threads, [&](int64_t i) { take_row(*weight, ids[i], out + i * weight->k); });
}
#endif
}
