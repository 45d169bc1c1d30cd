#!/bin/bash
# node.sh I: node-I of the running cluster: its own containerd, its own kubelet, its own pod subnet 10.244.I.0/24.
# node.sh I stop: the kubelet and containerd die, the pods live on (a partition). node.sh I crash: the pods die too (power off).
# node.sh I import TAR: an image archive for this node alone. A device's number in node-I/faults-gpu makes that device unhealthy.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/place.sh"
i=$1; cd "$dir"
n=$dir/node-$i; mkdir -p "$n"/{root,state,cni,kubelet}
case ${2:-} in
stop|crash)
  for f in pids/kubelet-$i pids/containerd-$i pids/devices-$i-*; do [ -e "$f" ] && end_process "$f"; done
  [ "$2" = stop ] || end_group node-$i
  exit ;;
"") if pid=$(cat "pids/kubelet-$i" 2>/dev/null) && [ "$(readlink "/proc/$pid/cwd")" = "$dir" ]; then exit; fi ;;            # it is up already
import) ctr -a "$n/c.sock" -n k8s.io images import "$3" >/dev/null; exit ;;
esac
ip addr replace 10.250.0.$((10+i))/24 dev kube0
cat > "$n/cni/10-pods.conflist" <<T
{"cniVersion":"1.0.0","name":"pods-$i","plugins":[{"type":"bridge","bridge":"pods$i","isGateway":true,"ipMasq":false,"hairpinMode":true,
"ipam":{"type":"host-local","dataDir":"$n/ipam","ranges":[[{"subnet":"10.244.$i.0/24"}]],"routes":[{"dst":"0.0.0.0/0"}]}},{"type":"portmap","capabilities":{"portMappings":true}}]}
T
cat > "$n/containerd.toml" <<T
version = 2
root = "$n/root"
state = "$n/state"
[grpc]
  address = "$n/c.sock"
[ttrpc]
  address = "$n/c.sock.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/local/pause:1"
  restrict_oom_score_adj = true
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$n/cni"
T
cat > "$n/kubelet.yaml" <<T
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /node-$i
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
failSwapOn: false
containerRuntimeEndpoint: unix://$n/c.sock
enforceNodeAllocatable: []
evictionHard: {imagefs.available: "1%", nodefs.available: "1%", memory.available: "100Mi"}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
podLogsDir: $n/logs
address: 10.250.0.$((10+i))
port: 10250
healthzPort: 0
readOnlyPort: 0
nodeStatusUpdateFrequency: 2s
syncFrequency: 10s
oomScoreAdj: 0
volumePluginDir: /var/lib/kubelet/volumeplugins
clusterDNS: [10.250.0.1]
clusterDomain: cluster.local
T
kubeconfig "$n/kubeconfig" "node$i" 10.250.0.1
for c in cpu cpuacct cpuset memory devices freezer blkio pids systemd hugetlb perf_event net_cls net_prio; do [ -d /sys/fs/cgroup/$c ] && mkdir -p /sys/fs/cgroup/$c/node-$i; done
for f in cpuset.cpus cpuset.mems; do cat /sys/fs/cgroup/cpuset/$f > /sys/fs/cgroup/cpuset/node-$i/$f; done
# The device folder of a kubelet can't be moved, so each node sees its own /var/lib/kubelet: a mount namespace of its own, shared with its containerd.
mkdir -p /var/lib/kubelet
export n bin dir i
unshare --mount --propagation private bash -euo pipefail <<'T'
mount --bind "$n/kubelet" /var/lib/kubelet
mount --make-rshared /
start() { local name=$1; shift; setsid nohup "$@" >"log/$name.log" 2>&1 </dev/null & echo $! >"pids/$name"; }
start containerd-$i containerd -c "$n/containerd.toml"
for _ in $(seq 40); do ctr -a "$n/c.sock" version >/dev/null 2>&1 && break; sleep 0.25; done
for image in "$bin/pause.tar" ${CLUSTER_IMAGES:-}; do                     # a node that comes back has its images
  mark=$n/imported-$(stat -c '%n %Y %s' "$image" | sha256sum | cut -c1-16)
  [ -e "$mark" ] || { ctr -a "$n/c.sock" -n k8s.io images import "$image" >/dev/null; touch "$mark"; }
done
start kubelet-$i "$bin/kubelet" --config "$n/kubelet.yaml" --kubeconfig "$n/kubeconfig" --cert-dir "$n/pki" --hostname-override node-$i --node-ip 10.250.0.$((10+i)) \
  --node-labels nvidia.com/gpu.product=${GPU_PRODUCT:-NVIDIA-H200},topology.kubernetes.io/zone=rack-$i -v 2
for r in ${NODE_DEVICES:-nvidia.com/gpu=8 rdma/hca=8}; do
  k=$(basename "${r%=*}")
  start devices-$i-$k "$bin/pretend-devices" --resource "${r%=*}" --count "${r#*=}" --dir /var/lib/kubelet/device-plugins --faults "$n/faults-$k"
done
T
