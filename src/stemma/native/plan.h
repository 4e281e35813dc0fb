// What a step's attention has to read, decided once a step and used by every layer.
//
// Segment: query tokens that read the same run of keys. Sequences whose block tables begin with the same
// blocks share a segment for that part, so the KV of a common prefix is read once for all of them (cascade
// attention); the rest of each is its own segment. Long segments are cut into pieces to feed all threads.
// A token read by several pieces gets partial results that are merged at the end (as in flash-decoding).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

constexpr int ROWS = 64;          // query rows (token x head of one KV head) a work item holds
constexpr int MIN_PIECE = 256;    // keys: shorter pieces cost more to merge than they gain
constexpr int MIN_SHARED = 32;    // keys: a shorter common prefix isn't worth a segment

struct Batch {
    int num_seqs;
    const int32_t* query_starts;  // [num_seqs + 1]
    const int32_t* context_lens;  // [num_seqs]
    const int32_t* tables;        // [num_seqs, table_stride]
    int64_t table_stride;
    int block_size;
};

struct Segment {
    const int32_t* table;
    int key_begin, key_end;
    int token_begin, num_tokens;  // in Plan::tokens
};

struct Item {
    int segment, key_begin, key_end;
    int kv_head, row_begin, num_rows;
    int64_t partial;  // first slot of this piece, -1 if its tokens have no other piece
    int64_t cost;
};

struct Plan {
    int block_size, num_kv_heads, group_size, num_threads;
    std::vector<Segment> segments;
    std::vector<int32_t> tokens;       // rows of the batch, by segment
    std::vector<int32_t> positions;    // of the same tokens
    std::vector<Item> items;
    int64_t num_slots = 0;             // partial results: one per piece, token and query head
    int64_t total_cost = 0;
    std::vector<int32_t> merged;       // tokens with several pieces
    std::vector<int32_t> merged_begin; // [merged + 1], into pieces
    std::vector<int64_t> pieces;       // slot of the token's first head in each of its pieces
    std::vector<float> partials;

    void make_room(int value_dim) { partials.resize(num_slots * (value_dim + 2)); }
};

class Planner {
  public:
    Planner(const Batch& batch, Plan& plan) : batch_(batch), plan_(plan) {
        std::vector<int32_t> seqs;
        for (int s = 0; s < batch.num_seqs; s++)
            if (num_queries(s) > 0) seqs.push_back(s);
        split(seqs, 0);
        cut();
    }

  private:
    const Batch& batch_;
    Plan& plan_;

    const int32_t* table(int s) const { return batch_.tables + s * batch_.table_stride; }
    int num_queries(int s) const { return batch_.query_starts[s + 1] - batch_.query_starts[s]; }
    // Blocks that lie wholly before the sequence's first query: visible to all its queries.
    int full_blocks(int s) const { return (batch_.context_lens[s] - num_queries(s)) / batch_.block_size; }

    void add_segment(const int32_t* seqs, int count, int key_begin, int key_end) {
        Segment segment{table(seqs[0]), key_begin, key_end, int(plan_.tokens.size()), 0};
        for (int i = 0; i < count; i++) {
            int s = seqs[i], queries = num_queries(s);
            for (int j = 0; j < queries; j++) {
                plan_.tokens.push_back(batch_.query_starts[s] + j);
                plan_.positions.push_back(batch_.context_lens[s] - queries + j);
            }
            segment.num_tokens += queries;
        }
        plan_.segments.push_back(segment);
    }

    // Sequences that agree on all blocks before `block`: group them by the next ones.
    void split(std::vector<int32_t>& seqs, int block) {
        auto next = [&](int s) { return block < full_blocks(s) ? table(s)[block] : -1 - s; };
        std::sort(seqs.begin(), seqs.end(), [&](int a, int b) { return next(a) < next(b); });
        for (size_t i = 0; i < seqs.size();) {
            size_t j = i + 1;
            while (j < seqs.size() && next(seqs[j]) == next(seqs[i])) j++;
            int last = j - i > 1 ? common_blocks(&seqs[i], int(j - i), block) : block;
            if ((last - block) * batch_.block_size >= MIN_SHARED) {
                add_segment(&seqs[i], int(j - i), block * batch_.block_size, last * batch_.block_size);
                std::vector<int32_t> rest(seqs.begin() + i, seqs.begin() + j);
                split(rest, last);
            } else {
                for (size_t k = i; k < j; k++)
                    add_segment(&seqs[k], 1, block * batch_.block_size, batch_.context_lens[seqs[k]]);
            }
            i = j;
        }
    }

