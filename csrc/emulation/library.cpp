// The emulated kernels as a shared library with C functions, called by fastrnn/_core/emulation.py. It is not part of
// the package: tests/kernels/kernel_programs.py builds it when a test asks for it.
#include <cstring>
#include <exception>
#include <stdexcept>

#include "rnn_emulated.h"
#include "scheduler.h"

// The options of one call as plain values, for ctypes.
struct EmulatedOptions {
  const char* strategy;
  uint64_t seed;
  int32_t tf32;
  unsigned long long* status;
  uint64_t timeout_ns;
  const int32_t* stall;  // x, y, z of the block to stall, and after how many publications (Schedule); null: none
  int64_t first, last;   // range of steps of a forward call
  char* message;         // the error's text, truncated to fit; the caller zeroes the buffer
  uint64_t message_bytes;
};

namespace {

fr::EmulationOptions options_of(const EmulatedOptions& call) {
  fr::EmulationOptions options;
  options.strategy = call.strategy, options.seed = call.seed, options.tf32 = call.tf32 != 0;
  options.status = call.status, options.timeout_ns = call.timeout_ns;
  if (call.stall) options.stalled = {call.stall[0], call.stall[1], call.stall[2]}, options.stall_after = call.stall[3];
  options.first = call.first, options.last = call.last;
  return options;
}

enum Outcome : int { kOk, kInvalidArgument, kError };

template <class Run>
int guarded(const EmulatedOptions& call, Run&& run) {
  const auto fail = [&call](const std::exception& error, Outcome outcome) {
    std::strncpy(call.message, error.what(), call.message_bytes - 1);
    return outcome;
  };
  try {
    run();
    return kOk;
  } catch (const std::invalid_argument& error) {
    return fail(error, kInvalidArgument);
  } catch (const std::exception& error) { return fail(error, kError); }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Sizes of the argument structs: the caller compares them with its own, to detect a library built from other sources.
uint64_t emulated_forward_bytes() { return sizeof(fr::ForwardArgs); }
uint64_t emulated_backward_bytes() { return sizeof(fr::BackwardArgs); }
uint64_t emulated_layer_norm_bytes() { return sizeof(fr::LayerNormArgs); }

int64_t emulated_launches() { return fr::emulation::launches(); }

int emulated_forward(const fr::ForwardArgs* args, const EmulatedOptions* call) {
  return guarded(*call, [&] { fr::emulated_forward(*args, options_of(*call)); });
}
int emulated_backward(const fr::BackwardArgs* args, const EmulatedOptions* call) {
  return guarded(*call, [&] { fr::emulated_backward(*args, options_of(*call)); });
}
int emulated_layer_norm(const fr::LayerNormArgs* args, const EmulatedOptions* call) {
  return guarded(*call, [&] { fr::emulated_layer_norm(*args, options_of(*call)); });
}
int emulated_layer_norm_gradients(const fr::LayerNormArgs* args, const EmulatedOptions* call) {
  return guarded(*call, [&] { fr::emulated_layer_norm_gradients(*args, options_of(*call)); });
}

}  // extern "C"
#pragma GCC visibility pop
