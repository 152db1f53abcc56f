"""A linear layer whose ranks forget one of their messages, or leave it unsummed."""

from __future__ import annotations

from dataclasses import dataclass

from perfsuite.record.workload import Rank
from perfsuite.workloads.tensor_linear import TensorLinear, TensorLinearStep


@dataclass(frozen=True, kw_only=True)
class ForgetfulLinear(TensorLinear):
    """Its collectives give what goes in, as often as it takes to have the right shape."""

    def build(self, rank: Rank) -> TensorLinearStep:
        return _ForgetfulStep(self, rank)


class _ForgetfulStep(TensorLinearStep):
    def _exchange(self, collective, tensor, *, dim):
        if collective == "all_gather":
            return tensor.repeat(self._ranks if dim == 0 else 1, self._ranks if dim == 1 else 1)
        return self._own_part(tensor, dim) if collective == "reduce_scatter" else tensor