    int common_blocks(const int32_t* seqs, int count, int block) const {
        int limit = full_blocks(seqs[0]);
        for (int i = 1; i < count; i++) limit = std::min(limit, full_blocks(seqs[i]));
        for (int i = 1; i < count; i++) {
            const int32_t *a = table(seqs[0]), *b = table(seqs[i]);
            int end = block;
            while (end < limit && a[end] == b[end]) end++;
            limit = end;
        }
        return limit;
    }

    void cut() {
        int heads = plan_.num_kv_heads, group = plan_.group_size;
        int64_t total = 0;
        for (auto& s : plan_.segments)
            total += int64_t(s.key_end - s.key_begin) * blocks_of_rows(s.num_tokens * group) * heads;
        int64_t target = total / (4 * plan_.num_threads) + 1;
        int32_t last_token = -1;
        for (int32_t t : plan_.tokens) last_token = std::max(last_token, t);
        std::vector<std::vector<int64_t>> pieces(last_token + 1);
        std::vector<int> pieces_of_segment;
        for (size_t i = 0; i < plan_.segments.size(); i++) {
            Segment& s = plan_.segments[i];
            int keys = s.key_end - s.key_begin;
            int rows16 = std::min(blocks_of_rows(s.num_tokens * group), ROWS / 16);
            int64_t want = (int64_t(keys) * rows16 + target - 1) / target;
            int parts = int(std::max<int64_t>(1, std::min<int64_t>(want, keys / MIN_PIECE)));
            for (int p = 0; p < parts; p++) {
                for (int t = 0; t < s.num_tokens; t++)
                    pieces[plan_.tokens[s.token_begin + t]].push_back(
                        plan_.num_slots + int64_t(t) * heads * group);
                add_items(int(i), s.key_begin + int64_t(keys) * p / parts,
                          s.key_begin + int64_t(keys) * (p + 1) / parts);
                plan_.num_slots += int64_t(s.num_tokens) * heads * group;
            }
            pieces_of_segment.push_back(parts);
        }
        finish(pieces);
    }

    static int blocks_of_rows(int rows) { return (rows + 15) / 16; }

    void add_items(int index, int key_begin, int key_end) {
        const Segment& s = plan_.segments[index];
        int rows = s.num_tokens * plan_.group_size;
        for (int h = 0; h < plan_.num_kv_heads; h++)
            for (int r = 0; r < rows; r += ROWS) {
                int n = std::min(ROWS, rows - r);
                int last = plan_.positions[s.token_begin + (r + n - 1) / plan_.group_size];
                int64_t cost = int64_t(std::max(0, std::min(key_end, last + 1) - key_begin)) * blocks_of_rows(n);
                plan_.items.push_back({index, key_begin, key_end, h, r, n, plan_.num_slots, cost});
                plan_.total_cost += cost;
            }
    }

    void finish(const std::vector<std::vector<int64_t>>& pieces) {
        plan_.merged_begin.push_back(0);
        for (size_t t = 0; t < pieces.size(); t++) {
            if (pieces[t].size() < 2) continue;
            plan_.merged.push_back(int32_t(t));
            plan_.pieces.insert(plan_.pieces.end(), pieces[t].begin(), pieces[t].end());
            plan_.merged_begin.push_back(int32_t(plan_.pieces.size()));
        }
        for (auto& item : plan_.items) {  // all tokens of a segment are alike in this
            int token = plan_.tokens[plan_.segments[item.segment].token_begin];
            if (pieces[token].size() < 2) item.partial = -1;
        }
        if (plan_.merged.empty()) plan_.num_slots = 0;
        // Stable: the KV heads of one piece follow each other, and the second finds its lines fetched by the first.
        std::stable_sort(plan_.items.begin(), plan_.items.end(),
                         [](const Item& a, const Item& b) { return a.cost > b.cost; });
    }
};
