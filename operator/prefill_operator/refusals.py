"""What it means that the API server refuses a write: which kind of refusal, what was expected, and what a user can do.

Pure. Used by apply.py when it meets one and by decide.py, which leaves a refused object alone until it is time to ask again.
The trap: 403 is not only RBAC. Pod Security, LimitRanges and admission webhooks answer 403 too, and a policy may answer 422.
"""

import re

from prefill_operator.errors import ClusterError, QuotaDenied
from prefill_operator.model import Observed, OperatorTimes, RefusalReason, WriteRefusal

_DENIED = re.compile(r"denied (the )?request")
"""By an admission webhook (any code) or a ValidatingAdmissionPolicy (422)."""
_NO_RIGHT = re.compile(r'User ".*" cannot ')
_NO_ACCOUNT = re.compile(r"looking up service ?account")

_POD_REMEDY = (
    "expected a valid pod: correct podTemplate; try `prefill-operator render -f pool.yaml | kubectl apply "
    "--dry-run=server -f -`"
)
_REMEDIES = (
    (re.compile("violates PodSecurity"), "expected a namespace whose Pod Security level allows this pod: raise its label "
     "pod-security.kubernetes.io/enforce, or leave out of the pool what these words name"),
    (_DENIED, "expected no admission webhook or policy to object: change what its words name, or ask its owner for an "
     "exception"),
    (_NO_RIGHT, "expected this right for the operator's service account: compare its rules with those of the chart "
     "(values rbac.*), then helm upgrade"),
    (_NO_ACCOUNT, "expected the service account to exist: create it, or correct "
     "podTemplate.spec.serviceAccountName"),
)  # fmt: skip
"""Words of the API server, and what to do; the first that fits."""


def judge_refusal(error: ClusterError, *, is_pod: bool) -> tuple[RefusalReason, str]:
    """The word for conditions, and what was expected with what to do.

    Args:
        is_pod: a pod was to be made, whose shape the user decides (podTemplate); else another object of ours.
    """
    text = error.message
    if isinstance(error, QuotaDenied):
        return (
            RefusalReason.QUOTA_EXCEEDED,
            "expected room in a ResourceQuota of the namespace: raise it, or ask for less",
        )
    if error.status == 403 or _DENIED.search(text):
        remedy = "expected the namespace's admission rules (as a LimitRange) to allow it: change what these words name"
        return RefusalReason.FORBIDDEN, next((advice for words, advice in _REMEDIES if words.search(text)), remedy)
    if is_pod:
        return RefusalReason.INVALID_OVERLAY, _POD_REMEDY
    if error.status == 404:
        return (
            RefusalReason.OBJECT_REFUSED,
            "expected the cluster to serve this kind: install its CustomResourceDefinition",
        )
    remedy = "expected a valid object: correct the field of the pool that these words name; if none does, report a bug"
    return RefusalReason.OBJECT_REFUSED, remedy


def describe_refusal(what: str, error: ClusterError, remedy: str) -> str:
    """What was to be done, the request with its code, the server's words, what was expected and what to do."""
    return f"{what} was refused: {error.message}; {remedy}"


def find_write_refusals(observed: Observed, times: OperatorTimes) -> tuple[WriteRefusal, ...]:
    """Refusals still in force; that of an object of ours is void when the pool has changed."""
    return tuple(
        refusal
        for refusal in observed.write_refusals
        if observed.now < refusal_end(refusal, times)
        and (not refusal.is_withheld or refusal.generation == observed.pool.generation)
    )


def refusal_end(refusal: WriteRefusal, times: OperatorTimes) -> float:
    """Seconds since the epoch: when a withheld object is asked for again; other writes are tried again with the queue's
    back-off, whose longest pause is the same, so that one must have been tried before twice the time is over."""
    return refusal.at + times.refusal_retry_seconds * (1 if refusal.is_withheld else 2)
