# Sourced by the scripts here: where binaries ($bin) and this cluster ($dir, $port) are, and what several of them do.
cache=${PREFILL_CLUSTER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/prefill-cluster}
bin=${CLUSTER_BIN:-$("$here/build.sh")}
mkdir -p "${CLUSTER_DIR:-$cache/run}"
dir=$(cd "${CLUSTER_DIR:-$cache/run}" && pwd -P)
port=${CLUSTER_PORT:-16443}

k() { "$bin/kubectl" --kubeconfig "$dir/admin.kubeconfig" "$@"; }

kubeconfig() { # FILE TOKEN_PREFIX SERVER
  cat > "$1" <<K
apiVersion: v1
kind: Config
clusters: [{name: local, cluster: {server: "https://$3:$port", certificate-authority: "$dir/pki/ca.crt"}}]
users: [{name: me, user: {token: "$(grep "^$2-" "$dir/pki/tokens.csv" | cut -d, -f1)"}}]
contexts: [{name: local, context: {cluster: local, user: me}}]
current-context: local
K
}

# Kills by id, and only a process that still works in this cluster's folder: ids are reused.
end_process() { # PIDFILE
  local pid; pid=$(cat "$1" 2>/dev/null) || return 0
  if [ "$(readlink "/proc/$pid/cwd")" = "$dir" ]; then kill -9 "$pid" 2>/dev/null || true; fi
  rm -f "$1"
}

end_group() { # NODE: the processes of a node's pods
  local procs pid
  for procs in $(find "/sys/fs/cgroup/pids/$1" -name cgroup.procs 2>/dev/null); do
    while read -r pid; do kill -9 "$pid" 2>/dev/null || true; done < "$procs"
  done
}
