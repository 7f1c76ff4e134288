// Random hostile forests through the planner, the radix mirror, the prefix tree of batches, the plan's serialization
// and the CPU executor. `make test-asan` compiles it with ASan and UBSan. Arguments: seconds, seed.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/executor.h"
#include "cuda/serialize_plan.h"
#include "offline/prefix_tree.h"
#include "plan/planner.h"
#include "plan/radix_mirror.h"

using namespace prefixpack;

namespace {

std::mt19937_64 generator;

int64_t draw(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(generator); }
bool chance(int percent) { return draw(1, 100) <= percent; }

// A usual number, or at times one at the edge of what some integer holds.
int32_t edgy(int64_t least, int64_t most, int percent = 3) {
  if (!chance(percent)) return static_cast<int32_t>(draw(least, most));
  constexpr int64_t kEdges[] = {0, 1, 1 << 8, 1 << 12, 1 << 16, 1 << 24, 1 << 30, INT32_MAX};
  const int64_t edge = kEdges[draw(0, std::size(kEdges) - 1)] + draw(-1, 1);
  return static_cast<int32_t>(std::min<int64_t>(edge, INT32_MAX));
}
double edgy_figure(double usual) {
  constexpr double kEdges[] = {0,
                               -1,
                               1e-300,
                               1e-30,
                               1e30,
                               1e300,
                               std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN()};
  if (!chance(4)) return usual * std::exp2(static_cast<double>(draw(-8, 8)));
  return kEdges[draw(0, std::size(kEdges) - 1)];
}

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

struct Batch {
  std::shared_ptr<const Forest> forest;
  std::vector<int64_t> seq_lens, query_lens;
};

// A radix tree that grows and splits as SGLang's does, and its mirror.
class Tree {
 public:
  Batch batch(int32_t requests, int64_t longest, bool huge) {
    if (chance(5)) clear();
    for (int64_t more = draw(0, 12); more > 0; --more) grow(huge ? (int64_t{1} << draw(0, 28)) : draw(1, longest));
    if (chance(30)) split();
    if (chance(10)) put_nonsense();
    std::vector<int64_t> last, prefix;
    Batch made;
    const auto live = std::make_unique<uint8_t[]>(requests + 1);
    const int64_t new_tokens = chance(50) ? 1 : huge && chance(10) ? 1 << 22 : draw(1, 90);
    for (int32_t i = 0; i < requests; ++i) {
      const size_t node = nodes_.empty() ? 0 : draw(0, nodes_.size() - 1);
      const bool has = !nodes_.empty() && chance(90);
      last.push_back(has ? nodes_[node].id : -1);
      prefix.push_back(std::max<int64_t>(0, (has ? nodes_[node].end : 0) + (chance(10) ? draw(-20, 20) : 0)));
      live[i] = chance(95);
      const int64_t own = chance(80) ? new_tokens : draw(1, new_tokens);
      made.query_lens.push_back(own);
      made.seq_lens.push_back(prefix.back() + own + (huge ? int64_t{1} << draw(0, 30) : draw(0, longest)));
    }
    if (chance(2) && requests > 0) last[draw(0, requests - 1)] = chance(50) ? int64_t{1} << 62 : -7;
    auto forest = std::make_shared<Forest>();
    try {
      *forest = mirror_.forest(last.data(), prefix.data(), chance(50) ? live.get() : nullptr, requests);
      for (int round = 0; round < 3; ++round) {
        const auto stale = mirror_.take_stale();
        if (stale.empty()) break;
        for (const auto& [id, request] : stale) expect(request < requests && mirror_.known(id), "a stale node");
        *forest = mirror_.forest(last.data(), prefix.data(), nullptr, requests);
      }
    } catch (const std::invalid_argument&) {
      clear();
      *forest = mirror_.forest(std::vector<int64_t>(requests, -1).data(), prefix.data(), nullptr, requests);
    }
    made.forest = forest;
    return made;
  }

 private:
  struct Node {
    int64_t id;
    int64_t parent;  // index, or -1
    int32_t begin, end;
  };

  void clear() {
    nodes_.clear();
    mirror_.clear();
  }

  void grow(int64_t tokens) {
    const int64_t parent = nodes_.empty() || chance(20) ? -1
                           : chance(50)                 ? int64_t(nodes_.size()) - 1
                                                        : draw(0, nodes_.size() - 1);
    int64_t end = parent < 0 ? 0 : nodes_[parent].end;
    const auto begin = static_cast<int32_t>(end);
    const int64_t above = parent < 0 ? -1 : nodes_[parent].id;
    std::vector<int64_t> ids;
    std::vector<int32_t> ends;
    for (int64_t more = chance(5) ? draw(1, 200) : draw(1, 3); more > 0; --more) {
      if (end + tokens > INT32_MAX) break;
      nodes_.push_back({next_id_, ids.empty() ? parent : int64_t(nodes_.size()) - 1, static_cast<int32_t>(end),
                        static_cast<int32_t>(end + tokens)});
      end += tokens;
      ids.push_back(next_id_++);
      ends.push_back(static_cast<int32_t>(end));
    }
    if (!ids.empty()) put(above, begin, ids, ends, chance(50));
  }

