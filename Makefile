# Everything that is built or installed is kept in $(FOREBAY_CACHE), outside the checkout. The work
# is done by the scripts in tools/.

FOREBAY_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/forebay
export FOREBAY_CACHE

.DEFAULT_GOAL := help
.PHONY: help demo demo-cluster test test-slow bench bench-python bench-data bench-cluster bench-checkpoint lint docs wheel clean-cache

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Built and installed things are kept in $(FOREBAY_CACHE) (set FOREBAY_CACHE to move them)."

demo: ## Build, then train from a bucket far away: direct, and through Forebay
	@tools/demo.sh $(ARGS)

demo-cluster: ## Build, then train over three nodes that are one cache: one is killed, returns, a fourth joins
	@tools/demo.sh cluster $(ARGS)

test: ## Build, and run every test; ARGS="-k name" goes to pytest
	@tools/test.sh $(ARGS)

test-slow: ## Randomized tests for longer, kill -9, load and partitions for minutes: an hour on two cores
	@tools/test-slow.sh $(ARGS)

bench: ## Build, and measure the node beside the ceilings of this machine; ARGS="batch --size 1MiB" for one
	@tools/bench.sh $(ARGS)

bench-python: ## Build, and measure from Python, beside other clients and a bucket far away; ARGS="train --workers 2" for one
	@tools/bench.sh python $(ARGS)

bench-data: ## Build, and measure datasets: opening, reading, quality of orders, distance, new shards, writing, packing, accelerators; ARGS="opening --files 1000" for one
	@tools/bench.sh data $(ARGS)

bench-cluster: ## Build, and print the cluster's numbers beside their goals; ARGS="--only computed" for a part
	@tools/bench.sh cluster $(ARGS)

bench-checkpoint: ## Build, and measure checkpoints beside other writers and readers; ARGS="--sizes 4 --ranks 2" for other sizes
	@tools/bench.sh checkpoint $(ARGS)

lint: ## Formatting, ruff, mypy, stubtest and clippy, with warnings as errors
	@tools/lint.sh

docs: ## Build the documentation site; ARGS=serve shows it while you write
	@tools/docs.sh $(ARGS)

wheel: ## Build the Python wheel: the package, and the command line with the server inside
	@mkdir -p "$(FOREBAY_CACHE)" && tools/wheel.sh

clean-cache: ## Remove everything that the other targets built and installed
	@tools/clean-cache.sh
