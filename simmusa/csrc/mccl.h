// The collective backend of the simulated device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simmusa {

c10::intrusive_ptr<c10d::Backend> make_mccl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size);

}  // namespace simmusa
