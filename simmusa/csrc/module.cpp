// What Python sees: numbers in, numbers out.
#include "mccl.h"
#include "ops.h"
#include "refusals.h"
#include "timeline.h"

#include <c10/core/Stream.h>
#include <torch/csrc/utils/pybind.h>

namespace simmusa {

namespace {

namespace py = pybind11;

Costs costs_of(const py::dict& given) {
  Costs costs;
  auto rates = [](py::handle value) { return value.cast<std::map<std::string, double>>(); };
  for (auto [name, value] : given) {
    auto key = name.cast<std::string>();
    if (key == "launch_ns") costs.launch_ns = value.cast<int64_t>();
    else if (key == "kernel_ns") costs.kernel_ns = value.cast<int64_t>();
    else if (key == "flops_per_s") costs.flops_per_s = rates(value);
    else if (key == "bytes_per_s") costs.bytes_per_s = value.cast<double>();
    else if (key == "host_bytes_per_s") costs.host_bytes_per_s = value.cast<double>();
    else if (key == "alpha_ns") costs.alpha_ns = value.cast<int64_t>();
    else if (key == "link_bytes_per_s") costs.link_bytes_per_s = value.cast<double>();
    else if (key == "slow") costs.slow = rates(value);
    else if (key == "jitter") costs.jitter = value.cast<double>();
    else if (key == "seed") costs.seed = value.cast<uint64_t>();
    else if (key == "burst_ns") costs.burst_ns = value.cast<int64_t>();
    else if (key == "sustained") costs.sustained = value.cast<double>();
    else if (key == "memory_bytes") costs.memory_bytes = value.cast<int64_t>();
    else if (key == "context_bytes") costs.context_bytes = value.cast<int64_t>();
    else if (key == "communicator_bytes") costs.communicator_bytes = value.cast<int64_t>();
    else if (key == "faults") costs.faults = rates(value);
    else throw py::key_error(key);
  }
  return costs;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("set_device_count", &set_device_count);
  module.def("device_count", &device_count);
  module.def("current_device", &current_device);
  module.def("set_device", &set_current_device);
  module.def("current_stream_id", [](int device) { return current_stream(device).id(); });
  module.def("set_stream", &set_current_stream);
  module.def("synchronize", [](int device) { Timeline::get().synchronize_device(device); });
  module.def("elapsed_ms", [](uintptr_t start, uintptr_t end) {
    auto at_ns = [](uintptr_t event) { return reinterpret_cast<const Stamp*>(event)->time_ns; };
    return static_cast<double>(at_ns(end) - at_ns(start)) / 1e6;
  });
  module.def("memory", [](int device) {
    auto now = memory_of(device);
    return std::map<std::string, int64_t>{
        {"current", now.current}, {"peak", now.peak}, {"allocated", now.allocated}, {"freed", now.freed},
        {"blocks", now.blocks}, {"reserved", now.reserved}, {"reserved_peak", now.reserved_peak},
        {"retries", now.retries}, {"failures", now.failures}, {"free", free_bytes(device)}};
  });
  module.def("empty_cache", &give_back_segments);
  module.def(
      "set_registered",
      [](const std::string& version, const std::vector<std::string>& operators,
         const std::map<std::string, std::vector<std::string>>& dtypes, const std::map<std::string, int>& least) {
        set_registered({version, operators, dtypes, least});
      });
  module.def("reset_peak", &reset_peak);
  module.def("set_tf32", &set_tf32);
  module.def("set_costs", [](const py::dict& given) { Timeline::get().set_costs(costs_of(given)); });
  module.def("memory_limit", [] { return Timeline::get().costs().memory_bytes; });
  module.def("host_ns", [] { return Timeline::get().host_ns(); });
  module.def("trace", [](bool on) { Timeline::get().trace(on); });
  module.def("traced", [] {
    py::list entries;
    for (const auto& each : Timeline::get().traced())
      entries.append(py::make_tuple(each.name, each.stream, each.start_ns, each.end_ns));
    return entries;
  });
  py::module::import("torch.distributed");  // knows the type Backend
  module.def("make_mccl", &make_mccl, py::call_guard<py::gil_scoped_release>());
}

}  // namespace simmusa
