// The flash kernel's two operators, which torch_musa adds to torch's own: its signatures, the CPU's arithmetic.
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>

namespace simmusa {

namespace {

using at::Tensor;

// Heads of keys, each as often as heads of queries share it.
Tensor shared(const Tensor& keys, const Tensor& query) {
  return keys.size(1) == query.size(1) ? keys : keys.repeat_interleave(query.size(1) / keys.size(1), 1);
}

Tensor added(const Tensor& gradient, const Tensor& keys) {
  if (keys.size(1) == gradient.size(1)) return gradient;
  return gradient.unflatten(1, {keys.size(1), -1}).sum(2);
}

void require_default(const Tensor& query, const std::optional<Tensor>& mask, double dropout, std::optional<double> scale) {
  TORCH_CHECK(query.dim() == 4, "Expect all query, key, value has 4D shape!");
  TORCH_CHECK(!mask.has_value() && dropout == 0, "simmusa's flash attention knows no mask and no dropout");
  TORCH_CHECK(
      !scale || *scale == 1 / std::sqrt(static_cast<double>(query.size(-1))),
      "Now torch_musa only allows explicit value of `scale` parameter, whose value is equal to `1/sqrt(query.size(-1))`.");
}

std::tuple<Tensor, Tensor, Tensor> flash(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool causal, std::optional<double> scale) {
  require_default(query, mask, dropout, scale);
  auto [out, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, shared(key, query), shared(value, query), 0.0, causal);
  return {out, log_sum.to(at::kFloat).contiguous(), at::empty({0}, query.options().dtype(at::kBool))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> flash_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& log_sum, const Tensor&, bool causal, const std::optional<Tensor>& mask, std::optional<double> scale) {
  require_default(query, mask, 0.0, scale);
  auto [d_query, d_key, d_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, query, shared(key, query), shared(value, query), out, log_sum, 0.0, causal);
  return {d_query, added(d_key, key), added(d_value, value), Tensor()};
}

TORCH_LIBRARY_FRAGMENT(aten, library) {
  library.def(
      "_scaled_dot_product_attention_flash_musa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
      "float dropout_p=0.0, bool is_causal=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, "
      "Tensor dropout_mask)");
  library.def(
      "_scaled_dot_product_attention_flash_musa_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
      "Tensor output, Tensor logsumexp, Tensor dropout_mask, bool is_causal, Tensor? attn_mask=None, *, "
      "float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_attn_mask)");
}

// The device runs an operator of the CPU on its own bytes.
TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_scaled_dot_product_attention_flash_musa", &flash);
  library.impl("_scaled_dot_product_attention_flash_musa_backward", &flash_backward);
}

}  // namespace

}  // namespace simmusa
