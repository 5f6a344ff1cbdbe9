// Tests the vector functions of csrc/cpu/simd.h, the random words of draws.h and the products of quantised.h for one
// instruction set (FR_TEST_ISA, with the compiler flags to match). Of the functions, against long double: the stated
// errors hold, NaN and Inf pass through as in torch, partial loads and stores stay in bounds, and the 16-bit
// conversions agree with the scalar ones for every bit pattern. Of the products: their integer sums are exact, also the
// largest.
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <vector>

#include "check.h"
#include "cpu/draws.h"
#include "cpu/isa.h"
#include "cpu/quantised.h"
#include "emulated_vnni.h"

using namespace fr;
using namespace fr::cpu;
using Isa = FR_TEST_ISA;

template <class T>
double ulps(T found, long double exact) {
  const T near = static_cast<T>(exact);
  const T unit = std::nextafter(std::fabs(near), std::numeric_limits<T>::infinity()) - std::fabs(near);
  return static_cast<double>(std::fabs(found - exact) / unit);
}

template <class T, class Function, class Exact>
double worst_ulps(Function function, Exact exact, double low, double high, int count) {
  using V = Vec<T, Isa>;
  Random random;
  double worst = 0;
  for (int i = 0; i < count; ++i) {
    T x[V::kLanes], y[V::kLanes];
    for (T& value : x)
      value =
          static_cast<T>(i % 3 ? random.uniform(low, high) : random.uniform(-1, 1) * std::exp2(-random.uniform(0, 30)));
    store_full(y, function(load_full<V>(x)));
    for (int lane = 0; lane < V::kLanes; ++lane) {
      const double error = ulps(y[lane], exact(static_cast<long double>(x[lane])));
      if (!(error <= worst)) worst = error;
    }
  }
  return worst;
}

template <class T>
void functions() {
  using V = Vec<T, Isa>;
  const auto sigmoid = [](long double x) { return 1 / (1 + std::exp(-x)); };
  const auto tanh = [](long double x) { return std::tanh(x); };
  const double s = worst_ulps<T>([](V x) { return fr_sigmoid(x); }, sigmoid, -80, 80, 200000 / V::kLanes);
  const double t = worst_ulps<T>([](V x) { return fr_tanh(x); }, tanh, -12, 12, 200000 / V::kLanes);
  std::printf("largest error in ulp, %d bytes a value: sigmoid %.2f, tanh %.2f\n", static_cast<int>(sizeof(T)), s, t);
  CHECK(s <= 2.3, "sigmoid: %g ulp", s);
  CHECK(t <= 2.6, "tanh: %g ulp", t);
  const T infinity = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
  const auto one = [](V v) {
    T out[V::kLanes];
    store_full(out, v);
    return out[0];
  };
  CHECK(one(fr_tanh(V(infinity))) == 1 && one(fr_tanh(V(-infinity))) == -1, "tanh at infinity");
  CHECK(one(fr_sigmoid(V(infinity))) == 1 && one(fr_sigmoid(V(-infinity))) < 1e-37, "sigmoid at infinity");
  CHECK(std::isnan(one(fr_tanh(V(nan)))) && std::isnan(one(fr_sigmoid(V(nan)))), "NaN");
  CHECK(std::isnan(one(fr_max(V(0), V(nan)))) && std::isnan(one(clipped(V(nan), V(3)))), "NaN through max and clip");
  CHECK(one(fr_tanh(V(0))) == 0, "tanh(0)");
  CHECK(one(clipped(V(5), V(3))) == 3 && one(clipped(V(-5), V(3))) == -3 && one(clipped(V(2), V(3))) == 2, "clip");
}

// Rough functions (isa.h): errors relative to 1 and, of tanh, to itself.
void rough_functions() {
  using V = Vec<float, Rough<Isa>>;
  Random random;
  double s = 0, t = 0, last = 0;
  for (int i = 0; i < 100000 / V::kLanes; ++i) {
    float x[V::kLanes], sigmoid[V::kLanes], tanh[V::kLanes];
    for (float& value : x)
      value = static_cast<float>(random.uniform(-20, 20) * (i % 2 ? std::exp2(-random.uniform(0, 30)) : 1));
    store_full(sigmoid, fr_sigmoid(load_full<V>(x)));
    store_full(tanh, fr_tanh(load_full<V>(x)));
    for (int lane = 0; lane < V::kLanes; ++lane) {
      const double value = x[lane], exact = 1 / (1 + std::exp(-value)), rest = 1 / (1 + std::exp(value));
      s = std::fmax(s, std::fabs(sigmoid[lane] - exact));
      t = std::fmax(t, std::fabs(tanh[lane] / std::tanh(value) - 1));
      // 1 - sigmoid, by which a state shrinks, but for the rounding of the sigmoid
      if (value > 0) last = std::fmax(last, (std::fabs(1.0 - sigmoid[lane] - rest) - 0x1p-22) / rest);
    }
  }
  std::printf("rough: sigmoid %.2g, tanh %.2g, 1 - sigmoid %.2g\n", s, t, last);
  CHECK(s <= 5e-5, "sigmoid: %g", s);
  CHECK(t <= 6e-4, "tanh: %g", t);
  CHECK(last <= 2e-4, "1 - sigmoid: %g", last);
}

