"""simmusa: MTT S4000 as torch_musa offers it, without the hardware; for tests only, never installed.

A PrivateUse1 device named ``musa`` with the collective backend ``mccl``: the arithmetic is the CPU's, the time is
virtual.  Every operation advances the device's clock by what a cost model says, so every figure of a case can be told
beforehand; a synchronisation that is forgotten is an error.  See perfsuite docs simmusa.
"""
