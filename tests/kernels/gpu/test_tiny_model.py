"""The golden tiny model under the Triton ops, in the interpreter: every op call of two chunks beside `ref`, same inputs."""

import pytest
import torch

from prefill_engine.check.golden import check_golden
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.triton_ops import triton_ops
from prefill_kernels.numerics import PRODUCTION, Numerics
from prefill_kernels.op_sets import load_ops
from prefill_kernels.ops import Ops
from prefill_kernels.vision_ops import load_vision_ops
from prefill_testing.lockstep_ops import LockstepOps
from prefill_testing.tiny_comparison import run_observed
from prefill_testing.tiny_model import GOLDEN, random_tokens

_FLOAT32_STEPS = 2e-6
"""Sums and transcendental functions in another order or library: fp32 outputs that no quantiser has seen yet."""
_LIMITS = {
    ("mhc_turn", "result.mixes.pre"): _FLOAT32_STEPS,
    ("mhc_turn", "result.mixes.post"): _FLOAT32_STEPS,
    ("mhc_turn", "result.mixes.comb"): _FLOAT32_STEPS,
    ("engram_gate", "result[1]"): _FLOAT32_STEPS,
    ("route", "result.weights"): _FLOAT32_STEPS,
    ("lm_head", "result"): _FLOAT32_STEPS,
    # Its probabilities are rounded to bf16 against another maximum (see the kernel): one bf16 rounding more than `ref`.
    ("sparse_attention", "result"): 4e-3,
}
"""Relative L2 per output; every other output must be equal bit for bit."""
_CALLED = {name for name in vars(Ops) if not name.startswith("_")} - {"decode_window"}
"""decode_window is for observers of the ring alone; the model reads keys from window_rows."""


@pytest.mark.slow
@pytest.mark.parametrize("chip", list(Chip), ids=lambda chip: chip.name)
def test_every_op_of_a_real_step_agrees_with_ref(chip: Chip) -> None:
    ops = LockstepOps(load_ops("ref"), triton_ops(chip))
    run_observed(ops, torch.device("cpu"), random_tokens(3, 60), chunk=40)
    assert {difference.op for difference in ops.differences} >= _CALLED - {"index_values"}
    for difference in ops.differences:
        limit = _LIMITS.get((difference.op, difference.output))
        if limit is None:
            assert difference.unequal == 0, difference
        else:
            assert difference.relative <= limit, difference


@pytest.mark.slow
def test_whole_prompts_meet_the_golden_logits_by_their_gross_rule() -> None:
    """decisions C21: differences grow through quantisers from layer to layer; beside other implementations statistics hold."""
    report = check_golden(
        GOLDEN / "tiny_quant", ops=triton_ops(Chip.SM_90), vision_ops=load_vision_ops("ref"), regimes=["quant"]
    )
    assert report.passed, [finding for finding in report.findings if not finding.passed]
    assert {finding.case for finding in report.findings} == {"q_009", "q_065", "q_140"}


def test_other_numerics_are_refused() -> None:
    exact = Numerics(activation=torch.float32, quantise_activations=False, quantise_cache=False)
    ids = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="Triton ops compute with"):
        triton_ops(Chip.SM_90).embed_tokens(torch.zeros(4, 8), ids, numerics=exact)
    assert triton_ops(Chip.SM_90).embed_tokens(torch.zeros(4, 8).bfloat16(), ids, numerics=PRODUCTION).shape == (1, 8)
