#!/bin/bash
# restart.sh NAME [SECONDS]: kills a part of the control plane (kube-apiserver, etcd, kube-scheduler, …), waits SECONDS, starts it again with the same arguments.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/place.sh"
cd "$dir"
end_process "pids/$1"
sleep "${2:-1}"
mapfile -d '' -t args < "cmd/$1"
setsid nohup "${args[@]}" >>"log/$1.log" 2>&1 </dev/null & echo $! >"pids/$1"
