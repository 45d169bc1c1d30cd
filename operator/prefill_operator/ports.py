"""Ports of a pod. The engine's config, probes, Service, PodMonitor and the operator's own calls must agree on them.

Fixed, since a pod has an address of its own. With hostNetwork the scheduler therefore puts at most one PE or VE on a node.
"""

GRPC_PORT = 50051
"""pe.v1.PrefillEngine or pe.v1.VisionEncoder."""
PROBE_PORT = 50052
"""Plaintext health for the kubelet, which has no certificates (C44)."""
METRICS_PORT = 50053
KVD_PROBE_PORT = 50054

GRPC_PORT_NAME = "grpc"
PROBE_PORT_NAME = "probe"
METRICS_PORT_NAME = "metrics"
