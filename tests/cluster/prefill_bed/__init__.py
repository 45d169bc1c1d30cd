"""Test bed: a real Kubernetes on this machine, driven from pytest. See tests/cluster/README.md."""
