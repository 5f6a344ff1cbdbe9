// The CUDA part of fastrnn._C: the GPU backend and the plan. Called by bindings.cpp.
#include "bindings_cuda.h"

#include <pybind11/stl.h>

#include "rnn_cuda.h"
#include "run.h"

namespace py = pybind11;

namespace fr {
namespace {

CudaOptions cuda_options(bool tf32, const std::string& strategy, std::uintptr_t workspace, std::uintptr_t status,
    uint64_t timeout_ns, int64_t first, int64_t last) {
  return {tf32, strategy, first, last, reinterpret_cast<void*>(workspace),
      reinterpret_cast<unsigned long long*>(status), timeout_ns};
}

py::dict cost_dict(const StepCost& cost) {
  using namespace py::literals;
  return py::dict("launch"_a = cost.launch, "exchange"_a = cost.exchange, "broadcast"_a = cost.broadcast,
      "arithmetic"_a = cost.arithmetic, "weights"_a = cost.weights, "memory"_a = cost.rows, "issue"_a = cost.issue,
      "pointwise"_a = cost.pointwise, "total"_a = cost.total(), "bound"_a = cost.bound());
}

py::dict limits_dict(const DeviceLimits& l) {
  using namespace py::literals;
  return py::dict("name"_a = l.name, "capability"_a = l.capability, "sms"_a = l.sms,
      "shared_per_block"_a = l.shared_per_block, "shared_per_sm"_a = l.shared_per_sm,
      "registers_per_sm"_a = l.registers_per_sm, "l2_bytes"_a = l.l2_bytes, "max_cluster"_a = l.max_cluster,
      "tensor16"_a = l.tensor16, "tensor32"_a = l.tensor32, "vector32"_a = l.vector32, "vector64"_a = l.vector64,
      "dram"_a = l.dram, "l2_per_sm"_a = l.l2_per_sm, "peer_per_sm"_a = l.peer_per_sm,
      "shared_rate_per_sm"_a = l.shared_rate_per_sm);
}

py::dict plan_dict(const Plan& plan) {
  using namespace py::literals;
  py::list candidates;
  for (const Candidate& c : plan.candidates)
    candidates.append(py::dict("strategy"_a = strategy_name(c.strategy), "refusal"_a = c.refusal[0],
        "backward_refusal"_a = c.refusal[1], "blocks"_a = c.blocks, "threads"_a = c.threads, "cluster"_a = c.cluster,
        "groups"_a = c.groups, "rows_per_group"_a = c.rows_per_group, "registers"_a = c.registers,
        "weight_bytes"_a = c.weight_bytes, "resident_bytes"_a = c.resident_bytes, "streamed_bytes"_a = c.streamed_bytes,
        "shared_bytes"_a = c.shared_bytes, "forward_partition"_a = c.partition[0],
        "backward_partition"_a = c.partition[1], "forward"_a = cost_dict(c.cost[0]),
        "backward"_a = cost_dict(c.cost[1])));
  return py::dict("strategy"_a = strategy_name(plan.chosen[0]), "backward_strategy"_a = strategy_name(plan.chosen[1]),
      "reasons"_a = plan.reasons, "candidates"_a = candidates, "limits"_a = limits_dict(plan.limits));
}

// card: a name of known_cards(), or "cuda:N".
DeviceLimits limits_of_card(const std::string& card) {
  if (card.rfind("cuda:", 0) == 0) return cuda_limits(std::stoi(card.substr(5)));
  return card_limits(card);
}

}  // namespace

void bind_cuda(py::module_& m) {
  using namespace py::literals;
  using Release = py::call_guard<py::gil_scoped_release>;
  m.def("cuda_status", &cuda_status, "device"_a, "Empty if the device can run the kernels, else why not.");
  m.def("cuda_forward_workspace", &cuda_forward_workspace, "args"_a);
  m.def("cuda_backward_workspace", &cuda_backward_workspace, "args"_a);
  m.def(
      "cuda_forward",
      [](const ForwardArgs& args, bool tf32, const std::string& strategy, std::uintptr_t workspace,
          std::uintptr_t status, uint64_t timeout_ns, int64_t first, int64_t last) {
        cuda_forward(args, cuda_options(tf32, strategy, workspace, status, timeout_ns, first, last));
      },
      "args"_a, "tf32"_a, "strategy"_a, "workspace"_a, "status"_a, "timeout_ns"_a, "first"_a = 0, "last"_a = 0,
      Release());
  m.def(
      "cuda_backward",
      [](const BackwardArgs& args, bool tf32, const std::string& strategy, std::uintptr_t workspace,
          std::uintptr_t status, uint64_t timeout_ns) {
        cuda_backward(args, cuda_options(tf32, strategy, workspace, status, timeout_ns, 0, 0));
      },
      "args"_a, "tf32"_a, "strategy"_a, "workspace"_a, "status"_a, "timeout_ns"_a, Release());
  m.def("cuda_layer_norm", &cuda_layer_norm, "args"_a, Release());
  m.def("cuda_layer_norm_gradients", &cuda_layer_norm_gradients, "args"_a, Release());
  m.def("cards", [] {
    py::list names;
    for (const DeviceLimits& card : known_cards()) names.append(limits_dict(card));
    return names;
  });
  m.def("model_constants", [] {
    py::dict constants;
    for (const auto& [name, value] : model_constants()) constants[name.c_str()] = value;
    return constants;
  });
  m.def(
      "planned_registers",
      [](const std::string& strategy, int type, bool tf32, int gates, bool backward) {
        return planned_registers(strategy_named(strategy), math_of(static_cast<Type>(type), tf32), gates, backward);
      },
      "strategy"_a, "type"_a, "tf32"_a, "gates"_a, "backward"_a);
  m.def(
      "plan",
      [](int cell, int type, bool tf32, int64_t steps, int64_t batch, int64_t hidden, int64_t projection,
          int directions, bool training, const std::string& strategy, const std::string& card, bool packed,
          bool state_dropout) {
        PlanRequest request;
        request.cell = static_cast<Cell>(cell), request.type = static_cast<Type>(type), request.tf32 = tf32;
        request.steps = steps, request.batch = batch, request.hidden = hidden, request.projection = projection;
        request.directions = directions, request.training = training, request.strategy = strategy;
        request.packed = packed, request.state_dropout = state_dropout;
        return plan_dict(make_plan(request, limits_of_card(card)));
      },
      "cell"_a, "type"_a, "tf32"_a, "steps"_a, "batch"_a, "hidden"_a, "projection"_a, "directions"_a, "training"_a,
      "strategy"_a, "card"_a, "packed"_a = false, "state_dropout"_a = false);
}

}  // namespace fr
