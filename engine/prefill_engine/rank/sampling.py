"""Choice of the first token from its logits (FirstTokenPlan, C50). Pure; the generator comes from the request's seed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from prefill_engine.messages import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A token, its log-probability under the unmodified distribution, and the `top_logprobs` best alternatives."""

    token: int
    logprob: float
    alt_tokens: tuple[int, ...]
    alt_logprobs: tuple[float, ...]


def sample_token(logits_V: Tensor, sampling: Sampling) -> SampledToken:
    """First token of a prompt.

    Args:
        logits_V: [vocab] wide, finite.
        sampling: temperature 0 is greedy (ties: lowest id), top_p 0 means 1, a forced token is taken as it is.
    """
    logprobs_V = torch.log_softmax(logits_V.double(), dim=-1)
    if sampling.forced_token >= 0:
        token = sampling.forced_token
    elif sampling.temperature <= 0.0:
        token = int(torch.argmax(logprobs_V))
    else:
        token = _draw(logprobs_V / sampling.temperature, top_p=sampling.top_p or 1.0, seed=sampling.seed)
    alternatives = torch.topk(logprobs_V, min(sampling.top_logprobs, logprobs_V.shape[0]))
    return SampledToken(
        token=token,
        logprob=float(logprobs_V[token]),
        alt_tokens=tuple(alternatives.indices.tolist()),
        alt_logprobs=tuple(alternatives.values.tolist()),
    )


def _draw(scaled_V: Tensor, *, top_p: float, seed: int | None) -> int:
    """One draw from softmax(scaled) cut to the smallest set of best tokens whose mass reaches top_p."""
    generator = torch.Generator(device=scaled_V.device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed & (2**63 - 1))
    probabilities, order = torch.sort(torch.softmax(scaled_V, dim=-1), descending=True, stable=True)
    kept = torch.cumsum(probabilities, dim=-1) - probabilities < top_p
    index = torch.multinomial(probabilities * kept, 1, generator=generator)
    return int(order[index])