  // The node keeps the suffix; the mirror hears of it at times.
  void split() {
    if (nodes_.empty()) return;
    const size_t index = draw(0, nodes_.size() - 1);
    Node& node = nodes_[index];
    if (node.end - node.begin < 2) return;
    const auto middle = static_cast<int32_t>(draw(node.begin + 1, node.end - 1));
    const Node upper{next_id_++, node.parent, node.begin, middle};
    node.begin = middle;
    node.parent = static_cast<int64_t>(nodes_.size());
    nodes_.push_back(upper);
    const int64_t above = upper.parent < 0 ? -1 : nodes_[upper.parent].id;
    if (chance(60)) put(above, upper.begin, {upper.id, nodes_[index].id}, {middle, nodes_[index].end}, false);
  }

  void put_nonsense() {
    const int64_t id = chance(50) || nodes_.empty() ? draw(-3, next_id_) : nodes_[draw(0, nodes_.size() - 1)].id;
    put(id, edgy(-2, 50, 30), {draw(-2, next_id_), int64_t{1} << 62}, {edgy(-2, 90, 30), edgy(-2, 90, 30)}, true);
  }

  void put(int64_t parent, int32_t begin, const std::vector<int64_t>& ids, const std::vector<int32_t>& ends,
           bool leaf) {
    try {
      mirror_.put(parent, begin, ids, ends, leaf);
    } catch (const std::invalid_argument&) {  // what a split has moved and the mirror has not heard of, or nonsense
    }
  }