template <class S>
void conversions() {
  using V = Vec<float, Isa>;
  S values[V::kLanes];
  float wide[V::kLanes];
  for (uint32_t base = 0; base < 65536; base += V::kLanes) {
    for (int lane = 0; lane < V::kLanes; ++lane) values[lane].bits = static_cast<uint16_t>(base + lane);
    store_full(wide, load_full<V>(values));
    for (int lane = 0; lane < V::kLanes; ++lane) {
      const float scalar = to_float(values[lane]);
      CHECK(std::isnan(scalar) ? std::isnan(wide[lane]) : wide[lane] == scalar, "pattern %x", base + lane);
      S back;
      from_float(back, scalar);
      CHECK(std::isnan(scalar) || back.bits == values[lane].bits, "round trip of pattern %x gave %x", base + lane,
          back.bits);
    }
  }
  Random random;
  for (int i = 0; i < 200000 / V::kLanes; ++i) {
    for (float& value : wide) value = static_cast<float>(random.uniform(-2, 2) * std::exp2(random.uniform(-26, 17)));
    store_full(values, load_full<V>(wide));
    for (int lane = 0; lane < V::kLanes; ++lane) {
      S scalar;
      from_float(scalar, wide[lane]);
      CHECK(scalar.bits == values[lane].bits, "rounding %a: %x and %x", wide[lane], scalar.bits, values[lane].bits);
    }
  }
}

void partial() {
  using V = Vec<float, Isa>;
  for (int n = 0; n <= V::kLanes; ++n) {
    float* exact = new float[n];  // AddressSanitizer sees an access beyond
    for (int i = 0; i < n; ++i) exact[i] = static_cast<float>(i + 1);
    float all[V::kLanes];
    store_full(all, load<V>(exact, n));
    for (int lane = 0; lane < V::kLanes; ++lane)
      CHECK(all[lane] == (lane < n ? lane + 1 : 0), "lane %d of %d", lane, n);
    store(exact, V(7), n);
    for (int i = 0; i < n; ++i) CHECK(exact[i] == 7, "stored %d of %d", i, n);
    delete[] exact;
  }
}

// Philox4x32-7's known answers (Random123, kat_vectors): key, counter, words.
constexpr uint32_t kKnown[3][10] = {{0, 0, 0, 0, 0, 0, 0x5f6fb709u, 0x0d893f64u, 0x4f121f81u, 0x4f730a48u},
    {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu, 0x5207ddc2u, 0x45165e59u,
        0x4d8ee751u, 0x8c52f662u},
    {0xa4093822u, 0x299f31d0u, 0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u, 0x4dfccabau, 0x190a87f0u,
        0xc47362bau, 0xb6b5242au}};

// The words that if_below compares: each is below its successor, and not below itself. Four units share a counter.
template <class T>
void random_words() {
  using V = Vec<T, Isa>;
  for (const auto& known : kKnown) {
    uint32_t words[4] = {known[2], known[3], known[4], known[5]};
    philox<OneCounter>(words, known[0], known[1]);
    for (int i = 0; i < 4; ++i)
      CHECK(words[i] == known[6 + i], "word %d of the known answer %x is %x", i, known[6 + i], words[i]);
    const uint64_t seed = static_cast<uint64_t>(known[1]) << 32 | known[0];
    const Drawer<V> drawer(NoiseParams({0.5, 0.5, 0.5, &seed}, nullptr));
    for (const uint32_t of_a_row : {3u, 11u}) {
      int64_t seen = 0;
      const auto place = [&](int64_t i) -> NoisePlace {
        const auto vector = static_cast<uint32_t>(i);
        const uint32_t row = known[3] + vector / of_a_row;
        return {known[2] / 16 * 8 + vector * V::kLanes, row, known[4], known[5] & 0x3fffffffu};
      };
      drawer.for_each(11, place, [&](int64_t i, const NoiseSource<V>& drawn) {  // more than are drawn at once, and odd
        CHECK(i == seen++, "vector %d is out of turn", static_cast<int>(i));
        for (const uint32_t kind : {0u, 1u, 2u})
          for (int lane = 0; lane < V::kLanes; ++lane) {
            const NoisePlace here = place(i);
            const uint32_t unit = here.unit + static_cast<uint32_t>(lane);
            uint32_t word[4] = {unit / 4, here.row, here.step, here.direction + kind * 0x40000000u};
            philox<OneCounter>(word, known[0], known[1]);
            const Draws<V>& draws = drawn.draw(static_cast<NoiseKind>(kind), seed);
            T above[V::kLanes], same[V::kLanes];
            store_full(above, draws.if_below(word[unit % 4] + 1, V(1), V(0)));
            store_full(same, draws.if_below(word[unit % 4], V(1), V(0)));
            CHECK(above[lane] == 1 && same[lane] == 0, "kind %u of lane %d is not %x", kind, lane, word[unit % 4]);
          }
      });
      CHECK(seen == 11, "%d vectors", static_cast<int>(seen));
    }
  }
}

