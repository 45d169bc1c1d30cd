#!/bin/bash
# images/build.sh NAME…: builds images with buildah and prints one docker-archive tar per name. No registry and no container daemon is needed.
#   operator       prefill-operator:dev
#   engine         prefill-engine:dev, with torch and CUDA (about 6 GB: minutes, and 20 GB of disk)
#   engine-light   prefill-engine:light, third-party packages from a mount (test clusters)
# An image whose sources did not change is not built again: archives lie in the cache, named by the hash of what they are made of.
#   BASE   image to build on instead of a Debian root file system made here with mmdebstrap
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${PREFILL_CLUSTER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/prefill-cluster}/images
mkdir -p "$cache"
exec 9>"$cache/.lock"; flock 9
for tool in buildah mmdebstrap; do command -v $tool >/dev/null || { echo "images/build.sh: $tool is missing; tests/cluster/bed/packages.sh installs it" >&2; exit 1; }; done
say() { echo "images/build.sh: $*" >&2; }
bud() { buildah bud --isolation chroot --timestamp 0 --pull-never -v /etc/ssl/certs:/etc/ssl/certs:ro "$@" >&2; }

base_packages=python3,python3-venv,ca-certificates
base() { # the Debian root file system as an image, once a month: later builds get its security updates
  local name=localhost/prefill-base:$(date +%Y-%m) work
  if ! buildah inspect --type image "$name" >/dev/null 2>&1; then
    say "making a Debian root file system"
    work=$(mktemp -d); trap 'rm -rf "$work"' RETURN
    mmdebstrap --quiet --variant=minbase --include=$base_packages --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
      --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$work/base.tar" >&2
    printf 'FROM scratch\nADD base.tar /\n' > "$work/Dockerfile"
    bud -t "$name" "$work"
  fi
  echo "$name"
}

image() { # NAME REFERENCE DOCKERFILE TARGET SOURCE…
  local name=$1 reference=$2 file=$3 target=$4 key out; shift 4
  key=$({ echo "$base" "$target"; find "$file" "$@" -type f ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum; } | sha256sum | cut -c1-16)
  out=$cache/$name-$key.tar
  if [ ! -e "$out" ]; then
    say "building $reference"
    bud -f "$file" ${target:+--target "$target"} --build-arg "BASE=$base" -t "$reference" .
    rm -f "$cache/$name"-*.tar
    buildah push -q "$reference" "docker-archive:$out.partial:$reference" >&2
    mv "$out.partial" "$out"
  fi
  echo "$out"
}

[ $# -gt 0 ] || { sed -n 2,8p "$0" >&2; exit 2; }
base=${BASE:-$(base)}
common="images/lock_subset.py pyproject.toml requirements.lock"
for name; do
  case $name in
  operator) image operator docker.io/local/prefill-operator:dev operator/Dockerfile "" operator/prefill_operator engine/prefill_plan crds $common ;;
  engine) image engine docker.io/local/prefill-engine:dev engine/Dockerfile engine engine/prefill_plan engine/prefill_engine kernels/prefill_kernels $common ;;
  engine-light) image engine-light docker.io/local/prefill-engine:light engine/Dockerfile light engine/prefill_plan engine/prefill_engine kernels/prefill_kernels ;;
  *) say "no image is called $name"; exit 2 ;;
  esac
done
