"""simmusa: MTT S4000 with the interface of torch_musa, without the hardware; for tests only, never installed.

A PrivateUse1 device named ``musa`` with the collective backend ``mccl``: it computes on the CPU in virtual time. A cost
model advances the device's clock at every operation, so every figure of a case is predictable, and a forgotten
synchronisation is an error. See perfsuite docs simmusa.
"""
