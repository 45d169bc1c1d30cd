# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up the virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat requirements.lock pyproject.toml charts/tools/helm.lock | sha256sum | cut -c1-16)
# One math thread per process: the tests and the demo run several processes on few cores.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: help setup demo test lint unit test-kernels test-kv-kills test-nixl soak-kv bench bench-kv bench-peers aot aot-triton36 gpu-site protos lock clean images test-cluster test-cluster-short bench-cluster bench-cluster-peer demo-cluster demo-cluster-down

help:
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv with the locked dependencies (idempotent)

# uv installs the locked wheels in seconds; it lives in an environment of its own, so that the lock decides all of .venv.
$(STAMP): requirements.lock pyproject.toml charts/tools/helm.lock
	@test -x $(VENV)-tools/bin/uv || { $(PYTHON) -m venv $(VENV)-tools && $(VENV)-tools/bin/pip install --quiet --disable-pip-version-check uv; }
	@test -x $(BIN)/python || $(VENV)-tools/bin/uv venv --quiet --python $(PYTHON) $(VENV)
	$(VENV)-tools/bin/uv pip sync --quiet --require-hashes --python $(BIN)/python requirements.lock
	$(VENV)-tools/bin/uv pip install --quiet --no-deps --no-build-isolation --python $(BIN)/python -e .
	charts/tools/setup.sh $(VENV)-tools/bin
	@rm -f $(VENV)/.installed-*; touch $@

demo: setup  ## a real prefill on this machine, each hand-off checked by a decode probe (under a minute)
	$(BIN)/prefill-engine demo

test: lint unit  ## lint, types, import rules, tests of all but the Triton kernels

lint: setup  ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: setup  ## pytest
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not kills" tests --ignore=tests/cluster --ignore=tests/kernels/gpu --ignore=tests/kernels/aot

test-kernels: setup  ## the Triton kernels without a GPU: each against ref in the interpreter, launch plan, GPU script's dry run, AOT gate
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/kernels/gpu tests/kernels/aot
	$(AOT)

test-kv-kills: setup  ## the whole process-kill matrix: engine, kvd, peer, directory, killed and frozen in every phase (5 minutes)
	$(BIN)/python -m pytest -q tests/e2e/test_kv_kills.py

# Not in the lock: its metadata asks for torch and CUDA. 100 MB from the package registry into an ignored folder.
NIXL_SITE := $(VENV)-nixl
test-nixl: setup  ## transports and hand-offs on real NIXL (UCX over tcp), whose cases are skipped elsewhere (6 minutes)
	@test -d $(NIXL_SITE)/nixl_cu12 || $(VENV)-tools/bin/uv pip install --quiet --no-deps --python $(BIN)/python --target $(NIXL_SITE) nixl-cu12==1.5.1
	PYTHONPATH=$(NIXL_SITE) $(BIN)/python -m pytest -q -k nixl tests/kv/test_transport_contract.py tests/kv/test_transport_faults.py tests/kv/test_nixl_faults.py tests/kv/test_transport_rdma.py tests/e2e/test_handoff_modes.py tests/e2e/test_handoff_peer_dies.py tests/e2e/test_handoff_engine_dies.py

SOAK_MINUTES ?= 10
SOAK_SEED ?= $(shell date +%s)
soak-kv: setup  ## random requests, kills and store faults on two nodes, every answer verified (SOAK_MINUTES, SOAK_SEED)
	PYTHONPATH=tests $(BIN)/python -m prefill_testing.kv_soak --minutes $(SOAK_MINUTES) --seed $(SOAK_SEED)

bench-kv: setup  ## the KV side's figures against their goals, into tests/bench/results/kv.md (wants idle cores)
	$(BIN)/python tests/bench/kv_report.py --results tests/bench/results/kv.md

bench: setup  ## benchmarks that run on a CPU (figures, not tests)
	@for f in tests/bench/bench_*.py; do echo "== $$f"; $(BIN)/python $$f || exit 1; done

