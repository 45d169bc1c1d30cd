"""Hyper-connection of one sub-layer (model.md 2.2). The trap: `pre` serves the next sub-layer, `post` and `comb` this one."""

from dataclasses import dataclass

from torch import Tensor

from prefill_engine.model.parameters import MhcParameters
from prefill_engine.model.step import Equipment
from prefill_kernels.ops import MhcMixes
from prefill_plan.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnection:
    parameters: MhcParameters
    spec: ModelSpec
    equipment: Equipment

    def mixes(self, streams_NSD: Tensor) -> MhcMixes:
        """Mixes of this sub-layer, from its input streams."""
        return self.equipment.ops.mhc_mixes(
            streams_NSD,
            self.parameters.fn,
            self.parameters.base,
            self.parameters.scale,
            num_iters=self.spec.hc_sinkhorn_iters,
            hc_eps=self.spec.hc_eps,
            rms_eps=self.spec.rms_eps,
        )

    def expand(self, y_ND: Tensor, streams_NSD: Tensor, mixes: MhcMixes) -> Tensor:
        """[N, S, D] streams after the sub-layer: its output y spread by post, its input streams mixed by comb."""
        return self.equipment.ops.mhc_expand(y_ND, streams_NSD, mixes.post, mixes.comb)
