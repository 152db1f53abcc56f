#include "refusals.h"

#include "timeline.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace simmusa {

namespace {

constexpr int kArchitecture = 220;  // mp_22, as torch_musa counts

struct Rules {
  std::string version;
  std::unordered_set<std::string> operators;
  std::unordered_map<std::string, std::vector<std::string>> dtypes;
  std::unordered_map<std::string, int> architectures;
};

Rules& rules() {
  static auto* known = new Rules;  // written once, before the device is used
  return *known;
}

std::atomic<bool> any_broken{false};
std::mutex broken_mutex;
std::map<int, std::string>& broken() {
  static auto* devices = new std::map<int, std::string>;
  return *devices;
}

}  // namespace

void set_registered(Registered given) {
  auto& known = rules();
  known.version = std::move(given.version);
  known.operators = {given.operators.begin(), given.operators.end()};
  known.dtypes = {given.dtypes.begin(), given.dtypes.end()};
  known.architectures = {given.architectures.begin(), given.architectures.end()};
}

void require_registered(const c10::FunctionSchema& schema, const at::Tensor& first) {
  const auto& known = rules();
  if (known.operators.empty()) return;
  auto name = schema.name();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  TORCH_CHECK_NOT_IMPLEMENTED(
      known.operators.count(name), "Could not run '", name, "' with arguments from the 'musa' backend: torch_musa ",
      known.version, " does not register it");
  auto least = known.architectures.find(name);
  TORCH_CHECK(
      least == known.architectures.end() || least->second <= kArchitecture, "\"", name,
      "\" is only supported for MUSA_ARCH >= ", least->second);
  auto listed = known.dtypes.find(name);
  if (listed == known.dtypes.end() || !first.defined() || first.is_complex()) return;
  const auto* dtype = c10::toString(first.scalar_type());
  TORCH_CHECK(
      std::count(listed->second.begin(), listed->second.end(), dtype), "\"", name, "\" not implemented for '", dtype,
      "'");
}

void break_device(int device, const std::string& why) {
  std::lock_guard<std::mutex> guard(broken_mutex);
  broken().emplace(device, why);
  any_broken = true;
}

void require_sound(int device) {
  if (!any_broken) return;
  std::lock_guard<std::mutex> guard(broken_mutex);
  auto found = broken().find(device);
  TORCH_CHECK(
      found == broken().end(), "MUSA error: ", found->second,
      "\nMUSA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
      "incorrect.\nFor debugging consider passing MUSA_LAUNCH_BLOCKING=1");
}

}  // namespace simmusa
