#!/bin/bash
# Installs what real nodes and images need from Debian, if it is not there. More package names may follow (autoscaling: prometheus).
set -euo pipefail
packages="containerd runc containernetworking-plugins iptables iproute2 conntrack buildah mmdebstrap openssl $*"
missing=$(for p in $packages; do dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q "ok installed" || echo "$p"; done)
[ -z "$missing" ] && exit 0
command -v apt-get >/dev/null || { echo "packages.sh: missing here, and there is no apt-get to install it:" $missing >&2; exit 1; }
echo "installing" $missing >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >&2
apt-get install -y -qq --no-install-recommends $missing >&2
