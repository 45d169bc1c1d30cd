#!/bin/bash
# up.sh [NODES]: a real Kubernetes cluster on this machine. NODES real nodes (containerd + kubelet + kube-proxy); 0 = control plane only.
# Needs root; for nodes also what packages.sh installs. Everything lives in $CLUSTER_DIR; down.sh ends exactly what this started.
#   CLUSTER_BIN      folder with the binaries (default: what build.sh prints, which builds them if need be)
#   CLUSTER_DIR      state, logs and kubeconfig of this cluster        CLUSTER_PORT  API server port, the next ports are used too (16443)
#   CLUSTER_IMAGES   docker-archive tars imported on every node        NODE_GRACE    silence after which a node is NotReady (20s)
#   CLUSTER_AUDIT    1: log/audit.jsonl holds one line per request     APISERVER_EXTRA  more flags
#   NODE_DEVICES     "resource=count …" (nvidia.com/gpu=8 rdma/hca=8)  GPU_PRODUCT   node label value (NVIDIA-H200)
set -euo pipefail
nodes=${1:-0}
here=$(cd "$(dirname "$0")" && pwd)
. "$here/place.sh"
[ "$(id -u)" = 0 ] || { echo "up.sh: a cluster needs root" >&2; exit 1; }
[ "$nodes" = 0 ] || "$here/packages.sh"
mkdir -p "$dir"/{pki,log,etcd,pids,cmd}; cd "$dir"
if ls pids/* >/dev/null 2>&1; then echo "up.sh: a cluster runs in $dir; end it with down.sh" >&2; exit 1; fi
start() { local name=$1; shift; printf '%s\0' "$@" >"cmd/$name"; setsid nohup "$@" >"log/$name.log" 2>&1 </dev/null & echo $! >"pids/$name"; }

host_ip=127.0.0.1
if [ "$nodes" -gt 0 ]; then
  host_ip=10.250.0.1
  ip link show kube0 >/dev/null 2>&1 || ip link add kube0 type bridge
  ip addr replace $host_ip/24 dev kube0; ip link set kube0 up
  sysctl -qw net.ipv4.ip_forward=1
fi

if [ ! -f pki/tokens.csv ]; then
  openssl genrsa -out pki/sa.key 2048 2>/dev/null; openssl rsa -in pki/sa.key -pubout -out pki/sa.pub 2>/dev/null
  openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=test-ca -keyout pki/ca.key -out pki/ca.crt 2>/dev/null
  openssl req -newkey rsa:2048 -nodes -subj /CN=kube-apiserver -keyout pki/api.key -out pki/api.csr 2>/dev/null
  printf 'subjectAltName=IP:127.0.0.1,IP:10.250.0.1,IP:10.96.0.1,DNS:localhost,DNS:kubernetes.default.svc' > pki/san
  openssl x509 -req -in pki/api.csr -CA pki/ca.crt -CAkey pki/ca.key -CAcreateserial -days 30 -extfile pki/san -out pki/api.crt 2>/dev/null
  openssl req -newkey rsa:2048 -nodes -subj /CN=front-proxy -keyout pki/front.key -out pki/front.csr 2>/dev/null
  openssl x509 -req -in pki/front.csr -CA pki/ca.crt -CAkey pki/ca.key -CAcreateserial -days 30 -out pki/front.crt 2>/dev/null
  {
    echo "admin-$(openssl rand -hex 16),admin,admin,\"system:masters\""
    echo "kcm-$(openssl rand -hex 16),system:kube-controller-manager,kcm,"
    echo "sched-$(openssl rand -hex 16),system:kube-scheduler,sched,"
    echo "proxy-$(openssl rand -hex 16),system:kube-proxy,proxy,\"system:node-proxier\""
    for i in $(seq 9); do echo "node$i-$(openssl rand -hex 16),system:node:node-$i,node$i,\"system:nodes\""; done
  } > pki/tokens.csv
fi
for who in admin kcm sched proxy; do kubeconfig $who.kubeconfig $who 127.0.0.1; done

extra=()
if [ -n "${CLUSTER_AUDIT:-}" ]; then
  printf 'apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived, ResponseStarted]\nrules: [{level: Metadata}]\n' > audit.yaml
  extra=(--audit-policy-file=audit.yaml --audit-log-path=log/audit.jsonl --audit-log-maxsize=2000)
fi
# With nodes, aggregated APIs (KEDA) are reached by pod address; without, nothing reconciles the kubernetes Service.
if [ "$nodes" -gt 0 ]; then extra+=(--enable-aggregator-routing=true); else extra+=(--endpoint-reconciler-type=none); fi
ep=$((port+1000)); ep2=$((port+1001))
start etcd "$bin/etcd" --data-dir etcd --unsafe-no-fsync --listen-client-urls http://127.0.0.1:$ep --advertise-client-urls http://127.0.0.1:$ep \
  --listen-peer-urls http://127.0.0.1:$ep2 --initial-advertise-peer-urls http://127.0.0.1:$ep2 --initial-cluster default=http://127.0.0.1:$ep2
bind=127.0.0.1; [ "$nodes" -gt 0 ] && bind=0.0.0.0
start kube-apiserver "$bin/kube-apiserver" --etcd-servers=http://127.0.0.1:$ep --bind-address=$bind --advertise-address=$host_ip --secure-port=$port \
  --tls-cert-file=pki/api.crt --tls-private-key-file=pki/api.key --service-account-issuer=https://kubernetes.default.svc --service-account-key-file=pki/sa.pub \
  --service-account-signing-key-file=pki/sa.key --service-cluster-ip-range=10.96.0.0/16 --authorization-mode=Node,RBAC --token-auth-file=pki/tokens.csv \
  --enable-admission-plugins=NodeRestriction --allow-privileged=true --kubelet-preferred-address-types=InternalIP --kubelet-certificate-authority= \
  --kubelet-client-certificate=pki/api.crt --kubelet-client-key=pki/api.key \
  --requestheader-client-ca-file=pki/ca.crt --requestheader-allowed-names=front-proxy --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group \
  --requestheader-extra-headers-prefix=X-Remote-Extra- --proxy-client-cert-file=pki/front.crt --proxy-client-key-file=pki/front.key \
  "${extra[@]}" ${APISERVER_EXTRA:-}
for i in $(seq 480); do
  k get --raw /readyz >/dev/null 2>&1 && break
  [ "$i" -lt 480 ] || { echo "up.sh: the API server did not become ready:" >&2; tail -20 log/kube-apiserver.log >&2; exit 1; }
  sleep 0.25
done
start kube-controller-manager "$bin/kube-controller-manager" --kubeconfig=kcm.kubeconfig --service-account-private-key-file=pki/sa.key --root-ca-file=pki/ca.crt \
  --use-service-account-credentials=true --leader-elect=false --bind-address=127.0.0.1 --secure-port=$((port+1)) --kube-api-qps=${KCM_QPS:-20} --kube-api-burst=${KCM_BURST:-30} \
  --controllers='*,-nodeipam,-cloud-node-lifecycle,-route' --node-monitor-period=1s --node-monitor-grace-period=${NODE_GRACE:-20s} --horizontal-pod-autoscaler-sync-period=2s --cert-dir=pki
start kube-scheduler "$bin/kube-scheduler" --kubeconfig=sched.kubeconfig --leader-elect=false --bind-address=127.0.0.1 --secure-port=$((port+2)) --cert-dir=pki \
  --authentication-kubeconfig=sched.kubeconfig --authorization-kubeconfig=sched.kubeconfig --kube-api-qps=${SCHEDULER_QPS:-50} --kube-api-burst=${SCHEDULER_QPS:-100}
for i in $(seq "$nodes"); do bash "$here/node.sh" "$i"; done
if [ "$nodes" -gt 0 ]; then
  start kube-proxy "$bin/kube-proxy" --kubeconfig=proxy.kubeconfig --proxy-mode=iptables --cluster-cidr=10.244.0.0/16 --hostname-override=node-1 --bind-address=10.250.0.11 \
    --healthz-bind-address=127.0.0.1:$((port+3)) --metrics-bind-address=127.0.0.1:$((port+4)) --conntrack-max-per-core=0 --conntrack-min=0
  printf '.:53 {\n bind %s\n errors\n kubernetes cluster.local {\n  kubeconfig %s local\n }\n}\n' $host_ip "$dir/admin.kubeconfig" > Corefile
  start coredns "$bin/coredns" -conf Corefile
  for i in $(seq 480); do
    [ "$(k get nodes --no-headers 2>/dev/null | grep -cw Ready)" -ge "$nodes" ] && break
    [ "$i" -lt 480 ] || { echo "up.sh: not all of $nodes nodes became Ready:" >&2; k get nodes >&2; tail -5 log/kubelet-*.log >&2; exit 1; }
    sleep 0.5
  done
fi
echo "export KUBECONFIG=$dir/admin.kubeconfig PATH=$bin:\$PATH"