AOT := $(BIN)/python -m prefill_kernels.aot --check-readme kernels/README.md

aot: setup  ## compile every kernel for sm_90 and sm_100 (no GPU needed): spills, memory, matrix instructions, table in kernels/README.md
	$(AOT)

# The version on the GPU machine of the project; it lies beside the checkout's caches, 640 MB unpacked.
TRITON36 := $(HOME)/.cache/prefill/triton-3.6.0

aot-triton36: setup $(TRITON36)  ## the same gate with triton 3.6.0
	PYTHONPATH=$(TRITON36) $(AOT)

$(TRITON36):
	$(VENV)-tools/bin/uv pip install --quiet --no-deps --require-hashes --python $(BIN)/python --target $@.part -r kernels/triton-3.6.0.lock
	mv $@.part $@

# What a bare GPU machine (Python 3.12, torch, triton) lacks for tests/gpu/run.sh; the folder is ignored and carried along.
gpu-site: setup  ## wheels that tests/gpu/run.sh needs beside torch and triton, for a GPU machine without network, into .gpu-site
	$(VENV)-tools/bin/uv pip install --quiet --no-deps --python-version 3.12 --target .gpu-site $$(grep -oE '^(msgspec|crc32c|grpcio|protobuf)==[^ ;]*' requirements.lock)

# Some gigabytes from the package registry, and Debian's fio and libibverbs1; a few minutes, on cores that are idle.
PEERS := $(VENV)-peers
bench-peers: setup  ## kvd's store beside LMCache, NIXL and Mooncake (pinned, in .venv-peers) on the same bytes, into tests/bench/results
	tests/bench/peers/setup.sh $(VENV)-tools/bin/uv $(PEERS)
	$(BIN)/python tests/bench/peers/compare.py --peers-python $(PEERS)/bin/python --results tests/bench/results/kv_peers.md

protos: setup  ## regenerate engine/prefill_engine/rpc/*_pb2*
	$(BIN)/python -m prefill_engine.rpc.generate

lock: setup  ## resolve the dependencies again into requirements.lock (hashes, no registry address)
	$(VENV)-tools/bin/uv pip compile pyproject.toml --extra operator --extra engine --extra dev --constraint constraints.txt --generate-hashes --no-emit-index-url --no-header --python-version 3.11 --quiet --output-file requirements.lock

images:  ## operator and engine images with buildah (the engine's has torch and CUDA: 6 GB); prints the archives
	@tests/cluster/bed/packages.sh
	images/build.sh operator engine

# The cluster suite needs root, the Go tool chain and Debian's containerd; it says so and fails where one is missing.
CLUSTER_TESTS := $(BIN)/python -m pytest -q -c tests/cluster/pytest.ini tests/cluster

test-cluster: setup  ## operator on a real Kubernetes built from source: all cases, report in tests/cluster/results
	$(CLUSTER_TESTS) -m "not scale and not peer" --report tests/cluster/results/cluster.md

test-cluster-short: setup  ## its short profile, for CI: API and RBAC cases, and one path from install to drain
	$(CLUSTER_TESTS) -m short

bench-cluster: setup  ## figures of 100 and 1,000 pools on a real API server, into tests/cluster/results (wants idle cores)
	$(CLUSTER_TESTS) -m scale --report tests/cluster/results/scale.md

bench-cluster-peer: setup  ## 100 pools beside LeaderWorkerSet's controller on one bed (LWS=<its checkout>; builds it, wants idle cores)
	$(CLUSTER_TESTS) -m peer --report tests/cluster/results/peer.md

demo-cluster: setup  ## a two-node cluster with the chart, a pool Ready and a prefill answered; stays up
	$(BIN)/python tests/cluster/demo.py up

demo-cluster-down: setup  ## end the cluster of demo-cluster
	$(BIN)/python tests/cluster/demo.py down

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(VENV)-tools $(VENV)-peers $(VENV)-nixl .pytest_cache .mypy_cache .ruff_cache .hypothesis
