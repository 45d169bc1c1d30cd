#!/bin/bash
# build.sh [keda]: prints the folder with the built binaries, building them first if their sources were never built here.
# The folder lies outside the checkout and is named by the hash of all it is made of, so a clone next door reuses it.
#   (no word)  etcd, kube-apiserver, …, kubelet, kubectl, pretend-devices (one binary), pause image, CoreDNS: 8 min cold on 2 cores
#   keda       KEDA's operator and metrics adapter with their image archives: 6 min cold
set -euo pipefail
cd "$(dirname "$0")"
coredns=v1.15.0
root=${PREFILL_CLUSTER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/prefill-cluster}
export GOFLAGS=-buildvcs=false
command -v go >/dev/null || { echo "build.sh: the Go tool chain is needed to build Kubernetes; 'go' is not on PATH" >&2; exit 1; }

build_cluster() { # OUT
  local version minor pkg=k8s.io/component-base/version
  version=$(awk '$1=="k8s.io/kubernetes"{print $2; exit}' go.mod); minor=${version#v1.}; minor=${minor%%.*}
  go build -trimpath -ldflags "-s -w -X $pkg.gitVersion=$version -X $pkg.gitMajor=1 -X $pkg.gitMinor=$minor" -o "$1/controlplane" .
  for n in etcd kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl pretend-devices; do ln -sf controlplane "$1/$n"; done
  CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$1/pause" ./pause
  python3 docker_archive.py "$1/pause.tar" docker.io/local/pause:1 "$1/pause"
  GOBIN=$1 CGO_ENABLED=0 go install -trimpath -ldflags "-s -w" github.com/coredns/coredns@$coredns
}
build_keda() { # OUT
  (cd keda && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$1/" github.com/kedacore/keda/v2/cmd/operator github.com/kedacore/keda/v2/cmd/adapter)
  mv "$1/operator" "$1/keda"; mv "$1/adapter" "$1/keda-adapter"
  python3 docker_archive.py "$1/keda.tar" docker.io/local/keda:1 "$1/keda" 1000
  python3 docker_archive.py "$1/keda-adapter.tar" docker.io/local/keda-adapter:1 "$1/keda-adapter" 1000
  cp -r "$(cd keda && go list -m -f '{{.Dir}}' github.com/kedacore/keda/v2)/config" "$1/config"; chmod -R u+w "$1/config"
}
case ${1:-cluster} in
cluster) sources=(*.go pause/*.go go.mod go.sum docker_archive.py build.sh) ;;
keda) sources=(keda/go.mod keda/go.sum docker_archive.py build.sh) ;;
*) sed -n 2,5p "$0" >&2; exit 2 ;;
esac
kind=${1:-cluster}
out=$root/$kind-$({ go env GOVERSION; sha256sum "${sources[@]}"; } | sha256sum | cut -c1-16)
mkdir -p "$root"
exec 9>"$root/.lock-$kind"; flock 9
if [ ! -d "$out" ]; then
  echo "building $kind into $out" >&2
  rm -rf "$out.partial"; mkdir -p "$out.partial"
  "build_$kind" "$out.partial" >&2
  mv "$out.partial" "$out"
fi
echo "$out"
