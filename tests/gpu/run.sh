#!/usr/bin/env bash
# Checks every Triton kernel against `ref` on this machine's GPU, blocks and snapshots between it and a pool of kvd, and times
# kernels and whole steps: at most 10 minutes, no network.
# Writes one JSON and one table to tests/bench/results (or --out DIR). Needs python >= 3.11 with torch >= 2.11, triton >= 3.6, numpy,
# tokenizers and tqdm; `make gpu-site` puts what is still missing there (msgspec; crc32c, grpcio and protobuf for the KV part; for
# Python 3.12) into .gpu-site, to be carried along.
#   tests/gpu/run.sh --dry-run    runs the script itself without a GPU
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
if ! "$PYTHON" -c 'import msgspec, crc32c, grpc' 2>/dev/null && [ -d .gpu-site ]; then PYTHONPATH="$PWD/.gpu-site${PYTHONPATH:+:$PYTHONPATH}"; fi
export PYTHONPATH="$PWD/tests/gpu:$PWD/engine:$PWD/kernels:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRITON_DEFAULT_FP_FUSION=1
exec "$PYTHON" -m gpu_run "$@"
