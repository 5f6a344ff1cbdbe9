// Noise in a cell's state, applied around the formulas of any cell:
//   zoneout (Krueger et al. 2017, https://arxiv.org/abs/1606.01305): a unit keeps its old h with probability zoneout_h
//   and, independently, its old cell states with probability zoneout_c. h is computed from the new cell states, whether
//   they are kept or not. Expectation: p old + (1 - p) new.
//   dropout of the candidate (Semeniuta et al. 2016, https://arxiv.org/abs/1603.05118): what a step adds to the state
//   is zero with probability p, else divided by 1 - p.
//   dropout of the state (Gal and Ghahramani 2016, https://arxiv.org/abs/1512.05287): h enters the recurrence times a
//   factor that a unit of a row keeps for all steps. The caller draws these factors into memory (rnn.h: state_mask). If
//   h enters a product, the backends multiply by them; elsewhere (IndRNN, r*h of GRU reset-before) this file does.
// Every decision is a word of Philox, keyed by the call's seed. Backward, another thread or another device draws the
// same word again, so no mask but that of the state is stored. Four neighbouring units share the words of the counter
// (unit / 4, row, step, stream). Each kind of decision in each direction has a stream of its own. A head counts as a
// direction here too: head k of direction d draws as direction d * heads + k.
#pragma once

#include "philox.h"

namespace fr {

// Noise as a caller asks for it. All probabilities 0: no noise.
struct NoiseOptions {
  double zoneout_h, zoneout_c, candidate;  // in [0, 1)
  const uint64_t* seed;                    // one value, in memory where the call runs; null: use the expectation
};

// Noise as a kernel takes it. below_*: a unit whose word is less than this is zoned out or dropped.
struct NoiseParams {
  bool on = false;
  const uint64_t* seed = nullptr;
  uint32_t below_h = 0, below_c = 0, below_candidate = 0;
  double zoneout_h = 0, zoneout_c = 0, scale = 1;
  int first_direction = 0;  // which direction of the call the kernel's first one is

  NoiseParams() = default;
  // state_mask: Weights::state_mask of any direction; only whether it is null matters.
  NoiseParams(const NoiseOptions& options, const void* state_mask)
      : on(options.zoneout_h > 0 || options.zoneout_c > 0 || (options.candidate > 0 && options.seed) || state_mask),
        seed(options.seed), below_h(below(options.zoneout_h)), below_c(below(options.zoneout_c)),
        below_candidate(below(options.candidate)), zoneout_h(options.zoneout_h), zoneout_c(options.zoneout_c),
        scale(1 / (1 - options.candidate)) {}

  static uint32_t below(double p) { return static_cast<uint32_t>(p * 4294967296.0); }
};

// What a word decides: zoneout of h or of the cell states, or dropout of the candidate, or of the state, which no
// kernel draws.
enum NoiseKind : uint32_t { kOfH, kOfCells, kOfCandidate, kOfState, kKindsInKernels = kOfState };
FR_HD constexpr uint32_t noise_stream(NoiseKind kind, uint32_t direction) { return direction | kind << 30; }

// Which unit of which row at which step; direction counts within the call.
struct NoisePlace {
  uint32_t unit, row, step, direction;
};

// A random word for each unit of V; zero by default.
//   V if_below(uint32_t bound, V yes, V no)
template <class V>
struct Draws;

// Where the words of V's units come from. Here they are drawn when needed; the CPU draws those of several vectors
// beforehand (cpu/draws.h).
template <class V>
struct NoiseSource {
  NoisePlace place;
  FR_HD Draws<V> draw(NoiseKind kind, uint64_t seed) const { return Draws<V>(kind, seed, place); }
};

// Zoneout of one state of V's units.
template <class V>
struct Zoneout {
  const bool drawn;
  const uint32_t below;
  const double p;
  const Draws<V> words;

  FR_HD static V value(double x) { return V(static_cast<typename V::Lane>(x)); }
  // The kept or the new state, or their expectation.
  FR_HD V state(V kept, V made) const {
    return drawn ? words.if_below(below, kept, made) : made + value(p) * (kept - made);
  }
  // The part of a state's gradient that goes to the new state; to_kept gives the rest.
  FR_HD V to_made(V gradient) const { return drawn ? words.if_below(below, V(0), gradient) : value(1 - p) * gradient; }
  FR_HD V to_kept(V gradient) const { return drawn ? words.if_below(below, gradient, V(0)) : value(p) * gradient; }
};

// The noise of V's units in one phase. Its functions wrap the cell's own, so that noise is applied in one place;
// without noise they only call the cell.
template <class V>
struct UnitNoise {
  const NoiseParams& params;
  const NoiseSource<V> source;
  const bool drawn;
  const V entering;  // factor on h_prev where it enters the recurrence

  FR_HD UnitNoise(const NoiseParams& p, const NoiseSource<V>& words, V factor)
      : params(p), source(words), drawn(p.on && p.seed != nullptr), entering(factor) {}

