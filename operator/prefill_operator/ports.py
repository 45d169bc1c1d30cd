"""Ports of a pod. The engine's config, probes, Service, PodMonitor and the operator's own calls must agree on them.

Fixed, since a pod has an address of its own. With hostNetwork the scheduler therefore puts at most one PE or VE on a node.
"""

GRPC_PORT = 50051
"""pe.v1.PrefillEngine or pe.v1.VisionEncoder."""
PROBE_PORT = 50052
"""Plaintext health for the kubelet, which has no certificates (C44)."""
METRICS_PORT = 50053
KVD_PROBE_PORT = 50054
KVD_METRICS_PORT = 50055
KVD_PEER_PORT = 50056
"""Other pods' kvd pull snapshots here."""
HANDOFF_PORT = 50060
"""Data transport of rank 0 for decode peers (handoff.data_port); rank n has the n-th port after it."""
MAX_RANKS = 8
"""Ranks of a pod: the largest EP."""

GRPC_PORT_NAME = "grpc"
PROBE_PORT_NAME = "probe"
METRICS_PORT_NAME = "metrics"
KVD_PROBE_PORT_NAME = "kvd-probe"
KVD_METRICS_PORT_NAME = "kvd-metrics"
KVD_PEER_PORT_NAME = "kvd-peers"
HANDOFF_PORT_NAME = "handoff"
