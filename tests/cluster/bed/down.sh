#!/bin/bash
# Ends what up.sh started, pods included. Nothing of a test cluster is kept, so nothing is asked to end slowly.
CLUSTER_BIN=${CLUSTER_BIN:-none}                                                              # nothing is started here, so nothing is built
here=$(cd "$(dirname "$0")" && pwd)
. "$here/place.sh"
cd "$dir" 2>/dev/null || exit 0
for p in pids/*; do [ -e "$p" ] && end_process "$p"; done
for n in node-*; do [ -d "$n" ] && end_group "$n"; done
for c in /proc/[0-9]*/cmdline; do                                                             # the shims of this folder's nodes
  pid=${c#/proc/}; pid=${pid%/cmdline}
  { tr "\0" " " < "$c"; } 2>/dev/null | grep -q "containerd-shim.* $dir/node-[0-9]*/c.sock" && kill -9 "$pid" 2>/dev/null
done
grep " $dir/node-" /proc/mounts | cut -d' ' -f2 | sort -r | while read -r m; do umount -l "$m"; done
if ls -d node-* >/dev/null 2>&1; then
  for l in $(ip -o link 2>/dev/null | grep -oE 'pods[0-9]+' | sort -u) kube0; do ip link del "$l" 2>/dev/null; done
  iptables-save 2>/dev/null | grep -vE 'KUBE-|CNI-' | iptables-restore 2>/dev/null            # kube-proxy's and portmap's rules
fi
for f in /run/netns/cni-*; do [ -e "$f" ] && ! grep -q " $f " /proc/mounts && rm -f "$f"; done    # names of pod networks that ended with their nodes
rm -rf etcd node-* pids cmd
exit 0
