"""Mixture of experts of one layer (model.md 2.10). With one EP rank every expert is local; slots of absent experts are zero."""

from dataclasses import dataclass

from torch import Tensor

from prefill_engine.model.parameters import MoeParameters
from prefill_engine.model.step import Equipment, Observer
from prefill_kernels.ops import Rows
from prefill_plan.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """first_expert: logical id of the first routed expert held here."""

    layer: int
    parameters: MoeParameters
    first_expert: int
    spec: ModelSpec
    equipment: Equipment

    def forward(self, x: Rows, is_image_N: Tensor, observe: Observer) -> Tensor:
        """[N, D] act from the normed FFN input; image rows choose experts with their own bias."""
        ops, numerics = self.equipment.ops, self.equipment.numerics
        routing = ops.route(
            x.plain,
            self.parameters.gate,
            self.parameters.bias,
            self.parameters.image_bias,
            is_image_N,
            topk=self.spec.experts_per_token,
            scaling=self.spec.routed_scaling,
            numerics=numerics,
        )
        observe("router_ids", self.layer, routing.expert_ids)
        observe("router_w", self.layer, routing.weights)
        routed_NKD = ops.routed_experts(
            x,
            routing,
            self.parameters.routed,
            first_expert=self.first_expert,
            swiglu_limit=self.spec.swiglu_limit,
            numerics=numerics,
        )
        shared_ND = ops.shared_expert(x, self.parameters.shared, swiglu_limit=self.spec.swiglu_limit, numerics=numerics)
        return ops.combine_experts(routed_NKD, shared_ND)
