// What a step's attention has to read, decided once a step and used by every layer.
//
// Segment: query tokens that read the same run of keys. Sequences of few queries whose block tables begin with
// the same blocks share segments for that part, so the KV of a common prefix is read once for all of them (cascade
// attention); the rest of each is its own segment. Long segments are cut into pieces to feed all threads.
//
// All cuts lie at multiples of SPLIT keys, where attention.h ends one partial result and begins the next whatever
// the plan says. So a plan decides who computes what, and when, but never a bit of the result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

constexpr int ROWS = 64;    // query rows (token x head of one KV head) a work item holds
constexpr int SPLIT = 256;  // keys of a partial result; part of the numeric path: see attention.h
constexpr int PIECES_PER_THREAD = 4;
constexpr int MOST_BUNDLED = 4;  // items
constexpr int64_t SLOTS_PER_THREAD = 1 << 14;  // of one segment; what would need more memory isn't cut

struct BatchArgs {
    int num_seqs;
    const int32_t* query_starts;  // [num_seqs + 1]
    const int32_t* context_lens;  // [num_seqs]
    const int32_t* tables;        // [num_seqs, table_stride]
    int64_t table_stride;
    int block_size;
    const int32_t* limits;  // [rows]: keys that a row sees, rising within a sequence; null: all up to its own
};

struct Segment {
    const int32_t* table;
    int key_begin, key_end;       // key_begin is a multiple of SPLIT
    int token_begin, num_tokens;  // in Plan::tokens
};

// Rows [row_begin, row_begin + num_rows) of the segment, for each of `num_heads` KV heads.
struct Item {
    int segment, key_begin, key_end;
    int first_head, num_heads, row_begin, num_rows;
    int64_t partial;  // first slot of this piece, -1 if its tokens have no other piece
    int64_t cost;

    // What begins at the first key merges its splits itself; a later piece keeps a slot for each.
    bool merges() const { return key_begin == 0; }
};

// Items after each other, of one run of keys, one KV head and neighbouring rows: a thread takes them together.
struct Bundle {
    int first, count;
    int64_t cost;
};

struct Plan {
    int block_size, num_kv_heads, group_size, num_threads;
    std::vector<Segment> segments;
    std::vector<int32_t> tokens;       // rows of the batch, by segment
    std::vector<int32_t> positions;    // of the same tokens
    std::vector<Item> items;
    std::vector<Bundle> bundles, needed_bundles;  // of all items; of those that the tokens of need() want
    int64_t num_slots = 0;             // partial results: of one split (or merged ones), token and query head
    int64_t total_cost = 0;
    std::vector<int32_t> merged;       // tokens with several slots
    std::vector<int32_t> merged_begin; // [merged + 1], into slots
    std::vector<int64_t> slots;        // those of the token's first head, in order of keys
    std::vector<float> partials;
    std::vector<int32_t> needed_merged;  // places of those that the tokens of need() want

    int num_heads() const { return num_kv_heads * group_size; }
    void make_room(int value_dim) { partials.resize(num_slots * (value_dim + 2)); }

    // Of the last layer only rows with logits are read: find the items and merges that these tokens want.
    void need(const int64_t* rows, int64_t count) {
        std::vector<char> is_needed(last_token() + 1);
        for (int64_t i = 0; i < count; i++) is_needed[rows[i]] = 1;
        needed_bundles.clear(), needed_merged.clear();
        for (size_t i = 0; i < items.size(); i++) {
            const Item& item = items[i];
            const int32_t* at = &tokens[segments[item.segment].token_begin];
            const int first = item.row_begin / group_size, last = (item.row_begin + item.num_rows - 1) / group_size;
            if (std::any_of(at + first, at + last + 1, [&](int32_t t) { return is_needed[t]; }))
                needed_bundles.push_back({int(i), 1, item.cost});
        }
        for (size_t i = 0; i < merged.size(); i++)
            if (is_needed[merged[i]]) needed_merged.push_back(int32_t(i));
    }
    int32_t last_token() const { return tokens.empty() ? -1 : *std::max_element(tokens.begin(), tokens.end()); }
};

