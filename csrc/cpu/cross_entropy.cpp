// The cross entropy of a linear layer: cuts the work into slabs of rows and words, and shares them among threads. If
// all words fit one slab, each thread's logits stay in its cache from the product to the gradients. Else a first pass
// finds each row's maximum and sum, and a second one computes the logits again.
#include "cross_entropy.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core.h"

namespace fr {
namespace cpu {
namespace {

// Rows of a slab: a depth block of the product over rows (outer.h), and enough for every thread.
constexpr int64_t kSlabRows = 128, kRowsPerThread = kTileRows;
// Multiply-adds below which another thread costs more than it saves.
constexpr int64_t kWorkPerThread = 1 << 17;

void check(const CrossEntropyArgs& args) {
  const int type = static_cast<int>(args.type);
  require(type == 0 || type == 1, "type", [&] { return "float32 (0) or float64 (1), got " + std::to_string(type); });
  require(args.rows >= 0 && args.words > 0 && args.depth > 0, "sizes", "rows >= 0, words > 0 and depth > 0");
  require(args.input_stride >= args.depth && args.weight_stride >= args.depth, "strides", "rows that do not overlap");
  require(args.slab_bytes > 0 && args.threads > 0, "slab_bytes, threads", "values above zero");
  const int64_t size = storage_bytes(args.type);
  const bool rows = args.rows > 0;
  check_address(args.input, size, "input", rows), check_address(args.weight, size, "weight", rows);
  check_address(args.target, 8, "target", rows), check_address(args.loss, size, "loss", rows);
  check_address(args.total, size, "total", true);
  for (const void* optional : {args.bias, args.label_logit, args.row_gradient, static_cast<const void*>(args.d_input),
                               static_cast<const void*>(args.d_weight), static_cast<const void*>(args.d_bias),
                               static_cast<const void*>(args.d_label_logit)})
    check_address(optional, size, "optional arguments", false);
}

// The rows that are not ignored. Throws std::out_of_range for a bad target.
std::vector<int64_t> taking_part(const CrossEntropyArgs& args) {
  std::vector<int64_t> rows;
  rows.reserve(args.rows);
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t target = args.target[row];
    if (!args.label_logit && target == args.ignore_index) continue;
    if (target >= args.words || target < (args.label_logit ? -1 : 0))
      throw std::out_of_range("target: expected classes from 0 to " + std::to_string(args.words - 1) + ", got " + std::to_string(target));
    rows.push_back(row);
  }
  return rows;
}

struct Work {
  const CrossEntropyArgs& args;
  const CrossEntropyKernels& kernels;
  LogitsSlab slab{};
  int64_t size = 0;           // rows of the slab
  int64_t together = 0;       // rows whose logits stay in a core's cache
  bool gradients = false;     // whether any gradient is wanted
  double scale = 1;
  Outer outer{};
  bool first = true;
  std::vector<void*> tiles{}, left{}, right{};  // of each thread

  // Calls body(begin, end) for each block of rows of thread `index` of `count`.
  template <class Body>
  void for_each_block(int index, int count, Body body) const {
    const int64_t begin = size * index / count, end = size * (index + 1) / count;
    const int64_t blocks = (end - begin + together - 1) / together;
    for (int64_t block = 0; block < blocks; ++block)
      body(begin + (end - begin) * block / blocks, begin + (end - begin) * (block + 1) / blocks);
  }
};

template <class T>
void total_of(const CrossEntropyArgs& args, const std::vector<int64_t>& rows) {
  double sum = 0;
  for (const int64_t row : rows) sum += static_cast<const T*>(args.loss)[row];
  *static_cast<T*>(args.total) =
      static_cast<T>(!args.mean ? sum : rows.empty() ? std::numeric_limits<double>::quiet_NaN() : sum / static_cast<double>(rows.size()));
}

}  // namespace
}  // namespace cpu