  RadixMirror mirror_;
  std::vector<Node> nodes_;
  int64_t next_id_ = 0;
};

ModelShape draw_shape() {
  const auto kv_heads = edgy(1, 8, 2);
  const int64_t q_heads = int64_t{kv_heads} * draw(1, 16);
  return {static_cast<int32_t>(std::min<int64_t>(q_heads, INT32_MAX)), kv_heads,
          chance(95) ? int32_t(16 * draw(1, 16)) : edgy(1, 1 << 16, 50), edgy(1, 4, 1), edgy(2, 4, 1)};
}

DeviceModel draw_device() {
  DeviceModel device;
  device.workers = edgy(1, 300, 15);
  device.bandwidth = edgy_figure(4e12), device.flops = edgy_figure(2e14);
  device.wide_rows = chance(50) ? 0 : edgy(1, 128), device.wide_flops = edgy_figure(6e14);
  device.item_overhead = edgy_figure(4e-6), device.reread = chance(95) ? draw(0, 10) / 10.0 : edgy_figure(1);
  int64_t rows = 0;
  for (int64_t more = draw(1, 5); more > 0; --more, rows += 50) {
    device.tile_rows.push_back(edgy(rows + 1, rows + 50, 1));
  }
  if (chance(60)) {
    device.narrow_rows = edgy(0, 16), device.narrow_per_worker = edgy(1, 8);
    device.narrow_to_fill = edgy(1, std::max(1, device.narrow_per_worker));
    device.narrow_overhead = edgy_figure(5e-7), device.narrow_parts = edgy(1, 2);
    device.narrow_reread = draw(0, 10) / 10.0;
  }
  device.lone_speedup = edgy_figure(1);
  if (chance(60)) {
    device.combine_step = edgy_figure(1e-6), device.combine_rows = edgy(1, 32), device.combine_width = edgy(1, 4);
    device.combine_latency = edgy_figure(1e-6), device.combine_fan_in = edgy(1, 32);
  }
  device.overlap = draw(0, 4) / 4.0;
  if (chance(40)) {
    device.widest_flops = edgy_figure(5e14), device.medium_flops = edgy_figure(3e14);
    device.deferred_combine = edgy_figure(5e-6), device.deferred_combine_step = edgy_figure(5e-7);
  }
  return device;
}

// The items read as many positions as the queries see, and stay within the plan.
void check_plan(const Plan& plan, const Batch& batch, int64_t queries) {
  expect(plan.num_queries == queries, "the number of queries");
  int64_t read = 0, wanted = 0;
  for (int32_t i = 0; i < plan.num_queries; ++i) {
    wanted += batch.seq_lens[plan.query_request[i]] - plan.query_back[i];
  }
  for (const WorkItem& item : plan.items) {
    expect(item.query_begin >= 0 && item.query_count > 0 && item.kv_begin >= 0, "an item");
    expect(int64_t{item.query_begin} + item.query_count <= queries, "the queries of an item");
    if (item.partial_begin != kWriteThrough) {
      expect(int64_t{item.partial_begin} + item.query_count <= plan.num_partials, "the partials of an item");
    }
    for (int32_t i = item.query_begin; i < item.query_begin + item.query_count; ++i) {
      const int64_t own = batch.seq_lens[plan.query_request[i]] - plan.query_back[i];
      read += std::max<int64_t>(0, std::min<int64_t>(own, item.kv_end == kOpenEnd ? own : item.kv_end) - item.kv_begin);
    }
  }
  expect(read == wanted, "the positions that items read");
}

// With an element for every address that the plan may read or write, and none more: ASan sees the rest.
void execute(const Plan& plan, const Batch& batch, const ModelShape& shape) {
  const int32_t head_dim = shape.head_dim, q_heads = shape.q_heads, kv_heads = shape.kv_heads;
  int64_t context = 0;
  for (int64_t length : batch.seq_lens) context = std::max(context, length);
  const int64_t requests = plan.num_requests, slots = draw(1, 300), tokens = plan.num_queries;
  const auto type = static_cast<DType>(draw(0, 2)), kv_type = static_cast<DType>(draw(0, 3));
  const auto bytes = [](DType dtype) { return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat8E4M3 ? 1 : 2; };
  std::vector<char> q(tokens * q_heads * head_dim * bytes(type)), o(q.size());
  std::vector<char> k(slots * kv_heads * head_dim * bytes(kv_type)), v(k.size());
  for (auto* bits : {&q, &k, &v}) std::generate(bits->begin(), bits->end(), [] { return char(draw(0, 63)); });
  std::vector<int32_t> table(requests * context);
  for (int32_t& slot : table) slot = static_cast<int32_t>(draw(0, slots - 1));
  if (chance(5) && !table.empty()) table[draw(0, table.size() - 1)] = edgy(-1, slots, 50);
  std::vector<int64_t> rows(requests), lens = batch.seq_lens;
  for (int64_t i = 0; i < requests; ++i) rows[i] = i;
  if (chance(3) && requests > 0) rows[draw(0, requests - 1)] = chance(50) ? -1 : int64_t{1} << 40;
  if (chance(3) && requests > 0) lens[draw(0, requests - 1)] = chance(50) ? INT64_MAX : draw(-1, context + 1);
  std::vector<uint64_t> visible(tokens);
  for (uint64_t& bits : visible) bits = generator() | 1;
  std::vector<float> lse(tokens * q_heads), sinks(q_heads, 0.5f);
  std::vector<float> partial_o(int64_t{plan.num_partials} * q_heads * head_dim),
      partial_lse(int64_t{plan.num_partials} * q_heads);
  AttentionParams p{};
  p.q = q.data(), p.k = k.data(), p.v = v.data(), p.o = o.data();
  p.lse = chance(50) ? lse.data() : nullptr, p.lse_token_stride = q_heads;
  p.q_token_stride = p.o_token_stride = int64_t{q_heads} * head_dim, p.q_head_stride = p.o_head_stride = head_dim;
  p.k_slot_stride = p.v_slot_stride = int64_t{kv_heads} * head_dim, p.k_head_stride = p.v_head_stride = head_dim;
  p.req_to_token = table.data(), p.req_to_token_stride = context;
  p.req_pool_indices = rows.data(), p.seq_lens = lens.data();
  p.visible = chance(20) ? visible.data() : nullptr, p.sinks = chance(20) ? sinks.data() : nullptr;
  p.partial_o = partial_o.data(), p.partial_lse = partial_lse.data();
  p.dtype = type, p.kv_dtype = kv_type, p.q_heads = q_heads, p.kv_heads = kv_heads, p.head_dim = head_dim;
  p.window_left = chance(70) ? -1 : edgy(0, 200, 10);
  p.scale = 0.1f, p.v_scale = 1.0f, p.logit_cap = chance(20) ? 30.0f : 0.0f;
  check_inputs(plan, p, {tokens, requests, requests, context, slots});
  const char* const* isas = supported_isas();
  int64_t known = 0;
  while (isas[known] != nullptr) ++known;
  run_plan_cpu(plan, p, static_cast<int>(chance(1) ? kMostThreads : draw(1, 3)), isas[draw(0, known - 1)]);
}

void build_tree() {
  std::vector<int32_t> tokens;
  std::vector<int64_t> offsets{0};
  const int64_t letters = draw(1, 3);
  for (int64_t prompts = draw(0, 60); prompts > 0; --prompts) {
    const size_t begin = tokens.size();
    if (chance(60) && offsets.size() > 1) {  // from an earlier prompt
      const size_t other = draw(0, offsets.size() - 2);
      for (int64_t i = 0, n = draw(0, offsets[other + 1] - offsets[other]); i < n; ++i) {
        tokens.push_back(int32_t{tokens[offsets[other] + i]});
      }
    }
    for (int64_t more = chance(5) ? draw(0, 2000) : draw(0, 30); more > 0; --more) {
      tokens.push_back(chance(2) ? INT32_MIN : static_cast<int32_t>(draw(0, letters)));
    }
    expect(tokens.size() >= begin, "a prompt");
    offsets.push_back(static_cast<int64_t>(tokens.size()));
  }
  tokens.shrink_to_fit();
  const auto prompts = static_cast<int32_t>(offsets.size() - 1);
  const PrefixTree tree = build_prefix_tree({tokens.data(), offsets.data(), prompts});
  std::vector<uint8_t> in_tree(prompts);
  for (uint8_t& in : in_tree) in = chance(60);
  for (const PrefixTree& each : {tree, restricted(tree, in_tree.data())}) {
    for (int32_t node : enlarged_first_level(each)) expect(node < each.num_nodes(), "a node");
  }
}

struct Counts {
  int64_t planned = 0, refused = 0, executed = 0;
};

void round_of(Tree& tree, Counts& counts) {
  build_tree();
  const bool huge = chance(20);
  const ModelShape shape = draw_shape();
  std::unique_ptr<Planner> planner;
  try {
    planner = std::make_unique<Planner>(shape, draw_device(), edgy(0, 64, 10));
  } catch (const std::invalid_argument&) {
    ++counts.refused;
    return;
  }
  for (int step = 0; step < 4; ++step) {
    Batch batch = tree.batch(static_cast<int32_t>(draw(0, chance(5) ? 1500 : 30)), 300, huge);
    if (chance(2) && !batch.seq_lens.empty()) batch.seq_lens[0] = chance(50) ? INT64_MIN : INT64_MAX;
    if (chance(2) && !batch.query_lens.empty()) batch.query_lens[0] = chance(50) ? INT64_MIN : INT64_MAX;
    int64_t queries = 0;
    bool single = true;
    for (int64_t own : batch.query_lens) single &= own == 1;
    std::shared_ptr<const Plan> plan;
    try {
      plan = planner->plan(batch.forest, batch.seq_lens.data(), single ? nullptr : batch.query_lens.data());
      for (int64_t own : batch.query_lens) queries += own;
      if (plan->items.size() * 8 < 1 << 20) check_plan(*plan, batch, queries);
      ++counts.planned;
      if (plan->num_queries > 5000 || plan->items.size() > 20000) continue;
      const int32_t group = shape.group();
      serialize_plan(*plan, batch.seq_lens.data(), edgy(0, 64, 10), group, shape.kv_heads, edgy(0, 264, 2),
                     static_cast<int32_t>(draw(4, 8)));
      int64_t positions = 0, work = 0;
      for (size_t i = 0; i < batch.seq_lens.size(); ++i) {
        positions = std::max(positions, batch.seq_lens[i]);
        work += batch.seq_lens[i] * batch.query_lens[i];
      }
      const bool fits = shape.head_dim % 16 == 0 && shape.head_dim <= 256 && positions * plan->num_requests < 1 << 18;
      const double of_row = double(shape.q_heads) * shape.head_dim;
      if (!fits || of_row * double(work) > 1 << 25 || of_row * double(queries + plan->num_partials) > 1 << 22) continue;
      execute(*plan, batch, shape);
      ++counts.executed;
      for (int64_t& length : batch.seq_lens) length += draw(0, 3);
      planner->plan(batch.forest, batch.seq_lens.data(), single ? nullptr : batch.query_lens.data());
    } catch (const std::invalid_argument&) {
      ++counts.refused;
    } catch (const std::overflow_error&) {
      ++counts.refused;
    } catch (const std::bad_alloc&) {
      ++counts.refused;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 120;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device()();
  std::printf("seed %llu, %.0f s\n", static_cast<unsigned long long>(seed), seconds);
  std::fflush(stdout);
  generator.seed(seed);
  const auto start = std::chrono::steady_clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  Tree tree;
  Counts counts;
  int64_t rounds = 0;
  for (; passed() < seconds; ++rounds) round_of(tree, counts);
  std::printf("%lld rounds: %lld plans, %lld of them run, %lld refused\n", static_cast<long long>(rounds),
              static_cast<long long>(counts.planned), static_cast<long long>(counts.executed),
              static_cast<long long>(counts.refused));
  return counts.planned > 0 && counts.executed > 0 ? 0 : 1;
}
