"""The derivation of torch_musa's operators from its sources, on a made-up version of them."""

from tools.derive_torch_musa_operators import derive, written

TABLE = """
- func: amax
- func: clamp
  dispatch:
    PrivateUse1: Clamp
- func: mm
  device_guard: True
  dispatch:
    PrivateUse1, QuantizedPrivateUse1: at::musa::Mm
- func: relu
  dispatch:
    QuantizedPrivateUse1: Relu
- func: upsample
  dispatch:
     PrivateUse1: Up
"""
KERNELS = """
void Check(const Tensor& self) {
  MUSA_TENSOR_TYPE_CHECK(self);
}

Tensor Clamp(const Tensor& self) {
  if (self.is_complex()) {
    return Other(self);
  }
  Check(self);
  return self;
}

Tensor Mm(const Tensor& self) {
  if (at::musa::getMUSAArch() < 310) {
    TORCH_CHECK(false, "newer ones only");
  }
  return self;
}

Tensor Up(const Tensor& self) {
  if (self.dim() == 3) {
    TORCH_MUSA_CHECK_FLOATING_TYPES(self.scalar_type(), "Up");
  }
  return self;
}
"""


def test_what_is_registered_and_what_its_kernels_ask_for():
    found = derive(TABLE, [KERNELS])
    assert ["amax", "clamp", "mm", "upsample"] == found["operators"]
    assert {"mm": 310} == found["architectures"]
    # That of Up depends on more than the dtype.
    assert {"BFloat16 Double Float Half Int Long": ["clamp"]} == found["dtypes"]


def test_a_version_is_written_as_what_it_changed():
    first = {"operators": ["a", "b"], "dtypes": {}, "architectures": {}}
    made = written({"1": first, "2": {**first, "operators": ["b", "c"]}})
    assert {"added": ["a b"], "removed": []} == made["1"]["operators"]
    assert {"added": ["c"], "removed": ["a"]} == made["2"]["operators"]
