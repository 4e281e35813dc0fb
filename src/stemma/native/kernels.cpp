// Kernels of a decoder on CPU, called from Python through ctypes (native/library.py): what lies between the
// matrix products of a layer (norm, rotary embedding, KV write, paged attention, gated activation), and whole
// steps.
#include <omp.h>

#include "attention.h"
#include "blocks.h"
#include "compressing.h"
#include "copy.h"
#include "decoder_step.h"
#include "kv_codec.h"
#include "layers.h"
#include "limits.h"
#include "masks.h"
#include "mixture.h"
#include "products.h"
#include "scan.h"
#include "selection.h"
#include "units.h"

#include "layouts.h"  // written for the build by structures.py; needs all of the above

constexpr int64_t SERIAL_ELEMENTS = 1 << 15;  // less work than this isn't worth waking threads
constexpr int64_t SERIAL_PRODUCTS = 1 << 18;  // multiplications, likewise
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
static void silu_and_multiply(const GateArgs& a) {
    for_rows(a.rows, a.rows * a.dim * 2, a.threads, [&](int64_t i) {
        silu_and_multiply_row((const T*)a.gate_up + i * 2 * a.dim, (T*)a.output + i * a.dim, a.dim);
    });
}

template <class T>
static void write_rows(const WriteArgs& a) {
    for_rows(a.tokens, a.tokens * a.heads * a.dim, a.threads, [&](int64_t i) { write_token<T>(a, i); });
}

template <class T>
static void attend(Plan& plan, const AttendArgs& args) {
    plan.make_room(args.value_dim);
    int threads = plan.total_cost < SERIAL_COST ? 1 : plan.num_threads;
    int num_bundles = int(plan.bundles.size()), num_merged = int(plan.merged.size());
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        static thread_local Scratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < num_bundles; i++) run_bundle<T>(args, plan, plan.bundles[i], scratch);
#pragma omp for schedule(static)
        for (int i = 0; i < num_merged; i++) merge_token<T>(args, plan, i);
    }
}

template <class T>
static void merge_parts(const MergeArgs& a) {
    for_rows(a.rows, a.rows * a.heads * a.value_dim * a.num_parts, a.threads,
             [&](int64_t i) { merge_parts_of<T>(a, i); });
}

template <class T>
static void run_step(Plan& plan, const StepArgs& args) {
    with_team(args.threads, [&](Team& team, int member) { DecoderStep<T>(args, plan, team, member).run(); });
}

template <class T>
static void pack(const PackArgs& a) {
    int64_t first = a.first / STRIP, last = (a.first + a.rows + STRIP - 1) / STRIP;
    for_rows(last - first, a.rows * a.target.k, a.threads, [&](int64_t i) { pack_strip<T>(a, first + i); });
}

template <class T>
static void take_rows(const Strips& weight, const int64_t* ids, int64_t count, T* out, int threads) {
    for_rows(count, count * weight.k, threads, [&](int64_t i) {
        T* row = out + i * weight.k;
        if (weight.patches)
            take_compressed_row(weight, ids[i], (bf16*)row);
        else if (weight.codes.bits)
            take_dequantized_row(weight, ids[i], row);
        else
            take_row(weight, ids[i], row);
    });
}

template <class T>
static void multiply(const MultiplyArgs& a) {
    static thread_local std::vector<char> room;
    room.resize(bytes_of_inputs<T>(a.rows, a.weight) + 64);
    char* inputs = room.data() + (-(uintptr_t)room.data() & 63);
    with_team(a.rows * a.weight.n * a.weight.k < SERIAL_PRODUCTS ? 1 : a.threads, [&](Team& team, int member) {
        TileScope tiles;
        multiply(team, member, a.weight, (const T*)a.x, a.x_stride, a.rows, (T*)a.output, a.output_stride, inputs);
    });
}

template <class T>
static void mix(const MixtureArgs& a) {
    with_team(a.threads, [&](Team& team, int member) {
        TileScope tiles;
        run_mixture<T>(team, member, a);
    });
}