class Planner {
  public:
    Planner(const BatchArgs& batch, Plan& plan) : batch_(batch), plan_(plan) {
        unit_ = int(std::lcm(int64_t(SPLIT), int64_t(batch.block_size)) / batch.block_size);
        std::vector<int32_t> seqs;
        for (int s = 0; s < batch.num_seqs; s++) {
            if (num_queries(s) * plan.group_size > ROWS) add_segment(&s, 1, 0, batch.context_lens[s]);
            else if (num_queries(s) > 0) seqs.push_back(s);
        }
        split(seqs, 0);
        cut();
    }

  private:
    const BatchArgs& batch_;
    Plan& plan_;
    int unit_;  // blocks: the least prefix that can be shared, a whole number of splits

    const int32_t* table(int s) const { return batch_.tables + s * batch_.table_stride; }
    int num_queries(int s) const { return batch_.query_starts[s + 1] - batch_.query_starts[s]; }
    // Position of the j-th query of a sequence; where limits are given, of the last key that it sees, or -1.
    int position(int s, int j) const {
        if (batch_.limits) return batch_.limits[batch_.query_starts[s] + j] - 1;
        return batch_.context_lens[s] - num_queries(s) + j;
    }
    // Units that lie wholly before the sequence's first query: visible to all its queries.
    int full_units(int s) const { return std::max(0, position(s, 0)) / batch_.block_size / unit_; }

    void add_segment(const int32_t* seqs, int count, int key_begin, int key_end) {
        Segment segment{table(seqs[0]), key_begin, key_end, int(plan_.tokens.size()), 0};
        for (int i = 0; i < count; i++) {
            int s = seqs[i], queries = num_queries(s);
            for (int j = 0; j < queries; j++) {
                plan_.tokens.push_back(batch_.query_starts[s] + j);
                plan_.positions.push_back(position(s, j));
            }
            segment.num_tokens += queries;
        }
        plan_.segments.push_back(segment);
    }

    // How two sequences compare by their blocks of one unit; those that end before it come first, each by itself.
    int compare(int a, int b, int unit) const {
        bool has_a = unit < full_units(a), has_b = unit < full_units(b);
        if (!has_a || !has_b) return has_a != has_b ? int(has_a) - int(has_b) : a < b ? -1 : a > b;
        const int32_t *x = table(a) + int64_t(unit) * unit_, *y = table(b) + int64_t(unit) * unit_;
        for (int i = 0; i < unit_; i++)
            if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
        return 0;
    }

    // Sequences that agree on all units before `unit`: group them by the next ones.
    void split(std::vector<int32_t>& seqs, int unit) {
        int begin = unit * unit_ * batch_.block_size;
        std::sort(seqs.begin(), seqs.end(), [&](int a, int b) { return compare(a, b, unit) < 0; });
        for (size_t i = 0, j; i < seqs.size(); i = j) {
            for (j = i + 1; j < seqs.size() && compare(seqs[i], seqs[j], unit) == 0;) j++;
            if (j - i == 1) {
                add_segment(&seqs[i], 1, begin, batch_.context_lens[seqs[i]]);
                continue;
            }
            int last = unit + 1;
            auto agree = [&] {
                for (size_t k = i + 1; k < j; k++)
                    if (compare(seqs[i], seqs[k], last)) return false;
                return true;
            };
            while (agree()) last++;
            add_segment(&seqs[i], int(j - i), begin, last * unit_ * batch_.block_size);
            std::vector<int32_t> rest(seqs.begin() + i, seqs.begin() + j);
            split(rest, last);
        }
    }

    static int blocks_of_rows(int rows) { return (rows + 15) / 16; }
    static int64_t pieces_of(int64_t keys) { return (keys + SPLIT - 1) / SPLIT; }

