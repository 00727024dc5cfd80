# make serve    set up and serve the embedded model on http://127.0.0.1:8000 (MODEL=, PORT=, FLAGS=)
# make test     set up and run every test that needs no GPU
# make test-api the tests of the HTTP API, with a long fuzz
#
# Variables: PYTHON (an interpreter, 3.11 or 3.12), TORCH_INDEX (PyTorch's own CPU index, for machines without a GPU).

PYTHON ?=
TORCH_INDEX ?=
MODEL ?=
PORT ?=
FLAGS ?=
TESTS ?=
API_FUZZ_S ?= 240
EVENTS ?= 1000000
SEED ?= 0
MINUTES ?=
CONCURRENCY ?=

VENV := .venv/bin
PYTHON_PACKAGES := rorqual services gateway executor
export PYTHON TORCH_INDEX

.PHONY: help serve test test-gpu test-api lint types protos check-protos kernels bench-cpu bench-gpu bench-formats bench-control-plane bench-scheduler fuzz-scheduler soak soak-gpu hostile eval-tiny setup setup-dev clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup:  ## make .venv and install what serving needs
	@scripts/setup serve

setup-dev:  ## the same, and what tests and checks need
	@scripts/setup dev

# (Where there is a GPU its kernels are compiled first; with no nvcc they are not, and PyTorch's operations serve.)
serve: setup $(if $(shell command -v nvidia-smi 2>/dev/null),kernels)  ## start the four processes and serve until Ctrl-C (MODEL=/path/to/checkpoint PORT=9000)
	@$(VENV)/rorqual up $(if $(MODEL),--model "$(MODEL)") $(if $(PORT),--port $(PORT)) $(FLAGS)

# (Side by side, one worker a core; four are enough, for the longest tests alone then decide.)
test: setup-dev  ## every test that needs no GPU (TESTS=tests/unit for some)
	@$(VENV)/python -m pytest -m "not gpu" -n logical --maxprocesses=4 --dist worksteal $(TESTS)

test-gpu: setup-dev kernels  ## the tests that need a Hopper GPU (TESTS=tests/gpu/test_moe_route.py for some)
	@$(VENV)/python -m pytest -m gpu $(or $(TESTS),tests/gpu)

test-api: setup-dev  ## the HTTP API at length: clients, cases, and minutes of fuzzing (API_FUZZ_S=600)
	@API_FUZZ_S=$(API_FUZZ_S) $(VENV)/python -m pytest tests/integration/test_gateway_*.py tests/unit/test_gateway_*.py

lint: setup-dev  ## ruff: faults and format
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .

types: setup-dev  ## mypy, strict
	$(VENV)/mypy $(PYTHON_PACKAGES)

protos: setup-dev  ## generate rorqual/v1 from protos/
	@scripts/protos rorqual

check-protos: setup-dev  ## buf lint, and whether rorqual/v1 is what protos/ generates
	$(VENV)/buf lint
	@scripts/protos --check

kernels:  ## compile csrc/ where nvcc is
	@if [ ! -f csrc/build.sh ]; then echo "kernels: csrc/ is not there: nothing to compile"; \
	elif command -v $${CUDACXX:-nvcc} >/dev/null 2>&1 || [ -x /usr/local/cuda/bin/nvcc ]; then bash csrc/build.sh; \
	else echo "kernels: no nvcc: not compiled (a CPU runs the torch reference)"; fi

bench-cpu: setup-dev  ## throughput beside transformers, start-up, memory
	@$(VENV)/python benchmarks/serving/bench_cpu.py $(FLAGS)

bench-gpu: setup-dev kernels  ## kernels against their rooflines, then serving, on one Hopper GPU (FLAGS=--soak=60)
	@$(VENV)/python benchmarks/kernels/bench.py --out benchmarks/results/h200-kernels.json
	@$(VENV)/python benchmarks/serving/bench_gpu.py --long --kernels benchmarks/results/h200-kernels.json \
	    --out benchmarks/results/h200-v2lite.json --plot docs/h200-v2lite.png $(FLAGS)

bench-formats: setup-dev  ## CPU time a token of the chat formats' parsers, and of a prompt of 100k tokens
	@PYTHONPATH=. $(VENV)/python benchmarks/formats/bench_formats.py $(FLAGS)

bench-control-plane: setup-dev  ## what scheduler, tokenizer and gateway cost a token and add, with a simulated executor (under 5 minutes)
	@$(VENV)/python benchmarks/serving/bench_control_plane.py $(FLAGS)

bench-scheduler: setup-dev  ## what a decision costs with up to 512 executors and 100,000 queued requests
	@PYTHONPATH=. $(VENV)/python -m benchmarks.scheduler.bench_scale $(FLAGS)

fuzz-scheduler: setup-dev  ## the scheduler core under random events, all accounts checked after each (EVENTS=10000000 SEED=0)
	@PYTHONPATH=. $(VENV)/python -m benchmarks.scheduler.fuzz --events $(EVENTS) --seed $(SEED)

soak: setup-dev  ## mixed load with kills on the embedded model, every answer checked, memory watched (MINUTES=30 CONCURRENCY=16 SEED=0)
	@PYTHONPATH=. $(VENV)/python -m benchmarks.soak --minutes $(or $(MINUTES),30) --seed $(SEED) \
	    $(if $(CONCURRENCY),--concurrency $(CONCURRENCY)) $(FLAGS)

soak-gpu: setup-dev kernels  ## the same on one Hopper GPU with DeepSeek-V2-Lite's shape (MINUTES=10 CONCURRENCY=96)
	@PYTHONPATH=. $(VENV)/python -m benchmarks.soak --gpu --minutes $(or $(MINUTES),10) --seed $(SEED) \
	    $(if $(CONCURRENCY),--concurrency $(CONCURRENCY)) $(FLAGS)

hostile: setup-dev  ## every known attack on a running stack, and what innocents beside it notice (FLAGS="--only numbers", --list, --backend sim)
	@PYTHONPATH=. $(VENV)/python -m benchmarks.hostile $(FLAGS)

eval-tiny: setup-dev  ## scores of the embedded model
	@$(VENV)/python models/tiny/evaluate.py $(FLAGS)

clean:  ## remove what was built, the logs and .venv
	rm -rf .venv .rorqual build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
