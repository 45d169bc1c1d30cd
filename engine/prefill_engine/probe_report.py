"""What a decode probe found, and how to say it. No torch, so that `prefill-engine request` starts fast."""

import msgspec


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict of one probe.

    next_token: best token after the first one. max_abs_diff: of the logits, probe against reference (C4).
    differing_blocks: complete blocks whose bytes differ from the reference's, of num_blocks. windows_equal: the same of
    all window KV (the draft layers', too, which no logit depends on). cold_max_abs_diff, cold_kl (nats, cold against
    probe), cold_same_token: distance to a run without any hit; it is the reference where nothing was replayed.
    problems: empty = the hand-over is right.
    """

    prompt_tokens: int
    first_token: int
    next_token: int
    num_bytes: int
    max_abs_diff: float
    differing_blocks: int
    num_blocks: int
    windows_equal: bool
    is_replayed: bool
    cold_max_abs_diff: float
    cold_kl: float
    cold_same_token: bool
    problems: tuple[str, ...]


def describe_probe(report: ProbeReport) -> tuple[str, str]:
    """Two lines: the verdict, and the distance to a cold run."""
    run = "a run that replays at the same place" if report.is_replayed else "a one-shot prefill"
    if report.problems:
        verdict = f"WRONG: {'; '.join(report.problems)}"
    elif report.max_abs_diff == 0.0:
        verdict = f"right: the next token's logits, from the handed bytes alone, equal {run} bit for bit"
    else:
        verdict = (
            f"right: the next token's logits, from the handed bytes alone, equal {run} to {report.max_abs_diff:.2g}"
        )
    if not report.is_replayed:
        return (
            verdict,
            f"{report.cold_max_abs_diff:.3g} away from a cold run: nothing was replayed, so it is the same run",
        )
    same = "the same" if report.cold_same_token else "another"
    return verdict, (
        f"{report.cold_max_abs_diff:.3g} away from a cold run at most (KL {report.cold_kl:.2g} nats, {same} next token): "
        "replay is an approximation"
    )
