// What torch_musa and its devices refuse and a CPU does not: operators that are not registered, dtypes that a kernel
// does not take, kernels of newer architectures, and a device after a fault.
#pragma once

#include <ATen/core/function_schema.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace at {
class Tensor;
}

namespace simmusa {

// Of one version; see simmusa/registered.py.
struct Registered {
  std::string version;
  std::vector<std::string> operators;                     // aten::mm.out, without the dot where there is no overload
  std::map<std::string, std::vector<std::string>> dtypes;  // of a first tensor that is not complex, where the kernel lists them
  std::map<std::string, int> architectures;                // the least that a kernel runs on
};
void set_registered(Registered registered);

// NotImplementedError, or RuntimeError for a dtype or an architecture; `first` may be undefined.
void require_registered(const c10::FunctionSchema& schema, const at::Tensor& first);

// From now on every call of this process on the device fails, as after a fault of the real one.
void break_device(int device, const std::string& why);
void require_sound(int device);

}  // namespace simmusa
