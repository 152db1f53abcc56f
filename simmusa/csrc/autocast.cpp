// Autocast: the lists of operations that torch keeps for its own accelerators.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace simmusa {

namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
#define SIMMUSA_LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIMMUSA_FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(SIMMUSA_LOW)
  AT_FORALL_FP32(SIMMUSA_FULL)
}

}  // namespace

}  // namespace simmusa
