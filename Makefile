# Every target makes or updates .venv first (see .ci/setup; nothing to do takes no time).

python := .venv/bin/python

# The benchmarks that `make bench` runs: python -m benchmarks.NAME, results in benchmarks/out/NAME.json.
BENCHMARKS := long_document_qa overhead decode_latency shared_prefix verification control_plane engine_replay \
	hybrid_reuse trace_replay copy_bandwidth waiting_requests stored_share delivery served_share splits \
	storms gc_pause answers disk_bandwidth disk_tier tier_latency codecs store_tier silent_store pool_restart peer_fetch \
	partial_arrival proxy fleet handover disaggregated locate never_slower other_sizes resizing
# More arguments for pytest, as in: make test ARGS="-k lru -x" (then on the vLLM in .venv only)
ARGS :=
# What is tested on the oldest and the newest vLLM as well: whatever meets its scheduler, its worker or its server.
BORDER_TESTS := tests/offload/vllm tests/offload/worker/test_side.py tests/offload/test_messages.py \
	tests/virtual/test_faults.py tests/virtual/test_traps_bytes.py tests/virtual/test_traps_contract.py \
	tests/virtual/test_traps_liveness.py tests/virtual/test_traps_multi.py tests/virtual/test_virtual_engine.py \
	tests/virtual/test_sleep.py tests/virtual/test_hint_caps.py tests/virtual/test_request_hints.py \
	tests/virtual/test_answer_reuse.py tests/virtual/test_traps_fleet.py tests/virtual/test_drafts.py \
	tests/virtual/test_kinds.py tests/virtual/test_hybrid.py tests/virtual/test_regions.py tests/virtual/test_siblings.py tests/virtual/test_tiers.py tests/virtual/test_stores.py \
	tests/virtual/test_hand_offs.py tests/virtual/test_peers.py \
	tests/engine/test_async_hints.py tests/engine/test_disk_tier.py tests/engine/test_operator.py tests/engine/test_hybrid.py \
	tests/engine/test_kv_bytes.py \
	tests/engine/test_restore.py tests/engine/test_serve.py tests/engine/test_traps.py

# The engines that tests and benchmarks start have nothing to report to anyone.
export VLLM_NO_USAGE_STATS := 1

bench_targets := $(BENCHMARKS:%=bench-%)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo demo-disaggregated test oldest newest soak lint bench clean $(bench_targets)

help: ## print this
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1	\2/p' Makefile

setup: ## make .venv: vLLM, this package in place, the tools
	@.ci/setup

demo: setup ## ask long documents again with and without offload; a table and a plot (ARGS=--full: all of it)
	$(python) -m benchmarks.long_document_qa --demo $(ARGS)

demo-disaggregated: setup ## prefill on one engine, decode on two, behind the proxy; a table and a plot
	$(python) -m benchmarks.disaggregated --demo $(ARGS)

test: setup ## run the tests, also on the oldest and the newest vLLM (GPU tests skip themselves without one)
	@$(if $(ARGS),$(python) -m pytest $(ARGS),.ci/test $(BORDER_TESTS))

oldest: setup ## run the tests of all that meets vLLM on the oldest one (where there is no GPU)
	@.ci/setup-oldest
	@[ ! -d .venv/oldest ] || PYTHONPATH=$(CURDIR)/.venv/oldest $(python) -m pytest $(BORDER_TESTS)

newest: setup ## run the same tests on the newest one (where there is no GPU)
	@.ci/setup-newest
	@[ ! -d .venv/newest ] || PYTHONPATH=$(CURDIR)/.venv/newest $(python) -m pytest $(BORDER_TESTS)

soak: setup ## search on: SOAK_SECONDS of each kind of engines, tests, both with fresh seeds; more models
	@seed=$${SEED:-$$(od -An -N3 -tu4 /dev/urandom | tr -d ' ')}; set -x; \
	$(python) -m tests.soak --seed $${seed}000 --seconds $${SOAK_SECONDS:-300} --processes 2 || exit; \
	KV_OFFLOAD_SEED=$$seed $(python) -m pytest -m "not engine" $(ARGS) || exit; \
	KV_OFFLOAD_ALL_KINDS=1 $(python) -m pytest tests/engine/test_hybrid.py tests/engine/test_stages.py \
		tests/engine/test_store_stages.py tests/engine/test_migration.py

lint: setup ## check format, style and types
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m mypy

bench: $(bench_targets) ## run the benchmarks, results as JSON in benchmarks/out/

$(bench_targets): bench-%: setup
	@mkdir -p benchmarks/out
	$(python) -m benchmarks.$* --json benchmarks/out/$*.json

clean: ## remove caches and build output (not .venv)
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov benchmarks/out
	find . -name .venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
