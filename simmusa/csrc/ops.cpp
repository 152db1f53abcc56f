// Kernels: the CPU's, run on the device's own bytes without a copy, with the time that the cost model gives them.
#include "ops.h"

#include "refusals.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>

namespace simmusa {

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
constexpr auto kMusa = c10::DeviceType::PrivateUse1;

std::atomic<bool> tf32{false};

// -- the same bytes as a tensor of the other device -------------------------------------------------------------

Tensor with_storage(const Tensor& like, c10::Storage storage, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return made;
}

c10::Storage device_storage(const c10::Storage& cpu, int device) {
  return c10::Storage(c10::Storage::use_byte_size_t(), cpu.nbytes(), adopt(cpu, device), allocator(), true);
}

// -- what an operation touches and what it costs ----------------------------------------------------------------

bool is_view(const c10::FunctionSchema& schema) {
  bool aliases = false;
  for (const auto& argument : schema.arguments())
    if (argument.alias_info() && argument.alias_info()->isWrite()) return false;
  for (const auto& returned : schema.returns()) aliases |= returned.alias_info() != nullptr;
  return aliases;
}

// Operations whose result's shape depends on values: the host waits for it.
bool waits(const c10::FunctionSchema& schema) {
  static const std::set<std::string> names = {
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_consecutive",
      "aten::unique_dim", "aten::bincount"};
  if (names.count(schema.name())) return true;
  for (const auto& returned : schema.returns()) {
    auto kind = returned.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
  }
  return false;
}

// Operations that the host answers from shapes and dtypes: no kernel, nothing to wait for.
bool only_decides(const c10::FunctionSchema& schema) {
  static const std::set<std::string> names = {"aten::_fused_sdp_choice", "aten::is_same_size", "aten::is_set_to"};
  return names.count(schema.name()) > 0;
}

// In-place operations that write what they are given without reading it.
bool overwrites(const c10::FunctionSchema& schema) {
  static const std::set<std::string> names = {
      "aten::fill_", "aten::zero_", "aten::copy_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_",
      "aten::exponential_", "aten::resize_", "aten::resize_as_", "aten::set_", "aten::index_put_", "aten::index_copy_",
      "aten::index_fill_", "aten::scatter_"};
  return names.count(schema.name()) > 0;
}

bool takes_host_tensors(const std::string& name) { return name.find("index") != std::string::npos; }

void require_one_device(const std::string& name, const Tensor& tensor, int& device) {
  if (tensor.is_privateuseone()) {
    TORCH_CHECK(
        device < 0 || device == tensor.get_device(), "Expected all tensors to be on the same device, but ", name,
        " got musa:", device, " and musa:", tensor.get_device());
    device = tensor.get_device();
  }
}

const char* rate_name(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return tf32 ? "tf32" : "fp32";
    case at::kDouble: return "fp64";
    case at::kHalf: return "fp16";
    case at::kBFloat16: return "bf16";
    case at::kChar: return "int8";
    default: return "other";
  }
}

// 2 x products of a matrix product with (..., m, k) on the left and (..., k, n) on the right.
double product_flops(const Tensor& left, const Tensor& right) {
  return 2.0 * static_cast<double>(left.numel()) * static_cast<double>(right.size(-1));
}

struct Product {
  double flops = 0;
  std::string rate;
};

// Attention counts all pairs of a query and a key, as torch's own counter does: 2 products forward, 5 backward.
Product attention_of(const std::string& name, const std::vector<Tensor>& tensors) {
  static const std::string forward = "aten::_scaled_dot_product_attention_flash_musa";
  if (name == forward) return {2 * product_flops(tensors[0], tensors[1].transpose(-1, -2)), rate_name(tensors[0])};
  if (name == forward + "_backward")
    return {5 * product_flops(tensors[1], tensors[2].transpose(-1, -2)), rate_name(tensors[1])};
  return {};
}

Product product_of(const std::string& name, const std::vector<Tensor>& tensors) {
  if (name.find("attention") != std::string::npos) return attention_of(name, tensors);
  static const std::map<std::string, size_t> first = {
      {"aten::mm", 0},  {"aten::bmm", 0},     {"aten::_int_mm", 0},
      {"aten::mv", 0},  {"aten::addmm", 1},   {"aten::_addmm_activation", 1},
      {"aten::baddbmm", 1}, {"aten::addbmm", 1}};
  auto found = first.find(name);
  if (found == first.end() || tensors.size() < found->second + 2) return {};
  const auto &left = tensors[found->second], &right = tensors[found->second + 1];
  if (name == "aten::mv") return {2.0 * static_cast<double>(left.numel()), rate_name(left)};
  return {product_flops(left, right), rate_name(left)};
}

