// The kernels on the emulated device (see emulation_cases.h): every cell x type x direction, with lengths, resets,
// packed rows, clips, noise, rebuilt gates, ranges, odd and misaligned sizes.
// usage: emulation_step_test [all | quick] [block | cluster | grid | streaming] [part of a case's name] [seed ...]
// Prints a line for each failure and a summary; exit status 1 on failure.
#include <cctype>
#include <cstdlib>

#include "emulation_cases.h"

namespace {

std::vector<Case> make_cases(bool quick) {
  std::vector<Case> cases;
  const auto add = [&](Case c) {
    if (fr::facts_of(c.cell).projects() && c.projection == 0) c.projection = std::max<int64_t>(1, c.hidden * 2 / 3);
    cases.push_back(c);
  };
  const std::pair<Type, bool> types[] = {{Type::kFloat64, false}, {Type::kFloat32, false}, {Type::kFloat32, true},
      {Type::kBFloat16, false}, {Type::kFloat16, false}};
  for (const fr::CellFacts& facts : fr::kCells)
    for (const auto& [type, tf32] : types) {
      Case c;
      c.cell = facts.code, c.type = type, c.tf32 = tf32;
      c.directions = 2, c.lengths = true, c.resets = true;
      add(c);
      if (quick) continue;
      c.resets = false, c.lengths = false, c.hidden = 33, c.batch = 17, c.steps = 3;
      add(c);
      c.inference = true, c.directions = 1, c.first_reverse = true, c.initial = false;
      add(c);
    }
  for (const fr::CellFacts& facts : fr::kCells) {
    const Cell cell = facts.code;
    Case c;
    c.cell = cell, c.directions = 2;
    c.packed = true, c.resets = true, c.to_initial = true, c.steps = 6, c.batch = 4;
    add(c);
    c.packed = false, c.lengths = true, c.recompute = true, c.cell_clip = 0.5, c.proj_clip = 0.4;
    add(c);
    Case noisy;
    noisy.cell = cell, noisy.directions = 2, noisy.lengths = noisy.resets = noisy.to_initial = noisy.noise = true;
    add(noisy);
    noisy.type = Type::kBFloat16;
    add(noisy);
    if (quick) continue;
    c.range = 2;
    add(c);
    c.discard = true, c.recompute = false;
    for (const auto& [type, tf32] : types) {
      Case d = c;
      d.type = type, d.tf32 = tf32, d.cell_clip = d.proj_clip = 0;
      d.resets = type == Type::kFloat64 || type == Type::kBFloat16;
      add(d);
    }
    c.discard = false, c.recompute = true;
    c.packed = true, c.lengths = false;
    add(c);
    c.recompute = false;
    add(c);
    c.packed = false, c.range = 0, c.cell_clip = c.proj_clip = 0, c.bias = false, c.initial = false, c.inference = true;
    add(c);
    Case misaligned;
    misaligned.cell = cell, misaligned.type = Type::kBFloat16, misaligned.hidden = 16, misaligned.pad = 1,
    misaligned.offset = 1;
    misaligned.projection = facts.projects() ? 8 : 0;
    add(misaligned);
    misaligned.pad = misaligned.offset = 0;  // all rows aligned: asynchronous copies
    add(misaligned);
    Case one;
    one.cell = cell, one.type = Type::kFloat32, one.steps = 1, one.batch = 1, one.hidden = 1;
    add(one);
    Case wide;  // several slices, depth groups, unit and row tiles
    wide.cell = cell, wide.type = Type::kBFloat16, wide.steps = 2, wide.batch = 70, wide.hidden = 72;
    add(wide);
    wide.type = Type::kFloat32, wide.batch = 33, wide.hidden = 100, wide.steps = 2;
    add(wide);
    wide.tf32 = true;
    add(wide);
    wide.type = Type::kFloat64, wide.tf32 = false, wide.hidden = 40, wide.inference = true;
    add(wide);
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false;
  std::vector<uint64_t> seeds;
  std::string only;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "quick") quick = true;
    else if (argument == "all") quick = false;
    else if (argument == "verbose") g_verbose = true;
    else if (argument == "block" || argument == "cluster" || argument == "grid" || argument == "streaming")
      g_options.strategy = argument;
    else if (std::isdigit(static_cast<unsigned char>(argument[0])))
      seeds.push_back(std::strtoull(argv[i], nullptr, 10));
    else only = argument;
  }
  if (seeds.empty()) seeds = {0, 1};
  unsigned number = 0;
  for (const Case& c : make_cases(quick)) {
    ++number;
    if (!only.empty() && c.text().find(only) == std::string::npos) continue;
    for (const uint64_t seed : seeds) run_case(c, seed, number);
  }
  std::printf("%d cases, %d failures\n", g_cases, g_failures);
  return g_failures ? 1 : 0;
}