void cpu_cross_entropy(const CrossEntropyArgs& args) {
  using namespace cpu;
  check(args);
  const std::vector<int64_t> rows = taking_part(args);
  const int64_t count = static_cast<int64_t>(rows.size()), element = storage_bytes(args.type);
  if (count < args.rows) {
    std::memset(args.loss, 0, args.rows * element);
    if (args.d_input) std::memset(args.d_input, 0, args.rows * args.depth * element);
  }
  Work work{args, choose_cross_entropy(args.type)};
  const CrossEntropyKernels& kernels = work.kernels;
  const int64_t work_of_threads = count * args.words * args.depth / kWorkPerThread;
  const int threads = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(args.threads, work_of_threads)));
  work.gradients = args.d_input || args.d_weight || args.d_bias || args.d_label_logit;
  work.scale = args.mean && count ? 1.0 / static_cast<double>(count) : 1.0;

  // A slab has all words, rounded up to whole panels, or as many as fit with kSlabRows rows.
  const auto panels = [&](int64_t words) { return (words + kernels.panel_words - 1) / kernels.panel_words; };
  const int64_t most = std::max<int64_t>(1, args.slab_bytes / (kSlabRows * element * kernels.panel_words)) * kernels.panel_words;
  const int64_t words = std::min(args.words, most);
  int64_t stride = panels(words) * kernels.panel_words;
  if (stride * element % 4096 == 0) stride += kernels.panel_words;  // else all rows share a set of L1's lines
  const bool whole = words == args.words;
  const int64_t slab_rows =
      std::min(count, std::max(kSlabRows, std::min(kRowsPerThread * threads, args.slab_bytes / (stride * element))));
  // Rows of a block: as many as keep their logits in cache. But every block reads all weights, and with a large depth
  // those reads cost more than the few passes over the logits: then a block has more rows.
  const int64_t near_rows = std::max(kernels.near_bytes / (stride * element), args.depth / 8);
  work.together = std::clamp(near_rows / kernels.group_rows * kernels.group_rows, std::min(kernels.group_rows, kTileRows), kTileRows);

  LogitsSlab& slab = work.slab;
  slab.args = &args, slab.stride = stride;
  slab.logits.source = {args.weight, args.weight_stride, false, args.words, args.bias, args.words, args.depth};
  const auto set_words = [&](int64_t word0) {
    slab.word0 = word0, slab.words = std::min(words, args.words - word0);
    const void* weight = static_cast<const char*>(args.weight) + word0 * args.weight_stride * element;
    slab.transposed.source = transposed_source(weight, args.weight_stride, args.depth, slab.words);
  };
  set_words(0);

  Arena arena;
  char* values;
  // With several slabs of words, each block of weights is packed when it is used.
  const bool pack = whole && count > kTileRows;
  if (pack) arena.want(slab.logits.panels, kernels.packed_bytes(slab.logits.source));
  if (pack && args.d_input) arena.want(slab.transposed.panels, kernels.packed_bytes(slab.transposed.source));
  arena.want(values, slab_rows * stride * element);
  for (void** each : {&slab.shift, &slab.maximum, &slab.sum, &slab.label}) arena.want(*each, slab_rows * element);
  // + 1: gives an address even if there are no rows
  std::vector<const void*> left_rows(slab_rows + 1), right_rows(slab_rows + 1);
  work.tiles.resize(threads), work.left.resize(threads), work.right.resize(threads);
  const bool sums_over_rows = args.d_weight || args.d_bias;
  for (int thread = 0; thread < threads; ++thread) {
    arena.want(work.tiles[thread], kernels.tile_bytes);
    if (!sums_over_rows) continue;
    arena.want(work.left[thread], kernels.outer_left_bytes(slab_rows, words));
    arena.want(work.right[thread], kernels.outer_right_bytes(slab_rows, args.depth));
  }
  arena.allocate();
  slab.values = values;
  for (int64_t row = 0; row < slab_rows; ++row) left_rows[row] = values + row * stride * element;

  const auto packing = [](void* opaque, int index, int parties) {
    const Work& w = *static_cast<Work*>(opaque);
    w.kernels.pack(w.slab, index, parties);
  };
  const auto whole_rows = [](void* opaque, int index, int parties) {
    const Work& w = *static_cast<Work*>(opaque);
    w.for_each_block(index, parties, [&](int64_t begin, int64_t end) {
      w.kernels.exponentials(w.slab, begin, end, true);
      w.kernels.losses(w.slab, begin, end);
      if (w.gradients) w.kernels.gradients(w.slab, begin, end, w.scale, w.tiles[index]);
    });
  };
  const auto first_pass = [](void* opaque, int index, int parties) {
    const Work& w = *static_cast<Work*>(opaque);
    w.for_each_block(index, parties, [&](int64_t begin, int64_t end) { w.kernels.exponentials(w.slab, begin, end, true); });
  };
  const auto second_pass = [](void* opaque, int index, int parties) {
    const Work& w = *static_cast<Work*>(opaque);
    w.for_each_block(index, parties, [&](int64_t begin, int64_t end) {
      w.kernels.exponentials(w.slab, begin, end, false);
      w.kernels.gradients(w.slab, begin, end, w.scale, w.tiles[index]);
    });
  };
  const auto over_rows = [](void* opaque, int index, int parties) {
    const Work& w = *static_cast<Work*>(opaque);
    w.kernels.outer(w.outer, w.size, w.first, index, parties, w.left[index], w.right[index]);
  };
  const auto add_over_rows = [&] {
    if (!sums_over_rows) return;
    const auto at = [&](void* data, int64_t offset) -> void* { return data ? static_cast<char*>(data) + offset * element : nullptr; };
    work.outer = {left_rows.data(), 0, slab.words, {}, {at(args.d_bias, slab.word0), nullptr}};
    if (args.d_weight)
      work.outer.right[0] = {right_rows.data(), true, 0, args.depth, at(args.d_weight, slab.word0 * args.depth), args.depth};
    run_team(threads, over_rows, &work);
  };

  if (pack) run_team(threads, packing, &work);
  for (int64_t row0 = 0; row0 < count || (row0 == 0 && sums_over_rows); row0 += std::max<int64_t>(slab_rows, 1)) {
    work.size = std::min(slab_rows, count - row0), work.first = row0 == 0;
    slab.rows = rows.data() + row0;
    for (int64_t row = 0; row < work.size; ++row)
      right_rows[row] = static_cast<const char*>(args.input) + slab.rows[row] * args.input_stride * element;
    const auto put = [&](void* data, double value) {
      for (int64_t row = 0; row < work.size; ++row) {
        if (args.type == Type::kFloat64) static_cast<double*>(data)[row] = value;
        else static_cast<float*>(data)[row] = static_cast<float>(value);
      }
    };
    put(slab.maximum, -std::numeric_limits<double>::infinity()), put(slab.sum, 0);
    if (whole) {
      run_team(threads, whole_rows, &work);
      add_over_rows();
      continue;
    }
    for (int64_t word0 = 0; word0 < args.words; word0 += words) {
      set_words(word0);
      run_team(threads, first_pass, &work);
    }
    kernels.losses(slab, 0, work.size);
    if (!work.gradients) continue;
    for (int64_t word0 = 0; word0 < args.words; word0 += words) {
      set_words(word0);
      run_team(threads, second_pass, &work);
      add_over_rows();
    }
  }
  if (args.type == Type::kFloat64) total_of<double>(args, rows);
  else total_of<float>(args, rows);
}

}  // namespace fr