    // Keys are cut where there would be too few pieces of work otherwise; KV heads last of all, since those of a
    // token lie side by side.
    void cut() {
        int heads = plan_.num_kv_heads, group = plan_.group_size;
        int64_t total = 0;
        for (auto& s : plan_.segments)
            total += int64_t(s.key_end - s.key_begin) * blocks_of_rows(s.num_tokens * group) * heads;
        const int64_t target = total / (PIECES_PER_THREAD * plan_.num_threads) + 1;
        std::vector<std::vector<int64_t>> slots(plan_.last_token() + 1);
        for (size_t i = 0; i < plan_.segments.size(); i++) {
            const Segment& s = plan_.segments[i];
            int rows = s.num_tokens * group, keys = s.key_end - s.key_begin;
            int together = rows <= 16 ? heads : 1;  // KV heads of an item
            int64_t cost = int64_t(keys) * std::min(blocks_of_rows(rows), ROWS / 16) * together;
            int64_t want = std::max<int64_t>(1, (cost + target - 1) / target), splits = pieces_of(keys);
            int64_t parts = std::min(want, splits);
            if (splits * s.num_tokens * plan_.num_heads() > SLOTS_PER_THREAD * plan_.num_threads) parts = 1;
            if (parts < want && together > 1) together = int(std::max<int64_t>(1, together * parts / want));
            for (int64_t p = 0; p < parts; p++) {
                int begin = s.key_begin + int(splits * p / parts) * SPLIT;
                int end = std::min<int64_t>(s.key_end, s.key_begin + splits * (p + 1) / parts * SPLIT);
                add_items(int(i), begin, end, together);
                int64_t kept = begin == 0 ? 1 : pieces_of(end - begin);
                for (int64_t k = 0; k < kept; k++)
                    for (int t = 0; t < s.num_tokens; t++)
                        slots[plan_.tokens[s.token_begin + t]].push_back(
                            plan_.num_slots + (k * s.num_tokens + t) * plan_.num_heads());
                plan_.num_slots += kept * s.num_tokens * plan_.num_heads();
            }
        }
        finish(slots);
    }

    void add_items(int index, int key_begin, int key_end, int together) {
        const Segment& s = plan_.segments[index];
        int rows = s.num_tokens * plan_.group_size;
        for (int h = 0; h < plan_.num_kv_heads; h += together)
            for (int r = 0; r < rows; r += ROWS) {
                int n = std::min(ROWS, rows - r), heads = std::min(together, plan_.num_kv_heads - h);
                int last = plan_.positions[s.token_begin + (r + n - 1) / plan_.group_size];
                int keys = std::max(0, std::min(key_end, last + 1) - key_begin);
                int64_t cost = int64_t(keys) * blocks_of_rows(n) * heads;
                plan_.items.push_back({index, key_begin, key_end, h, heads, r, n, plan_.num_slots, cost});
                plan_.total_cost += cost;
            }
    }

    void finish(const std::vector<std::vector<int64_t>>& slots) {
        plan_.merged_begin.push_back(0);
        for (size_t t = 0; t < slots.size(); t++) {
            if (slots[t].size() < 2) continue;
            plan_.merged.push_back(int32_t(t));
            plan_.slots.insert(plan_.slots.end(), slots[t].begin(), slots[t].end());
            plan_.merged_begin.push_back(int32_t(plan_.slots.size()));
        }
        for (auto& item : plan_.items) {  // all tokens of a segment are alike in this
            int token = plan_.tokens[plan_.segments[item.segment].token_begin];
            if (slots[token].size() < 2) item.partial = -1;
        }
        if (plan_.merged.empty()) plan_.num_slots = 0;
        bundle();
    }

    static bool same_keys(const Item& a, const Item& b) {
        return a.segment == b.segment && a.key_begin == b.key_begin && a.first_head == b.first_head;
    }
    // Bundles of as many items as possible, `most` at most.
    void bundle(int most) {
        plan_.bundles.clear();
        for (size_t i = 0; i < plan_.items.size(); i++) {
            const Item& item = plan_.items[i];
            if (i > 0 && same_keys(item, plan_.items[i - 1]) && plan_.bundles.back().count < most) {
                plan_.bundles.back().count++, plan_.bundles.back().cost += item.cost;
                continue;
            }
            plan_.bundles.push_back({int(i), 1, item.cost});
        }
    }
    // Keys and values come into the caches once for a bundle. There are fewer items in one where threads would wait.
    void bundle() {
        const auto shares_out = [&] {
            const size_t count = plan_.bundles.size(), threads = plan_.num_threads;
            return count % threads == 0 || count >= PIECES_PER_THREAD * threads;
        };
        int most = MOST_BUNDLED;
        bundle(most);
        while (most > 1 && !shares_out()) bundle(--most);
        // Stable: pieces with equal costs are read in order of keys.
        std::stable_sort(plan_.bundles.begin(), plan_.bundles.end(),
                         [](const Bundle& a, const Bundle& b) { return a.cost > b.cost; });
    }
};
