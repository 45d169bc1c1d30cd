"""demo.py up | down: a two-node Kubernetes on this machine, the chart installed, a pool Ready, a prefill answered.

`make demo-cluster` and `make demo-cluster-down`. Says what it does as it goes and leaves the cluster up, with lines to try next.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from prefill_bed.api import ApiError
from prefill_bed.bed import Bed
from prefill_bed.cluster import BedError, Cluster, Profile, end_stale
from prefill_bed.engine_pod import GRPC_PORT, ask
from prefill_bed.installation import Helm, Release
from prefill_bed.pools import PoolView, cpu_pool
from prefill_bed.waiting import until

BEGIN = time.monotonic()
MAX_COMPLAINT = 600


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGIN:5.0f} s] {text}", flush=True)


def up(cache: Path) -> int:
    bed, directory = Bed(cache), cache / "demo"
    say("Kubernetes 1.36 from source (about 8 minutes the first time on two cores, then from the cache)")
    binaries = bed.binaries
    say("images of operator and engine with buildah (a minute the first time)")
    images = bed.images
    end_stale(directory, binaries)
    say("starting etcd, API server, controllers, scheduler and two nodes with eight pretended GPUs each")
    cluster = Cluster(Profile(nodes=2, images=images), binaries, directory)
    cluster.start()
    print(cluster.kubectl("get", "nodes", "-o", "wide").stdout)
    say("helm install: the operator, two replicas")
    release = Release(cluster, Helm(cluster, bed.helm_binary), ["/"])
    notes = release.install(replicaCount=2)
    print(notes.partition("NOTES:")[2].strip())
    say("kubectl apply: a pool of one engine and one spare (CPU profile, tiny random checkpoint)")
    pool = cpu_pool("tiny", bed.checkpoint, replicas=1)
    pool["metadata"]["namespace"] = "default"
    cluster.apply(pool)
    view = PoolView(cluster, "default", "tiny")
    wait_loudly(view)
    print(cluster.kubectl("get", "pfp,pods,pdb,svc", "-o", "wide").stdout)
    pod = view.ready()[0]
    endpoint = f"{pod['status']['podIP']}:{GRPC_PORT}"
    say(f"a prefill by {pod['metadata']['name']} at {endpoint}, its hand-off checked by a decode probe")
    answer = ask(endpoint, bed.checkpoint, directory)
    print(answer.text)
    if not answer.ok:
        return 1
    say("done; the cluster stays up. Try:")
    print(next_lines(cluster, endpoint, bed.checkpoint, directory))
    return 0


def wait_loudly(view: PoolView) -> None:
    """Prints the pool's own words whenever they change, until it is Ready."""
    said = ""

    def check() -> None:
        nonlocal said
        found = view.condition("Ready")
        words = f"{found.get('status', '?')} {found.get('reason', '')}: {found.get('message', 'not looked at yet')}"
        if words != said:
            said = words
            say(f"pool tiny: Ready={words}")
        assert found.get("status") == "True", words

    until("the pool to be Ready", check, seconds=600, interval=1)


def next_lines(cluster: Cluster, endpoint: str, checkpoint: Path, directory: Path) -> str:
    return f"""
  export KUBECONFIG={cluster.kubeconfig} PATH={cluster.binaries}:$PATH
  kubectl get prefill -o wide
  kubectl describe pfp tiny
  kubectl delete pod -l prefill.dev/pool=tiny --wait=false     # and watch them come back
  kubectl scale pfp tiny --replicas=2
  kubectl patch pfp tiny --type=merge -p '{{"spec":{{"model":{{"revision":"r2"}}}}}}'     # a rolling replacement
  kubectl drain node-2 --ignore-daemonsets --delete-emptydir-data --force
  .venv/bin/prefill-engine request --endpoint {endpoint} --token-ids {directory}/tokens.json --probe --model {checkpoint}
  make demo-cluster-down
"""


def complain(error: Exception, cache: Path) -> str:
    """One line: what failed, the last thing it said, and what to do."""
    if isinstance(error, subprocess.TimeoutExpired):
        command = error.cmd if isinstance(error.cmd, str) else " ".join(map(str, error.cmd))
        text = f"{command} did not end within {error.timeout:.0f} s"
    else:
        first, *others = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()] or [repr(error)]
        text = f"{first} ... {others[-1]}" if others else first
    if len(text) > MAX_COMPLAINT:
        text = f"{text[: MAX_COMPLAINT // 2]} ... {text[-MAX_COMPLAINT // 2 :]}"
    if isinstance(error, BedError):
        todo = "it needs root, Go 1.26 and Debian packages (tests/cluster/README.md); what is built already is kept"
    else:
        todo = "`make demo-cluster-down` ends what is up, then try again"
    return f"demo.py: {text}. To do: {todo}; logs are in {cache / 'demo' / 'log'}"


def main(argv: list[str]) -> int:
    if argv not in (["up"], ["down"]):
        print(__doc__, file=sys.stderr)
        return 2
    if os.geteuid() != 0:
        print("demo.py: a cluster needs root: it starts nodes and network devices", file=sys.stderr)
        return 1
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefill-cluster"
    cache = Path(os.environ.get("PREFILL_CLUSTER_CACHE") or cache)
    try:
        if argv == ["up"]:
            return up(cache)
        end_stale(cache / "demo", Bed(cache).binaries)
    # Commands that failed (helm, kubectl) and states that did not come about are AssertionErrors of the bed.
    except (BedError, AssertionError, ApiError, OSError, subprocess.SubprocessError) as error:
        print(complain(error, cache), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