double rate(const std::map<std::string, double>& rates, const std::string& name) {
  auto found = rates.find(name);
  return found == rates.end() ? 0 : found->second;
}

double seconds(double amount, double per_s) { return per_s > 0 ? amount / per_s : 0; }

}  // namespace

void set_tf32(bool allowed) { tf32 = allowed; }

double kernel_ns(double flops, const std::string& kind, double bytes) {
  auto costs = Timeline::get().costs();
  return static_cast<double>(costs.kernel_ns) +
      1e9 * std::max(seconds(flops, rate(costs.flops_per_s, kind)), seconds(bytes, costs.bytes_per_s));
}

void give_back_bytes(void* lent) { delete static_cast<c10::Storage*>(lent); }

Tensor as_cpu(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  auto* lent = new c10::Storage(tensor.storage());
  c10::DataPtr data(
      tensor.storage().mutable_data(), lent, &give_back_bytes, c10::Device(c10::DeviceType::CPU));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  return with_storage(tensor, std::move(storage), DispatchKey::CPU);
}

void give_back(const Tensor& cpu) {
  if (!cpu.defined() || !cpu.has_storage() || cpu.storage().data_ptr().get_deleter() != &give_back_bytes) return;
  auto* impl = cpu.storage().unsafeGetStorageImpl();
  impl->set_nbytes(0);
  impl->set_data_ptr_noswap(c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
}

int64_t bytes_of(const Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

void add_use(std::vector<Use>& uses, const Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.is_privateuseone() || tensor.numel() == 0) return;
  auto* block = block_of(tensor.storage());
  if (!block) return;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * std::abs(tensor.stride(dim));
  auto begin = reinterpret_cast<int64_t>(tensor.storage().data()) +
      tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  uses.push_back({block, begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size()), writes});
}

