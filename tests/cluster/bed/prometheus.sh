#!/bin/bash
# prometheus.sh: prints the path of a Prometheus server: this machine's, or the one in Debian's package, unpacked into the cache
# (nothing is installed).
set -euo pipefail
if command -v prometheus; then exit 0; fi
root=${PREFILL_CLUSTER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/prefill-cluster}
out=$root/prometheus
mkdir -p "$root"
exec 9>"$root/.lock-prometheus"; flock 9
if [ ! -x "$out/prometheus" ]; then
  command -v apt-get >/dev/null || { echo "prometheus.sh: no prometheus here, and no apt-get to get it by" >&2; exit 1; }
  work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
  cd "$work"
  apt-get download -qq prometheus >&2 || { apt-get update -qq >&2 && apt-get download -qq prometheus >&2; }
  dpkg-deb -x prometheus_*.deb root
  mkdir -p "$out"; mv root/usr/bin/prometheus "$out/prometheus"
fi
echo "$out/prometheus"
