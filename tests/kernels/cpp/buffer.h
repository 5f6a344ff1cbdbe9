// Rows of a storage or state type in memory of exactly the size used, read and written as doubles: the arguments that
// tests pass to the emulated kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../../../csrc/cuda/device.cuh"
#include "../../../csrc/rnn.h"
#include "../../../csrc/emulation/memory.h"

using Values = std::vector<double>;

// The byte that fills memory before it is written: 0xFF gives NaN, so that a missing result shows. Tests of timeouts
// set another, because NaN is a result there.
inline unsigned char g_unwritten = 0xFF;

enum class Kind { kStorage, kState };
struct Buffer {
  fr::Type type;
  Kind kind;
  int64_t rows, columns, stride;
  int64_t element;
  bool is_double, is_float;
  std::unique_ptr<unsigned char, void (*)(void*)> memory{nullptr, std::free};
  unsigned char* data = nullptr;
  fr::emulation::Registered registered{nullptr, 0};

  // offset: elements before the first row, to misalign rows.
  Buffer(fr::Type t, Kind k, int64_t r, int64_t c, int64_t pad = 0, int64_t offset = 0)
      : type(t), kind(k), rows(r), columns(c), stride(c + pad) {
    element = kind == Kind::kState ? fr::state_bytes(t) : fr::storage_bytes(t);
    is_double = element == 8;
    is_float = element == 4;
    const int64_t count = offset + (rows ? (rows - 1) * stride + columns : 0);
    memory.reset(static_cast<unsigned char*>(std::malloc(std::max<int64_t>(1, count * element))));
    for (int64_t i = 0; i < count * element; ++i) memory.get()[i] = g_unwritten;
    data = memory.get() + offset * element;
    registered = fr::emulation::Registered(memory.get(), count * element);
  }
  double get(int64_t row, int64_t column) const {
    const unsigned char* p = data + (row * stride + column) * element;
    if (is_double) {
      double v;
      std::memcpy(&v, p, 8);
      return v;
    }
    if (is_float) {
      float v;
      std::memcpy(&v, p, 4);
      return v;
    }
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return type == fr::Type::kBFloat16 ? fr::host::to_state(fr::host::BFloat16{bits})
                                       : fr::host::to_state(fr::host::Float16{bits});
  }
  void set(int64_t row, int64_t column, double value) {
    unsigned char* p = data + (row * stride + column) * element;
    if (is_double) {
      std::memcpy(p, &value, 8);
      return;
    }
    const float single = static_cast<float>(value);
    if (is_float) {
      std::memcpy(p, &single, 4);
      return;
    }
    const uint16_t bits =
        type == fr::Type::kBFloat16 ? fr::host::float_to_bf16_bits(single) : fr::host::float_to_fp16_bits(single);
    std::memcpy(p, &bits, 2);
  }
  // Writes the values and reads them back, rounded to the type.
  void put(Values& values) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        set(i, j, values[i * columns + j]);
        values[i * columns + j] = get(i, j);
      }
  }
  Values take() const {
    Values values(rows * columns);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) values[i * columns + j] = get(i, j);
    return values;
  }
  fr::Rows as_rows(int64_t batch) { return {data, batch * stride, stride}; }
};

// Registers a table that kernels read.
template <class T>
fr::emulation::Registered registered(const std::vector<T>& table) {
  return fr::emulation::Registered(table.data(), table.size() * sizeof(T));
}
