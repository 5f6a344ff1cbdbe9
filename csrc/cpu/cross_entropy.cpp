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

void check_arguments(const CrossEntropyArgs& args) {
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
      throw std::out_of_range(
          "target: expected classes from 0 to " + std::to_string(args.words - 1) + ", got " + std::to_string(target));
    rows.push_back(row);
  }
  return rows;
}

class CrossEntropyPass {
 public:
  CrossEntropyPass(const CrossEntropyArgs& args, const std::vector<int64_t>& rows)
      : args_(args), rows_(rows), kernels_(choose_cross_entropy(args.type)), element_(storage_bytes(args.type)),
        count_(static_cast<int64_t>(rows.size())),
        gradients_(args.d_input || args.d_weight || args.d_bias || args.d_label_logit),
        sums_over_rows_(args.d_weight || args.d_bias),
        scale_(args.mean && count_ ? 1.0 / static_cast<double>(count_) : 1.0) {}

  void run() {
    size_slabs();
    allocate();
    if (packs_) team<&CrossEntropyPass::pack>();
    for (int64_t row0 = 0; row0 < count_ || (row0 == 0 && sums_over_rows_); row0 += std::max<int64_t>(slab_rows_, 1)) {
      start_rows(row0);
      if (words_ == args_.words) run_once();
      else run_twice();
    }
  }

