// What communication and the Python module need of the kernels.
#pragma once

#include "timeline.h"

#include <ATen/core/Tensor.h>

namespace simmusa {

at::Tensor as_cpu(const at::Tensor& tensor);  // the same bytes as a CPU tensor
void give_back(const at::Tensor& cpu);  // one of as_cpu ends its hold on the bytes: nobody reads it again
int64_t bytes_of(const at::Tensor& tensor);
void add_use(std::vector<Use>& uses, const at::Tensor& tensor, bool writes);
double kernel_ns(double flops, const std::string& kind, double bytes);
void set_tf32(bool allowed);

}  // namespace simmusa
