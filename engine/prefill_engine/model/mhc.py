"""Hyper-connection of one sub-layer (model.md 2.2). The trap: `pre` serves the next sub-layer, `post` and `comb` this one."""

from dataclasses import dataclass

from torch import Tensor

from prefill_engine.model.step import Equipment, Residual
from prefill_kernels.ops import MhcTurn, Rows
from prefill_kernels.weights import MhcWeights
from prefill_plan.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnection:
    """norm: [D], of the sub-layer's input."""

    weights: MhcWeights
    norm: Tensor
    spec: ModelSpec
    equipment: Equipment

    def turn(self, residual: Residual) -> MhcTurn:
        """Streams after the sub-layer before this one, this one's input and mixes."""
        return self.equipment.ops.mhc_turn(
            residual.streams,
            residual.pre,
            self.norm,
            output=residual.output,
            weights=self.weights,
            num_iters=self.spec.hc_sinkhorn_iters,
            hc_eps=self.spec.hc_eps,
            rms_eps=self.spec.rms_eps,
            numerics=self.equipment.numerics,
        )

    def input(self, residual: Residual) -> Rows:
        """This sub-layer's input alone."""
        return self.equipment.ops.mhc_input(
            residual.streams,
            residual.pre,
            self.norm,
            output=residual.output,
            rms_eps=self.spec.rms_eps,
            numerics=self.equipment.numerics,
        )
