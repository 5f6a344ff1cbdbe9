// Plain C++ over the CUDA runtime; the kernels are in inst/*.cu.
#include "rnn_cuda.h"

#include <cuda_runtime_api.h>

#include <array>
#include <mutex>
#include <stdexcept>

#include "run.h"

namespace fr {

// Declared in launch.cuh.
namespace gpu {
void check_launch(cudaError_t result, const char* call, const char* kernel, const LaunchShape& shape) {
  if (result == cudaSuccess) return;
  (void)cudaGetLastError();  // launch errors are not sticky: clears this one, so that the next call starts clean
  throw std::runtime_error(std::string(call) + " of " + kernel + ": " + cudaGetErrorName(result) + ": " +
                           cudaGetErrorString(result) + "; grid (" + std::to_string(shape.x) + ", " +
                           std::to_string(shape.y) + ", " + std::to_string(shape.z) + "), " +
                           std::to_string(shape.threads) + " threads, " + std::to_string(shape.shared_bytes) +
                           " bytes of shared memory, clusters of " + std::to_string(shape.cluster));
}
}  // namespace gpu

namespace {

constexpr int kMaxDevices = 64;

void check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(result) + ": " + cudaGetErrorString(result));
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

// Makes a device the current one for this object's lifetime. If it already is, it is not set, because setting a device
// creates a context on it.
class Current {
 public:
  explicit Current(int device) : device_(device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device_) check(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~Current() {
    if (before_ != device_) (void)cudaSetDevice(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  int device_, before_ = 0;
};

// Queries the largest cluster of the device, and how many of each size can be resident at once. The SMs of a cluster
// must be neighbours, so the numbers differ between cards of one model, and under MIG.
void ask_for_clusters(DeviceLimits& limits) {
  limits.max_cluster = 1;
  for (int log = 1; log < 5; ++log) {
    limits.resident_clusters[log] = gpu::persistent_active_clusters(1 << log);
    if (limits.resident_clusters[log] > 0) limits.max_cluster = 1 << log;
  }
}

DeviceLimits query(int device) {
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  const int capability = 10 * major + attribute(cudaDevAttrComputeCapabilityMinor, device);
  DeviceLimits limits = limits_like(capability, attribute(cudaDevAttrMultiProcessorCount, device));
  limits.capability = capability;
  limits.sms = attribute(cudaDevAttrMultiProcessorCount, device);
  limits.shared_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  limits.shared_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  limits.registers_per_sm = attribute(cudaDevAttrMaxRegistersPerMultiprocessor, device);
  limits.l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
  if (limits.max_cluster == 1) return limits;
  const Current current(device);
  ask_for_clusters(limits);
  return limits;
}

// The limits of a device, queried once: they do not change, and a query costs microseconds.
const DeviceLimits& limits_of(int device) {
  static std::mutex mutex;
  static std::array<DeviceLimits, kMaxDevices> known;
  static std::array<bool, kMaxDevices> asked{};
  if (device < 0 || device >= kMaxDevices)
    throw std::runtime_error("CUDA device " + std::to_string(device) + ": beyond the table");
  const std::lock_guard<std::mutex> lock(mutex);
  if (!asked[device]) known[device] = query(device), asked[device] = true;
  return known[device];
}

const DeviceLimits& current_limits() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const DeviceLimits& limits = limits_of(device);
  if (limits.capability < kLowestCapability) throw std::runtime_error(cuda_status(device));
  return limits;
}

template <class Args>
PlanRequest request(const Args& args, const CudaOptions& options, bool training) {
  PlanRequest request;
  request.cell = args.shape.cell, request.type = args.shape.type, request.tf32 = options.tf32;
  request.steps = args.shape.steps, request.batch = args.shape.batch;
  request.hidden = args.shape.hidden, request.projection = args.shape.projection;
  request.directions = args.directions, request.training = training;
  request.packed = args.shape.batch_sizes != nullptr;
  request.state_dropout = args.direction[0].weights.state_mask != nullptr;
  request.strategy = options.strategy;
  return request;
}

// How the plan says to run. If the caller asked for a strategy that cannot run, make_plan throws.
template <class Args>
Run how_to_run(const Args& args, const CudaOptions& options, const DeviceLimits& limits, bool training) {
  const PlanRequest asked = request(args, options, training);
  if (!asked.strategy.empty()) make_plan(asked, limits);
  const auto [strategy, in_sequence] = choose(asked, limits);
  Run run;
  run.block = strategy == Strategy::kBlock;
  run.persistent = strategy == Strategy::kGrid || strategy == Strategy::kStreaming || strategy == Strategy::kCluster;
  if (run.persistent) run.limits = persistent_limits(strategy, limits), run.limits.in_sequence = in_sequence;
  run.tf32 = options.tf32, run.shared_limit = limits.shared_per_block;
  run.workspace = options.workspace, run.stream = args.stream;
  run.status = options.status, run.timeout_ns = options.timeout_ns;
  return run;
}

}  // namespace

int64_t cuda_forward_workspace(const ForwardArgs& args) { return forward_workspace(args); }
int64_t cuda_backward_workspace(const BackwardArgs& args) { return backward_workspace(args); }

void cuda_forward(const ForwardArgs& args, const CudaOptions& options) {
  const DeviceLimits& limits = current_limits();
  run_forward(args, {options.first, options.last}, how_to_run(args, options, limits, false), gpu::kKernels);
}

void cuda_backward(const BackwardArgs& args, const CudaOptions& options) {
  const DeviceLimits& limits = current_limits();
  run_backward(args, how_to_run(args, options, limits, true), gpu::kKernels);
}

void cuda_layer_norm(const LayerNormArgs& args) { run_layer_norm(args, false, gpu::kKernels); }
void cuda_layer_norm_gradients(const LayerNormArgs& args) { run_layer_norm(args, true, gpu::kKernels); }

std::string cuda_status(int device) {
  int driver = 0, runtime = 0, count = 0;
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    (void)cudaGetLastError();
    return "no NVIDIA driver was found";
  }
  // Within a major version a binary runs on older drivers; across majors it does not.
  if (driver / 1000 < runtime / 1000)
    return "the NVIDIA driver supports CUDA " + version(driver) + ", but fastrnn was built with CUDA " +
           version(runtime) + ": update the driver, or rebuild fastrnn with an older CUDA";
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    return result == cudaSuccess ? "no CUDA device was found"
                                 : std::string("no usable CUDA device: ") + cudaGetErrorString(result);
  }
  if (device < 0 || device >= count) return "there is no CUDA device " + std::to_string(device);
  const DeviceLimits& limits = limits_of(device);
  if (limits.capability < kLowestCapability)
    return "fastrnn's CUDA kernels need compute capability 8.0 (Ampere) or newer, this card has " +
           std::to_string(limits.capability / 10) + "." + std::to_string(limits.capability % 10);
  const Current current(device);
  if (!gpu::persistent_has_code())
    return "fastrnn was built without kernels for compute capability " + std::to_string(limits.capability / 10) + "." +
           std::to_string(limits.capability % 10) +
           ": rebuild it with FASTRNN_CUDA_ARCHS=" + std::to_string(limits.capability);
  return "";
}

DeviceLimits cuda_limits(int device) { return limits_of(device); }

}  // namespace fr