namespace {

// -- the boxed fallback: one call of any operator ---------------------------------------------------------------

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), runs_nothing_(is_view(schema_) || only_decides(schema_)) {}

  void run() {
    take_arguments();
    require_registered(schema_, arguments_.empty() ? Tensor() : arguments_[0]);
    if (device_ < 0) device_ = current_device();
    stream_ = key_of(current_stream(device_));
    if (!runs_nothing_) Timeline::get().begin(stream_, schema_.name(), uses_);
    run_on_cpu();
    give_back_metadata();
    take_returns();
    if (runs_nothing_) return;
    auto product = product_of(schema_.name(), arguments_);
    Timeline::get().finish(stream_, schema_.name(), kernel_ns(product.flops, product.rate, bytes_));
    if (waits(schema_)) Timeline::get().synchronize_stream(stream_);
    Timeline::get().touched(stream_, made_);
  }

 private:
  struct Pair {
    Tensor device, cpu;
  };

  // An index beyond its tensor is the host's error on a CPU; on a device it is the kernel that finds it.
  void run_on_cpu() {
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack_);
    } catch (const c10::Error& error) {
      std::string what = error.what_without_backtrace();
      bool beyond = what.find("out of bounds") != std::string::npos || what.find("index out of range in self") != std::string::npos;
      if (runs_nothing_ || !beyond) throw;
      break_device(device_, "device-side assert triggered");
      require_sound(device_);
    }
  }

  Tensor argument(const Tensor& tensor, const c10::Argument& described) {
    if (!tensor.defined()) return tensor;
    const auto* alias = described.alias_info();
    bool writes = alias && alias->isWrite();
    arguments_.push_back(tensor);
    if (!tensor.is_privateuseone()) {
      host_tensor_ |= tensor.dim() > 0;
      return tensor;
    }
    require_one_device(schema_.name(), tensor, device_);
    if (!runs_nothing_) add_use(uses_, tensor, writes);
    auto bytes = static_cast<double>(bytes_of(tensor));
    for (const auto& pair : pairs_) {
      if (!pair.device.is_same(tensor)) continue;
      if (writes) bytes_ += bytes;  // out= is one of the arguments, as torch's own in-place operations have it
      return pair.cpu;
    }
    bool reads_too = writes && !described.is_out() && !overwrites(schema_);
    bytes_ += (reads_too ? 2.0 : 1.0) * bytes;
    pairs_.push_back({tensor, as_cpu(tensor)});
    return pairs_.back().cpu;
  }

  void take_arguments() {
    auto count = schema_.arguments().size();
    auto base = stack_->size() - count;
    for (size_t index = 0; index < count; ++index) {
      auto& value = (*stack_)[base + index];
      const auto& described = schema_.arguments()[index];
      if (value.isTensor()) {
        value = IValue(argument(value.toTensor(), described));
      } else if (value.isTensorList()) {
        auto list = value.toTensorVector();
        for (auto& each : list) each = argument(each, described);
        value = IValue(c10::List<Tensor>(list));
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (std::optional<Tensor> each : value.toOptionalTensorList())
          list.push_back(each && each->defined() ? std::optional<Tensor>(argument(*each, described)) : each);
        value = IValue(list);
      } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
        auto asked = value.toDevice();
        device_ = asked.has_index() ? asked.index() : current_device();
        value = IValue(c10::Device(c10::DeviceType::CPU));
      }
    }
    TORCH_CHECK(
        !host_tensor_ || pairs_.empty() || takes_host_tensors(schema_.name()),
        "Expected all tensors to be on the same device, but ", schema_.name(), " got musa:", device_, " and cpu");
  }

  // resize_, out= and transpose_ change the tensor itself, not only its bytes.
  void give_back_metadata() {
    for (const auto& [device, cpu] : pairs_) {
      bool moved = device.storage().data() != cpu.storage().data();
      if (moved) {
        auto* impl = device.storage().unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(adopt(cpu.storage(), device_));
        impl->set_nbytes(cpu.storage().nbytes());
      }
      if (moved || !device.sizes().equals(cpu.sizes()) || !device.strides().equals(cpu.strides()) ||
          device.storage_offset() != cpu.storage_offset()) {
        device.unsafeGetTensorImpl()->set_storage_offset(cpu.storage_offset());
        device.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides());
      }
    }
  }

  Tensor returned(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (const auto& pair : pairs_)
      if (pair.cpu.is_same(tensor)) return pair.device;
    for (const auto& pair : pairs_)
      if (pair.cpu.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl())
        return with_storage(tensor, pair.device.storage(), DispatchKey::PrivateUse1);
    bytes_ += static_cast<double>(bytes_of(tensor));
    auto made = with_storage(tensor, device_storage(tensor.storage(), device_), DispatchKey::PrivateUse1);
    add_use(made_, made, true);
    return made;
  }

  void take_returns() {
    auto count = schema_.returns().size();
    auto base = stack_->size() - count;
    for (size_t index = 0; index < count; ++index) {
      auto& value = (*stack_)[base + index];
      if (value.isTensor()) {
        value = IValue(returned(value.toTensor()));
      } else if (value.isTensorList()) {
        auto list = value.toTensorVector();
        for (auto& each : list) each = returned(each);
        value = IValue(c10::List<Tensor>(list));
      }
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  bool runs_nothing_, host_tensor_ = false;
  int device_ = -1;
  StreamKey stream_ = 0;
  double bytes_ = 0;
  std::vector<Pair> pairs_;
  std::vector<Tensor> arguments_;
  std::vector<Use> uses_, made_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// -- copies -----------------------------------------------------------------------------------------------------

void poison(const Tensor& cpu) {
  if (cpu.is_non_overlapping_and_dense()) std::memset(cpu.mutable_data_ptr(), 0xFF, static_cast<size_t>(bytes_of(cpu)));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  int device = to.is_privateuseone() ? to.get_device() : from.get_device();
  auto stream = key_of(current_stream(device));
  bool within = from.is_privateuseone() && to.is_privateuseone();
  const auto& host = from.is_privateuseone() ? to : from;
  const char* name = within ? "simmusa::copy" : from.is_privateuseone() ? "simmusa::to_host" : "simmusa::to_device";
  bool queued = within || (non_blocking && is_pinned(host.storage().data()));
  std::vector<Use> uses;
  add_use(uses, from, false);
  add_use(uses, to, true);
  auto& timeline = Timeline::get();
  timeline.begin(stream, name, uses);
  auto costs = timeline.costs();
  if (within) {
    as_cpu(to).copy_(as_cpu(from));
    timeline.finish(stream, name, kernel_ns(0, "", static_cast<double>(bytes_of(from) + bytes_of(to))));
    return to;
  }
  timeline.finish(
      stream, name,
      static_cast<double>(costs.kernel_ns) + 1e9 * seconds(static_cast<double>(bytes_of(from)), costs.host_bytes_per_s));
  if (queued && from.is_privateuseone()) {
    // The host sees the bytes when it has synchronised; until then it reads what no result holds.
    auto result = at::empty_like(to);
    result.copy_(as_cpu(from));
    poison(to);
    timeline.defer(stream, [to, result] {
      at::AutoDispatchBelowADInplaceOrView below;
      to.copy_(result);
    });
    return to;
  }
  as_cpu(to).copy_(as_cpu(from));
  if (!queued) timeline.synchronize_stream(stream);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& self) {
  auto stream = key_of(current_stream(self.get_device()));
  std::vector<Use> uses;
  add_use(uses, self, false);
  auto& timeline = Timeline::get();
  timeline.begin(stream, "simmusa::to_host", uses);
  auto costs = timeline.costs();
  timeline.finish(
      stream, "simmusa::to_host",
      static_cast<double>(costs.kernel_ns) + 1e9 * seconds(static_cast<double>(self.element_size()), costs.host_bytes_per_s));
  timeline.synchronize_stream(stream);
  return at::_local_scalar_dense(as_cpu(self));
}

// -- making and changing tensors, which takes no time on the device ---------------------------------------------

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

Tensor& set_storage(Tensor& self, at::Storage from, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(from));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage from) {
  auto elements = static_cast<int64_t>(from.nbytes() / self.element_size());
  return set_storage(self, std::move(from), 0, {elements}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& from) {
  return set_storage(self, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  auto needed = static_cast<size_t>((self.numel() + self.storage_offset()) * static_cast<int64_t>(self.element_size()));
  if (self.numel() && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

void record_stream(Tensor&, at::Stream) {}  // memory returns to the host at once: there is no cache to warn

// -- convolutions: their own entries for devices outside torch ----------------------------------------------------

// One kernel with named inputs; `flops` is read once it has run.
Tensor run_one(
    const std::string& name, const std::vector<Tensor>& inputs, const double& flops,
    const std::function<std::vector<Tensor>()>& kernel, std::vector<Tensor>& results) {
  int device = -1;
  double bytes = 0;
  std::vector<Use> uses, made;
  for (const auto& input : inputs) {
    if (!input.defined()) continue;
    require_one_device(name, input, device);
    add_use(uses, input, false);
    bytes += static_cast<double>(bytes_of(input));
  }
  auto stream = key_of(current_stream(device));
  Timeline::get().begin(stream, name, uses);
  for (const auto& cpu : kernel()) {
    if (!cpu.defined()) {
      results.push_back(cpu);
      continue;
    }
    bytes += static_cast<double>(bytes_of(cpu));
    results.push_back(with_storage(cpu, device_storage(cpu.storage(), device), DispatchKey::PrivateUse1));
    add_use(made, results.back(), true);
  }
  Timeline::get().finish(stream, name, kernel_ns(flops, rate_name(inputs[0]), bytes));
  Timeline::get().touched(stream, made);
  return results[0];
}

double convolution_flops(const Tensor& output, const Tensor& weight) {
  return 2.0 * static_cast<double>(output.numel()) * static_cast<double>(weight.numel() / weight.size(0));
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  double flops = 0;
  std::vector<Tensor> results, inputs{input, weight};
  std::optional<Tensor> host_bias;
  if (bias && bias->defined()) {
    inputs.push_back(*bias);
    host_bias = as_cpu(*bias);
  }
  auto kernel = [&] {
    auto result = at::convolution_symint(
        as_cpu(input), as_cpu(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups);
    flops = convolution_flops(result, weight);
    return std::vector<Tensor>{result};
  };
  return run_one("aten::convolution", inputs, flops, kernel, results);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  std::vector<Tensor> results;
  auto flops = convolution_flops(gradient, weight) * (mask[0] + mask[1]);
  auto kernel = [&] {
    auto found = at::convolution_backward_symint(
        as_cpu(gradient), as_cpu(input), as_cpu(weight), c10::SymIntArrayRef{c10::SymInt(weight.size(0))}, stride,
        padding, dilation, transposed, output_padding, groups, mask);
    return std::vector<Tensor>{std::get<0>(found), std::get<1>(found), std::get<2>(found)};
  };
  run_one("aten::convolution_backward", {gradient, input, weight}, flops, kernel, results);
  return {results[0], results[1], results[2]};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("resize_", &resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("record_stream", &record_stream);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

}  // namespace

}  // namespace simmusa