  FR_HD Draws<V> draw(NoiseKind kind, uint32_t below) const {
    return drawn && below > 0 ? source.draw(kind, *params.seed) : Draws<V>();
  }
  FR_HD Zoneout<V> of_h() const { return {drawn, params.below_h, params.zoneout_h, draw(kOfH, params.below_h)}; }
  FR_HD Zoneout<V> of_cells() const {
    return {drawn, params.below_c, params.zoneout_c, draw(kOfCells, params.below_c)};
  }
  FR_HD V candidate() const {
    if (!drawn || params.below_candidate == 0) return V(1);
    const V scale = V(static_cast<typename V::Lane>(params.scale));
    return draw(kOfCandidate, params.below_candidate).if_below(params.below_candidate, V(0), scale);
  }

  // Whether `entering` is applied here, because h enters outside a product.
  template <class Cell>
  static constexpr bool kEntersHere = !Numbers<Cell>::kMultiplies || Numbers<Cell>::kSecondGates > 0;

  template <class Cell>
  FR_HD void forward0(Unit<V, Cell>& u, const Clips<V>& clips) const {
    using N = Numbers<Cell>;
    if constexpr (Cell::kDropsCandidate) u.candidate = candidate();
    if constexpr (!N::kMultiplies) {
      const V h_prev = u.h_prev;
      u.h_prev = h_prev * entering;
      Cell::forward0(u, clips);
      u.h_prev = h_prev;
    } else {
      Cell::forward0(u, clips);
    }
    if constexpr (N::kSecondGates > 0) u.inner = u.inner * entering;
    if (!params.on) return;
    if constexpr (Cell::kZonesCells) {
      const Zoneout<V> zoneout = of_cells();
      for (int i = 0; i < Cell::kCells; ++i) u.c[i] = zoneout.state(u.c_prev[i], u.c[i]);
    }
    if constexpr (!N::kTwoPhases) u.h = of_h().state(u.h_prev, u.h);
  }
  template <class Cell>
  FR_HD void forward1(Unit<V, Cell>& u, const Clips<V>& clips) const {
    if constexpr (Cell::kDropsCandidate) u.candidate = candidate();
    Cell::forward1(u, clips);
    if (params.on) u.h = of_h().state(u.h_prev, u.h);
  }
  template <class Cell>
  FR_HD void backward1(Unit<V, Cell>& u, const Clips<V>& clips) const {
    if constexpr (Cell::kDropsCandidate) u.candidate = candidate();
    const V kept = keep_h(u);
    Cell::backward1(u, clips);
    if (params.on) u.d_h_prev = u.d_h_prev + kept;
  }
  template <class Cell>
  FR_HD void backward0(Unit<V, Cell>& u, const Clips<V>& clips) const {
    using N = Numbers<Cell>;
    constexpr bool kOfH = !N::kTwoPhases;
    if constexpr (Cell::kDropsCandidate) u.candidate = candidate();
    if constexpr (!N::kMultiplies) u.h_prev = u.h_prev * entering;
    if constexpr (N::kSecondGates > 0) u.d_inner = u.d_inner * entering;
    V kept(0);
    if constexpr (kOfH) kept = keep_h(u);
    if constexpr (Cell::kZonesCells) {
      Values<V, Cell::kCells> kept_c;
      keep_cells(u, kept_c, clips);
      Cell::backward0(u, clips);
      if (params.on)
        for (int i = 0; i < Cell::kCells; ++i) u.d_c[i] = u.d_c[i] + kept_c[i];
    } else {
      Cell::backward0(u, clips);
    }
    if constexpr (!N::kMultiplies) u.d_h_prev = u.d_h_prev * entering;
    if constexpr (N::kSecondGates > 0) u.inner = u.inner * entering;
    if constexpr (kOfH)
      if (params.on) u.d_h_prev = u.d_h_prev + kept;
  }

 private:
  // Splits d_h: leaves the new state's part in d_h, and returns the old state's.
  template <class Cell>
  FR_HD V keep_h(Unit<V, Cell>& u) const {
    if (!params.on) return V(0);
    const Zoneout<V> zoneout = of_h();
    const V kept = zoneout.to_kept(u.d_h);
    u.d_h = zoneout.to_made(u.d_h);
    return kept;
  }
  // The same for cell states. Where zoneout kept the old state, the stored state is the old one. The formulas need the
  // new one, so it is recomputed.
  template <class Cell>
  FR_HD void keep_cells(Unit<V, Cell>& u, V (&kept)[Cell::kCells], const Clips<V>& clips) const {
    for (int i = 0; i < Cell::kCells; ++i) kept[i] = V(0);
    if (!params.on) return;
    V stored[Cell::kCells];
    for (int i = 0; i < Cell::kCells; ++i) stored[i] = u.c[i];
    Cell::cells_again(u, clips);
    const Zoneout<V> zoneout = of_cells();
    for (int i = 0; i < Cell::kCells; ++i) {
      if (drawn) u.c[i] = zoneout.words.if_below(zoneout.below, u.c[i], stored[i]);
      else if (zoneout.p == 0) u.c[i] = stored[i];
      kept[i] = zoneout.to_kept(u.d_c[i]);
      u.d_c[i] = zoneout.to_made(u.d_c[i]);
    }
  }
};

}  // namespace fr
