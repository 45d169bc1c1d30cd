"""What the API server refuses: told in Progressing with its own words and what to do, asked again slowly, forgotten when it
passes."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from prefill_operator.cluster import translate_error
from prefill_operator.errors import ClusterError
from prefill_operator.model import ChildKind, RefusalReason
from prefill_operator.names import CONDITION_REASONS, ConditionType, Reason
from prefill_operator.pool_memory import REFUSAL_SECONDS, PoolMemory
from prefill_operator.refusals import judge_refusal
from prefill_operator.resources import CHILDREN, PODS
from prefill_operator.settings import OperatorSettings
from prefill_testing.fake_api import Fault
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import OperatorRig

BUDGET = CHILDREN[ChildKind.DISRUPTION_BUDGET]
CONFIG_MAP = CHILDREN[ChildKind.CONFIG_MAP]
RBAC = 'is forbidden: User "system:serviceaccount:prefill-system:prefill-operator" cannot create resource "x" in API group ""'
QUOTA = 'configmaps "x" is forbidden: exceeded quota: objects, requested: count/configmaps=1, used: 5, limited: 5'
Rigs = Callable[..., Awaitable[OperatorRig]]


def _error(code: int, text: str) -> ClusterError:
    return translate_error("create /x", "create", code, b'{"message": "%s"}' % text.replace('"', '\\"').encode())


@pytest.mark.parametrize(
    ("code", "text", "is_pod", "reason", "advice"),
    [
        (403, "pods " + RBAC, True, RefusalReason.FORBIDDEN, "rbac.*"),
        (403, "configmaps " + RBAC, False, RefusalReason.FORBIDDEN, "rbac.*"),
        (403, 'pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged', True,
         RefusalReason.FORBIDDEN, "pod-security.kubernetes.io/enforce"),
        (403, 'admission webhook "w" denied the request: image cannot be pulled from there', True,
         RefusalReason.FORBIDDEN, "webhook"),
        (400, 'admission webhook "w" denied the request: no label team', True, RefusalReason.FORBIDDEN, "webhook"),
        (422, "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no", False, RefusalReason.FORBIDDEN, "policy"),
        (403, 'pods "x" is forbidden: error looking up service account ns/me: serviceaccount "me" not found', True,
         RefusalReason.FORBIDDEN, "podTemplate.spec.serviceAccountName"),
        (403, 'pods "x" is forbidden: maximum memory usage per Pod is 1Gi', True, RefusalReason.FORBIDDEN, "LimitRange"),
        (403, QUOTA, False, RefusalReason.QUOTA_EXCEEDED, "ResourceQuota"),
        (422, "spec.containers[0].image: Required value", True, RefusalReason.INVALID_OVERLAY, "--dry-run=server"),
        (422, "spec.maxReplicas: Invalid value: 0", False, RefusalReason.OBJECT_REFUSED, "field of the pool"),
        (404, "the server could not find the requested resource", False, RefusalReason.OBJECT_REFUSED, "CustomResource"),
    ],
)  # fmt: skip
def test_each_refusal_has_its_word_and_its_advice(
    code: int, text: str, is_pod: bool, reason: RefusalReason, advice: str
) -> None:
    found, remedy = judge_refusal(_error(code, text), is_pod=is_pod)

    assert found is reason
    assert remedy.startswith("expected ")
    assert advice in remedy
    assert Reason(found.value) in CONDITION_REASONS[ConditionType.PROGRESSING]


@pytest.mark.parametrize(
    ("resource", "name", "code", "text", "word"),
    [
        ("configmaps", "ConfigMap flash-", 403, "configmaps " + RBAC, "Forbidden"),
        ("configmaps", "ConfigMap flash-", 403, QUOTA, "QuotaExceeded"),
        ("services", "Service flash", 422, "spec.ports: Invalid value", "ObjectRefused"),
        ("poddisruptionbudgets", "PodDisruptionBudget flash", 403, "poddisruptionbudgets " + RBAC, "Forbidden"),
    ],
)
@in_loop
async def test_refused_object_is_told_and_asked_again_slowly_until_it_passes(
    resource: str, name: str, code: int, text: str, word: str
) -> None:
    rig = await OperatorRig.start()
    fault = Fault(resource=resource, status=code, reason="x", message=text, times=10_000)
    rig.api.faults += [replace(fault, verb="create"), replace(fault, verb="apply")]
    rig.create_pool()
    await rig.run(14)

    progressing = rig.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", word)
    for words in (name, resource, str(code), text, "expected "):
        assert words in progressing["message"]
    is_needed = resource == "configmaps"
    assert len(rig.names()) == (0 if is_needed else 3), "only the config map is needed to make a pod"
    status = rig.pool()["status"]
    rig.api.requests.clear()
    await rig.run(60, seconds=5.0)
    tries = [request for request in rig.api.writes() if request.resource == resource]
    assert 4 <= len(tries) <= 6, "once a minute in five"
    assert rig.pool()["status"] == status, "the same refusal is told once"
    labels = {"kind": "PrefillPool", "reason": "QUOTA_DENIED" if text == QUOTA else "REQUEST_REJECTED"}
    assert rig.metrics.registry.get_sample_value("prefill_operator_reconcile_errors_total", labels) >= len(tries)

    rig.api.faults.clear()
    await rig.run(40, seconds=3.0)
    assert rig.condition("Progressing")["status"] == "True"
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_refused_autoscaler_is_told_by_its_own_condition_too(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    text = "horizontalpodautoscalers " + RBAC
    rig.api.faults.append(
        Fault(verb="apply", resource="horizontalpodautoscalers", status=403, message=text, times=10_000)
    )
    metrics = [{"name": "RowsWaitingPerGPU", "target": 1000}]
    rig.change_spec(autoscaling={"actuator": "HPA", "maxReplicas": 4, "metrics": metrics})
    await rig.run(4)

    for kind in ("AutoscalingActive", "Progressing"):
        assert rig.condition(kind)["status"] == "False"
        assert text in rig.condition(kind)["message"]
    assert rig.condition("Ready")["status"] == "True", "pods go on without it"


@in_loop
async def test_changed_pool_is_tried_at_once(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    text = "spec.minAvailable: Invalid value"
    rig.api.faults.append(Fault(verb="apply", resource="poddisruptionbudgets", status=422, message=text))
    rig.change_spec(replicas=3)
    await rig.run(2)
    assert rig.condition("Progressing")["reason"] == "ObjectRefused"

    rig.change_spec(replicas=4)
    await rig.run(8)

    assert rig.api.get(BUDGET, "flash", "ns")["spec"]["minAvailable"] == 4
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_refused_config_of_a_new_revision_costs_no_running_pe(ready_rig: Rigs) -> None:
    rig = await ready_rig({"rollout": {"minReadySeconds": 0, "maxSurge": 0, "maxUnavailable": 1}})
    names = rig.names()
    rig.api.faults.append(Fault(resource="configmaps", status=403, message="configmaps " + RBAC, times=10_000))
    rig.change_spec(engine={"image": "engine:2"})
    await rig.run(40, seconds=5.0)

    assert rig.names() == names
    assert rig.condition("Progressing")["reason"] == "Forbidden"
    assert rig.condition("Available")["status"] == "True"


@in_loop
async def test_refused_delete_is_told_and_backs_off(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    text = 'pods "x" is forbidden: User "o" cannot delete resource "pods"'
    rig.api.faults.append(Fault(verb="delete", resource="pods", status=403, message=text, times=10_000))
    rig.change_spec(replicas=1)
    await rig.run(100)

    progressing = rig.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "Forbidden")
    assert 'cannot delete resource "pods"' in progressing["message"]
    tries = [request for request in rig.api.writes() if (request.verb, request.resource) == ("delete", "pods")]
    assert len(tries) <= 12, "1, 2, 4 .. 60 s apart in 200 s"

    rig.api.faults.clear()
    await rig.run(60)
    assert len(rig.names()) == 2
    assert rig.condition("Progressing")["reason"] == "Complete"


@in_loop
async def test_gate_that_may_not_be_opened_is_told_and_stops_no_replacement(ready_rig: Rigs) -> None:
    rig = await ready_rig(settings=OperatorSettings(readiness_gate=True))
    text = 'pods "x" is forbidden: User "o" cannot patch resource "pods/status"'
    rig.api.faults.append(Fault(verb="strategic", resource="pods", status=403, message=text, times=10_000))
    gone = rig.names()[0]
    rig.api.remove(PODS, gone, "ns")
    await rig.run(12)

    assert len(rig.names()) == 3
    progressing = rig.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "Forbidden")
    assert 'cannot patch resource "pods/status"' in progressing["message"]
    tries = [request for request in rig.api.writes() if request.subresource == "status" and request.resource == "pods"]
    assert len(tries) <= 10, "with growing pauses"

    rig.api.faults.clear()
    await rig.run(40)
    assert rig.condition("Ready")["status"] == "True"
    assert rig.condition("Progressing")["reason"] == "Complete"


@in_loop
async def test_refused_pod_names_what_refused_it() -> None:
    rig = await OperatorRig.start()
    text = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged (container "kvd")'
    rig.api.faults.append(Fault(verb="create", resource="pods", status=403, message=text, times=10_000))
    rig.create_pool()
    await rig.run(3)

    progressing = rig.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "Forbidden")
    for words in ("Pod flash-", "403", text, "pod-security.kubernetes.io/enforce"):
        assert words in progressing["message"]


def test_refusal_of_what_nobody_wants_any_more_is_forgotten() -> None:
    memory = PoolMemory(uid="u")
    refusal: Any = type("Refusal", (), {"at": 0.0})
    memory.refusals["delete", "Pod", "gone"] = refusal
    memory.drop_old(REFUSAL_SECONDS - 1)
    assert memory.refusals
    memory.drop_old(REFUSAL_SECONDS)
    assert not memory.refusals
