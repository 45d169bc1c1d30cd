#!/bin/sh
# promtool.sh BIN: puts promtool into the directory BIN, from this machine or from Debian's package of Prometheus (nothing is
# installed, no root is needed once apt has its lists). The tests check rules and alerts with it.
set -eu
bin=$1
mkdir -p "$bin"
[ -x "$bin/promtool" ] && exit 0
if command -v promtool >/dev/null; then ln -sf "$(command -v promtool)" "$bin/promtool"; exit 0; fi
command -v apt-get >/dev/null || { echo "promtool.sh: no promtool here, and no apt-get to get it by" >&2; exit 1; }
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get download -qq prometheus >&2 || { apt-get update -qq >&2 && apt-get download -qq prometheus >&2; }
dpkg-deb -x prometheus_*.deb root
cd - >/dev/null
mv "$work/root/usr/bin/promtool" "$bin/promtool"