// Pieces of `width` columns of all sequences, `heads` times `columns` each
template <class F>
static void for_pieces(const StateRows& rows, int64_t heads, int64_t columns, int64_t width, F&& body) {
    const int64_t across = (columns + width - 1) / width, each = heads * across;
#pragma omp parallel for num_threads(rows.threads) schedule(dynamic, 1) if (rows.threads > 1)
    for (int64_t i = 0; i < rows.num_sequences * each; i++)
        body(i / each, i % each / across, i % across * width);
}

extern "C" {

void stemma_copy(char* target, const char* source, int64_t num_bytes) { stream_copy(target, source, num_bytes); }
void stemma_copy_runs(char* const* targets, const char* const* sources, const int64_t* sizes, int64_t count) {
    for (int64_t run = 0; run < count; run++) stream_copy(targets[run], sources[run], sizes[run]);
}

int64_t stemma_kv_room(int64_t num_bytes, int64_t period, int64_t rows) { return codec_room(num_bytes, period, rows); }
int64_t stemma_pack_kv(const void* source, int64_t num_bytes, int64_t period, int64_t rows, void* target) {
    return pack_kv(source, num_bytes, period, rows, target);
}
int32_t stemma_unpack_kv(const void* source, int64_t size, int64_t period, int64_t rows, void* target, int64_t num_bytes) {
    return unpack_kv(source, size, period, rows, target, num_bytes);
}

// Whether tiles may be used: the system may refuse them to a process although the processor has them.
int32_t stemma_tiles_ready() {
#if STEMMA_AMX
    return amx_ready();
#else
    return 0;
#endif
}
Plan* stemma_plan_new(const BatchArgs* batch, int32_t num_kv_heads, int32_t group_size, int32_t num_threads) {
    Plan* plan = new Plan;
    plan->block_size = batch->block_size;
    plan->num_kv_heads = num_kv_heads;
    plan->group_size = group_size;
    plan->num_threads = num_threads;
    Planner(*batch, *plan);
    return plan;
}

void stemma_plan_free(Plan* plan) { delete plan; }

void stemma_attend(Plan* plan, const AttendArgs* args) {
    args->is_bf16 ? attend<bf16>(*plan, *args) : attend<float>(*plan, *args);
}
void stemma_merge_parts(const MergeArgs* args) {
    args->is_bf16 ? merge_parts<bf16>(*args) : merge_parts<float>(*args);
}
void stemma_write_rows(const WriteArgs* args) {
    args->is_bf16 ? write_rows<bf16>(*args) : write_rows<float>(*args);
}
void stemma_add_rms_norm(const NormArgs* args) {
    args->is_bf16 ? add_rms_norm<bf16>(*args) : add_rms_norm<float>(*args);
}
void stemma_silu_and_multiply(const GateArgs* args) {
    args->is_bf16 ? silu_and_multiply<bf16>(*args) : silu_and_multiply<float>(*args);
}
int64_t stemma_decoder_step_room(const StepArgs* args) {
    return args->is_bf16 ? Room<bf16>(*args).bytes : Room<float>(*args).bytes;
}
void stemma_decoder_step(Plan* plan, const StepArgs* args) {
    for (Plan* each : {plan, args->pages.plan}) {
        if (each == nullptr) continue;
        each->make_room(args->attend.value_dim);
        each->need(args->logits_rows, args->num_logits);
    }
    args->is_bf16 ? run_step<bf16>(*plan, *args) : run_step<float>(*plan, *args);
}
int64_t stemma_packed_bytes(const Strips* weight, int32_t is_bf16) {
    if (weight->codes.bits) return bytes_of_codes(*weight);
    int64_t steps = is_bf16 ? weight->steps<bf16>() : weight->steps<float>();
    return weight->count() * steps * STEP_BYTES;
}
void stemma_pack(const PackArgs* args) { args->is_bf16 ? pack<bf16>(*args) : pack<float>(*args); }
void stemma_pack_codes(const PackCodesArgs* args) {
    const PackCodesArgs& a = *args;
    int64_t first = a.first / STRIP, last = (a.first + a.rows + STRIP - 1) / STRIP;
    for_rows(last - first, a.rows * a.target.k, a.threads, [&](int64_t i) { pack_codes(a, first + i); });
}
void stemma_spread(const SpreadArgs* args) {
    const SpreadArgs& a = *args;
    const CodeFields& f = a.fields;
    for_rows(a.blocks, a.blocks * f.num_bytes, a.threads,
             [&](int64_t block) { spread_block(f, block, a.out + block * f.count()); });
}
void stemma_select_tokens(const SelectionArgs* args) {
    args->is_bf16 ? select_tokens<bf16>(*args) : select_tokens<float>(*args);
}
void stemma_scan(const ScanArgs* args) {
    for_pieces(args->rows, args->heads, args->value_dim, PANELS * LANES,
               [&](int64_t sequence, int64_t head, int64_t first) { scan_piece(*args, sequence, head, first); });
}
void stemma_select(const SelectiveArgs* args) {
    for_pieces(args->rows, 1, args->channels, LANES,
               [&](int64_t sequence, int64_t, int64_t first) { select_piece(*args, sequence, first); });
}
void stemma_convolve(const ConvolveArgs* args) {
    for_pieces(args->rows, 1, args->channels, LANES,
               [&](int64_t sequence, int64_t, int64_t first) { convolve_piece<float>(*args, sequence, first); });
}
int32_t stemma_reads_compressed() { return STEMMA_COMPRESSED; }
int64_t stemma_compressed_bytes(const Strips* weight) { return weight->count() * CompressedStrip::bytes(*weight); }
void stemma_compress(const CompressArgs* args) {
#if STEMMA_COMPRESSED
    const CompressArgs& a = *args;
    for_rows(a.target.count(), a.target.n * a.target.k, a.threads, [&](int64_t i) { compress_strip(a, i); });
#endif
}
// Whether products of bytes have an instruction here; `allowed` = 0 has the next ones done without it, for tests.
int32_t stemma_byte_dots(int32_t allowed) {
    byte_dots_allowed = allowed;
    return has_byte_dots();
}
void stemma_multiply(const MultiplyArgs* args) { args->is_bf16 ? multiply<bf16>(*args) : multiply<float>(*args); }
int64_t stemma_mixture_room(const MixtureArgs* args) {
    return args->is_bf16 ? bytes_of_mixture<bf16>(*args) : bytes_of_mixture<float>(*args);
}
void stemma_mixture(const MixtureArgs* args) { args->is_bf16 ? mix<bf16>(*args) : mix<float>(*args); }
// For benchmarks: floating-point operations done by all threads, on registers alone.
int64_t stemma_multiply_registers(int64_t rounds, int32_t is_bf16, int32_t threads) {
    int64_t total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    total += is_bf16 ? multiply_registers<bf16>(rounds) : multiply_registers<float>(rounds);
    return total;
}
float stemma_read_memory(const char* data, int64_t num_bytes, int32_t threads) {
    float total = 0;
    const int64_t pieces = num_bytes >> 20;  // of a megabyte, so that all threads end together
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(+ : total)
    for (int64_t i = 0; i < pieces; i++) total += read_memory(data + (i << 20), 1 << 20);
    return total;
}
int64_t stemma_masked_argmax(const float* x, const uint32_t* mask, int64_t n) { return masked_argmax(x, mask, n); }
void stemma_take_rows(const Strips* weight, const int64_t* ids, int64_t count, void* out, int32_t is_bf16,
                      int32_t threads) {
    is_bf16 ? take_rows(*weight, ids, count, (bf16*)out, threads) : take_rows(*weight, ids, count, (float*)out, threads);
}
}