 private:
  void size_slabs() {
    const int64_t work_of_threads = count_ * args_.words * args_.depth / kWorkPerThread;
    threads_ = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(args_.threads, work_of_threads)));
    // A slab has all words, rounded up to whole panels, or as many as fit with kSlabRows rows.
    const int64_t panel = kernels_.panel_words, fit = args_.slab_bytes / (kSlabRows * element_ * panel);
    words_ = std::min(args_.words, std::max<int64_t>(1, fit) * panel);
    stride_ = (words_ + panel - 1) / panel * panel;
    if (stride_ * element_ % 4096 == 0) stride_ += panel;  // otherwise all rows fall into one set of L1
    const int64_t wanted = std::min(kRowsPerThread * threads_, args_.slab_bytes / (stride_ * element_));
    slab_rows_ = std::min(count_, std::max(kSlabRows, wanted));
    // Rows of a block: as many as keep their logits in cache. But every block reads all weights. With a large depth
    // these reads cost more than the few passes over the logits, so a block then has more rows.
    const int64_t near_rows = std::max(kernels_.near_bytes / (stride_ * element_), args_.depth / 8);
    const int64_t group = kernels_.group_rows;
    block_rows_ = std::clamp(near_rows / group * group, std::min(group, kTileRows), kTileRows);
    // With several slabs of words, each block of weights is packed when it is used.
    packs_ = words_ == args_.words && count_ > kTileRows;
  }

  void allocate() {
    slab_.args = &args_, slab_.stride = stride_;
    slab_.logits.source = {args_.weight, args_.weight_stride, false, args_.words, args_.bias, args_.words, args_.depth};
    set_words(0);
    char* values;
    if (packs_) arena_.want(slab_.logits.panels, kernels_.packed_bytes(slab_.logits.source));
    if (packs_ && args_.d_input) arena_.want(slab_.transposed.panels, kernels_.packed_bytes(slab_.transposed.source));
    arena_.want(values, slab_rows_ * stride_ * element_);
    for (void** each : {&slab_.shift, &slab_.maximum, &slab_.sum, &slab_.label})
      arena_.want(*each, slab_rows_ * element_);
    // + 1: gives an address even if there are no rows
    left_rows_.resize(slab_rows_ + 1), right_rows_.resize(slab_rows_ + 1);
    tiles_.resize(threads_), left_.resize(threads_), right_.resize(threads_);
    for (int thread = 0; thread < threads_; ++thread) {
      arena_.want(tiles_[thread], kernels_.tile_bytes);
      if (!sums_over_rows_) continue;
      arena_.want(left_[thread], kernels_.outer_left_bytes(slab_rows_, words_));
      arena_.want(right_[thread], kernels_.outer_right_bytes(slab_rows_, args_.depth));
    }
    arena_.allocate();
    slab_.values = values;
    for (int64_t row = 0; row < slab_rows_; ++row) left_rows_[row] = values + row * stride_ * element_;
  }

  void set_words(int64_t word0) {
    slab_.word0 = word0, slab_.words = std::min(words_, args_.words - word0);
    const void* weight = static_cast<const char*>(args_.weight) + word0 * args_.weight_stride * element_;
    slab_.transposed.source = transposed_source(weight, args_.weight_stride, args_.depth, slab_.words);
  }

  void start_rows(int64_t row0) {
    size_ = std::min(slab_rows_, count_ - row0), first_ = row0 == 0;
    slab_.rows = rows_.data() + row0;
    for (int64_t row = 0; row < size_; ++row)
      right_rows_[row] = static_cast<const char*>(args_.input) + slab_.rows[row] * args_.input_stride * element_;
    fill(slab_.maximum, -std::numeric_limits<double>::infinity()), fill(slab_.sum, 0);
  }
  void fill(void* data, double value) const {
    for (int64_t row = 0; row < size_; ++row) {
      if (args_.type == Type::kFloat64) static_cast<double*>(data)[row] = value;
      else static_cast<float*>(data)[row] = static_cast<float>(value);
    }
  }

  // All words fit a slab: its logits are computed once.
  void run_once() {
    team<&CrossEntropyPass::whole_rows>();
    add_over_rows();
  }
  void run_twice() {
    for (int64_t word0 = 0; word0 < args_.words; word0 += words_) {
      set_words(word0);
      team<&CrossEntropyPass::first_pass>();
    }
    kernels_.losses(slab_, 0, size_);
    if (!gradients_) return;
    for (int64_t word0 = 0; word0 < args_.words; word0 += words_) {
      set_words(word0);
      team<&CrossEntropyPass::second_pass>();
      add_over_rows();
    }
  }

  // Adds the slab's part of the gradients of weight and bias, which are sums over rows.
  void add_over_rows() {
    if (!sums_over_rows_) return;
    const auto at = [&](void* data, int64_t offset) -> void* {
      return data ? static_cast<char*>(data) + offset * element_ : nullptr;
    };
    outer_ = {left_rows_.data(), 0, slab_.words, {}, {at(args_.d_bias, slab_.word0), nullptr}};
    void* const d_weight = at(args_.d_weight, slab_.word0 * args_.depth);
    if (d_weight) outer_.right[0] = {right_rows_.data(), true, 0, args_.depth, d_weight, args_.depth};
    team<&CrossEntropyPass::over_rows>();
  }

  // ---- what thread `index` of `count` does

  template <void (CrossEntropyPass::*kBody)(int index, int count) const>
  void team() {
    run_team(
        threads_,
        [](void* self, int index, int count) { (static_cast<CrossEntropyPass*>(self)->*kBody)(index, count); }, this);
  }
  // Calls body(begin, end) for each of the thread's blocks of rows.
  template <class Body>
  void for_each_block(int index, int count, Body body) const {
    const int64_t begin = size_ * index / count, end = size_ * (index + 1) / count;
    const int64_t blocks = (end - begin + block_rows_ - 1) / block_rows_;
    for (int64_t block = 0; block < blocks; ++block)
      body(begin + (end - begin) * block / blocks, begin + (end - begin) * (block + 1) / blocks);
  }
  void pack(int index, int count) const { kernels_.pack(slab_, index, count); }
  void whole_rows(int index, int count) const {
    for_each_block(index, count, [&](int64_t begin, int64_t end) {
      kernels_.exponentials(slab_, begin, end, true);
      kernels_.losses(slab_, begin, end);
      if (gradients_) kernels_.gradients(slab_, begin, end, scale_, tiles_[index]);
    });
  }
  void first_pass(int index, int count) const {
    for_each_block(index, count, [&](int64_t begin, int64_t end) { kernels_.exponentials(slab_, begin, end, true); });
  }
  void second_pass(int index, int count) const {
    for_each_block(index, count, [&](int64_t begin, int64_t end) {
      kernels_.exponentials(slab_, begin, end, false);
      kernels_.gradients(slab_, begin, end, scale_, tiles_[index]);
    });
  }
  void over_rows(int index, int count) const {
    kernels_.outer(outer_, size_, first_, index, count, left_[index], right_[index]);
  }

  const CrossEntropyArgs& args_;
  const std::vector<int64_t>& rows_;  // that are not ignored
  const CrossEntropyKernels& kernels_;
  int64_t element_, count_;
  bool gradients_, sums_over_rows_;  // whether any gradient is wanted, and one of weight or bias
  double scale_;
  int threads_ = 1;
  int64_t words_ = 0, stride_ = 0, slab_rows_ = 0;  // of a slab
  int64_t block_rows_ = 0;                          // rows whose logits stay in a core's cache
  bool packs_ = false;
  Arena arena_;
  LogitsSlab slab_{};
  int64_t size_ = 0;  // rows of the present slab
  bool first_ = true;
  Outer outer_{};
  std::vector<const void*> left_rows_, right_rows_;
  std::vector<void*> tiles_, left_, right_;  // of each thread
};

template <class T>
void total_of(const CrossEntropyArgs& args, const std::vector<int64_t>& rows) {
  double sum = 0;
  for (const int64_t row : rows) sum += static_cast<const T*>(args.loss)[row];
  *static_cast<T*>(args.total) = static_cast<T>(!args.mean     ? sum
                                                : rows.empty() ? std::numeric_limits<double>::quiet_NaN()
                                                               : sum / static_cast<double>(rows.size()));
}

}  // namespace
}  // namespace cpu

void cpu_cross_entropy(const CrossEntropyArgs& args) {
  cpu::check_arguments(args);
  const std::vector<int64_t> rows = cpu::taking_part(args);
  if (static_cast<int64_t>(rows.size()) < args.rows) {
    const int64_t element = storage_bytes(args.type);
    std::memset(args.loss, 0, args.rows * element);
    if (args.d_input) std::memset(args.d_input, 0, args.rows * args.depth * element);
  }
  cpu::CrossEntropyPass(args, rows).run();
  if (args.type == Type::kFloat64) cpu::total_of<double>(args, rows);
  else cpu::total_of<float>(args, rows);
}

}  // namespace fr
