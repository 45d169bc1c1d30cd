"""What `helm test` runs: is the API served, are its rules in force, does an operator lead? Nothing is stored (dry run).

Arguments: the release's namespace, and one that it watches.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
LEASE_WAIT_SECONDS = 60


def ask_server(method, path, body=None):
    """(HTTP status, answer) of one request with the pod's own service account."""
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    server = f"https://{f'[{host}]' if ':' in host else host}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    with open(f"{ACCOUNT}/token") as token:
        headers = {"Authorization": f"Bearer {token.read()}", "Content-Type": "application/json"}
    request = urllib.request.Request(server + path, method=method, headers=headers)
    request.data = None if body is None else json.dumps(body).encode()
    tls = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
    try:
        with urllib.request.urlopen(request, context=tls, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def pool(**spec):
    """A pool that makes no pod: paused, and of the CPU profile."""
    source = {"pvc": {"claimName": "none"}}
    model = {"name": "test-tiny", "architecture": "test-tiny", "revision": "1", "source": source}
    engine = {"image": "none", "device": "cpu", "resources": {"requests": {"cpu": "1"}}}
    body = {"apiVersion": "prefill.dev/v1alpha1", "kind": "PrefillPool", "metadata": {"name": "helm-test"}}
    return {**body, "spec": {"paused": True, "model": model, "engine": engine, **spec}}


def check_pool(ask, namespace):
    path = f"/apis/prefill.dev/v1alpha1/namespaces/{namespace}/prefillpools?dryRun=All"
    status, answer = ask("POST", path, pool())
    yield status == 201, f"a paused pool is accepted: {status} {answer.get('message', '')}"
    status, answer = ask("POST", path, pool(rollout={"maxSurge": 0, "maxUnavailable": 0}))
    yield status == 422, f"a pool that could never roll is refused: {status} {answer.get('message', '')}"


def check_leader(ask, namespace, sleep):
    """The holder must renew: an old record alone proves nothing, so two different renewals are waited for."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/prefill-operator"
    seen, holder = set(), "nobody"
    for _ in range(LEASE_WAIT_SECONDS):
        status, answer = ask("GET", path)
        spec = answer.get("spec", {}) if status == 200 else {}
        holder = spec.get("holderIdentity") or "nobody"
        if spec.get("holderIdentity"):
            seen.add((holder, spec.get("renewTime")))
        if len(seen) > 1:
            break
        sleep(1)
    yield len(seen) > 1, f"an operator leads: {holder}"


def main(release_namespace, pool_namespace, *, ask=ask_server, sleep=time.sleep):
    """Number of checks that failed."""
    failed = 0
    for good, text in (*check_pool(ask, pool_namespace), *check_leader(ask, release_namespace, sleep)):
        print("ok    " if good else "FAILED", text, flush=True)
        failed += not good
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