template <int kGates>
void int8_products() {
  using Q = QuantisedProduct<Isa, kGates>;
  constexpr int kUnits = 19, kRows = 37;
  // Two groups of eight weights, each with the largest sums of 16 bits.
  const int8_t largest[] = {127, 36, 41, 41, 0, 0, 41, 40, 127, -127, 41, -41, 36, -36, 122, -122};
  Random random;
  for (const int64_t depth : {1, 16, 75, 128}) {
    std::vector<float> weights(kGates * kUnits * depth), bias(kGates * kUnits), scale(kGates * kUnits);
    for (int64_t i = 0; i < kGates * kUnits; ++i) {
      for (int64_t k = 0; k < depth; ++k)
        weights[i * depth + k] = static_cast<float>(i % 3 == 2   ? std::floor(random.uniform(-40, 40))
                                                    : i % 3 == 1 ? -largest[k % 16]
                                                                 : largest[k % 16]);
      bias[i] = static_cast<float>(random.uniform(-1, 1)), scale[i] = static_cast<float>(random.uniform(0.001, 0.01));
    }
    const MatrixSource source{weights.data(), depth, false, kUnits, bias.data(), kUnits, depth, 0, scale.data()};
    std::vector<char> panels(Q::bytes(source)), memory(Q::operand_bytes(kRows, depth));
    const PackedMatrix matrix{source, panels.data()};
    Q::pack_panels(matrix, 0, Q::panels(kUnits));
    std::vector<float> input(kRows * depth), tile(kRows * Q::kColumns);
    std::vector<const float*> rows;
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t k = 0; k < depth; ++k)
        input[row * depth + k] = static_cast<float>(
            row < 4 ? std::copysign(row + 1.0, row % 2 ? largest[k % 16] : -largest[k % 16]) : random.uniform(-3, 3));
      rows.push_back(&input[row * depth]);
    }
    for (int64_t count = 1; count <= kRows; ++count)
      for (int64_t panel = 0; panel < Q::panels(kUnits); ++panel) {
        Q::run(matrix, panel, Q::operands(rows.data(), count, depth, memory.data()), count, tile.data(), Q::kColumns,
            panel);
        for (int64_t i = 0; i < count * Q::kColumns; ++i) {
          const int64_t row = i / Q::kColumns, column = i % Q::kColumns, vector = column / Q::kLanes;
          const int64_t unit = panel * Q::kUnits + vector % Q::kGroups * Q::kLanes + column % Q::kLanes;
          if (unit >= kUnits) continue;
          const int64_t at = vector / Q::kGroups * kUnits + unit;
          float size = 0;
          for (int64_t k = 0; k < depth; ++k) size = std::fmax(size, std::fabs(rows[row][k]));
          int64_t sum = 0;
          for (int64_t k = 0; k < depth; ++k)
            sum += std::lrintf(rows[row][k] * (100 / size)) * static_cast<int64_t>(weights[at * depth + k]);
          const double exact = bias[at] + static_cast<double>(sum) * scale[at] * size / 100;
          CHECK(std::fabs(tile[i] - exact) <= 4e-7 * (std::fabs(exact) + std::fabs(bias[at])),
              "int8: %d gates, depth %d, row %d of %d, unit %d: %g, not %g", kGates, static_cast<int>(depth),
              static_cast<int>(row), static_cast<int>(count), static_cast<int>(unit), static_cast<double>(tile[i]),
              exact);
        }
      }
  }
}

int main() {
  if (Isa::kTiles) CHECK(Tiles::request(), "no permission to use tile registers");
#if defined(__AVXVNNI__)
  emulate_vnni();
#endif
  functions<float>();
  functions<double>();
  rough_functions();
  conversions<BFloat16>();
  conversions<Float16>();
  partial();
  random_words<float>();
  random_words<double>();
  int8_products<1>();
  int8_products<2>();
  int8_products<3>();
  int8_products<4>();
#if defined(__AVXVNNI__)
  std::printf("%ld instructions emulated\n", emulated_instructions);
#endif
  return report("simd_test");
}
