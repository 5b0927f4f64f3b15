# make demo   train three recipes here and compare them       make test   the fast test suite
# make check  everything CI runs                               make help   all targets

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD := .build
INSTALLED := $(VENV)/.installed

# Otherwise each tier, and each process that a test starts, would compile the same files again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo sagemaker-sdk trackers triton test test-cloud test-slow test-full test-gpu live-check lint types wheel bench \
  tables statistics docs mutations mutants check clean

help:
	@echo 'make demo       make an environment, train fp32, bf16 and compile here, and compare them'
	@echo 'make test       make an environment and run the fast tests'
	@echo 'make test-cloud the tests against a mock of AWS over HTTP'
	@echo 'make test-slow  one test of each kind that compiles, starts processes or plays a machine'
	@echo 'make test-full  every test: all seeds and scenarios, docker, SDK, trackers (about an hour; root, Debian)'
	@echo 'make test-gpu   the tests that need a CUDA device'
	@echo 'make mutations  break one line at a time, and see that a test notices'
	@echo 'make mutants    the same with lines drawn from ten modules of money, statistics and numerics; SEED=1 draws others'
	@echo 'make live-check with an AWS account: doctor, dry runs with EFA, two small runs on EC2, one on SageMaker'
	@echo 'make lint types wheel   ruff; mypy --strict; a clean wheel in an empty environment'
	@echo 'make bench      start-up, compare over 10,000 runs, recommend among 20,000 candidates, and recording, as ratios'
	@echo 'make tables     the measured tables of the documents, anew from train/measurements'
	@echo 'make statistics the pictures and numbers of docs/statistics.md, simulated anew (minutes)'
	@echo 'make docs       the documentation as a site in .build/site, strictly'
	@echo 'make check      lint, types, wheel, docs, test, test-cloud and test-slow: what CI runs'
	@echo 'make clean      remove the environment and everything built'

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'fastlaunch needs Python 3.11 or newer: make PYTHON=/path/to/python3.11'; exit 1; }
	@echo '==> environment in $(VENV), pinned by constraints.txt: once, about three minutes, a few hundred MB to download'
	@$(PYTHON) -m venv $(VENV)
	@echo '==> 1 of 3: torch'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	  $$(grep -E '^(torch|torchvision|setuptools|wheel|ninja)==' constraints.txt)
	@echo '==> 2 of 3: fastlaunch and the libraries that it trains, reports and is tested with'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	  --editable '.[train,float8,lightning,report,docs,test]'
	@echo '==> 3 of 3: DeepSpeed, built for this torch'
	@# Its build asks the torch that is installed, which an isolated one would not have.
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	@touch $@

demo: $(INSTALLED)
	@echo '==> vit-tiny on this CPU: fp32, bf16 and compile in rounds, until all is settled, at most 8'
	@FASTLAUNCH_HOME=$(BUILD)/demo $(BIN)/fastlaunch submit --local --workload vit-tiny \
	  --recipe fp32 --recipe bf16 --recipe compile --until-resolved --steps 200
	@echo '==> the same runs side by side'
	@FASTLAUNCH_HOME=$(BUILD)/demo $(BIN)/fastlaunch compare

test: $(INSTALLED)
	@echo '==> fast tests'
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'not cloud and not slow and not full and not gpu'

test-cloud: $(INSTALLED)
	@echo '==> tests against a mock of AWS'
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'cloud and not full'

# Those that play machines run one at a time, since each is busy by itself.
test-slow: $(INSTALLED) triton
	@echo '==> slow tests'
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'slow and not full' --timeout 600 --ignore tests/node
	@$(BIN)/python -m pytest -q -m 'slow and not full' --timeout 600 tests/node

test-full: $(INSTALLED) sagemaker-sdk trackers triton
	@echo '==> every test'
	@HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'not gpu' --timeout 900 --ignore tests/node
	@$(BIN)/python -m pytest -q -m 'not gpu' --timeout 900 tests/node

statistics: $(INSTALLED)
	@cd tests && ../$(BIN)/python -m benchmarks.statistics_page

docs: $(INSTALLED)
	@echo '==> the documentation as a site in $(BUILD)/site'
	@PYTHONPATH=docs $(BIN)/zensical build --strict --clean

mutations: $(INSTALLED)
	@$(BIN)/python tests/mutate.py

mutants: $(BUILD)/cosmic-ray/.installed
	@PYTHONPATH=$(BUILD)/cosmic-ray $(BIN)/python tests/mutants.py --seed $(or $(SEED),0)

# Beside the environment, whose own packages the tests go on using.
$(BUILD)/cosmic-ray/.installed: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --upgrade --target $(BUILD)/cosmic-ray cosmic-ray==8.7.0
	@touch $@

# The SageMaker SDK pins and brings much: it gets an environment of its own, for one slow test.
sagemaker-sdk: .venv-sagemaker/.installed

.venv-sagemaker/.installed: pyproject.toml
	@echo '==> the SageMaker SDK in .venv-sagemaker (about 1 GB)'
	@$(PYTHON) -m venv .venv-sagemaker
	@.venv-sagemaker/bin/python -m pip install --quiet --editable '.[sagemaker]' sagemaker==3.27.0
	@touch $@

# So do MLflow, Weights & Biases and TensorBoard.
trackers: .venv-trackers/.installed

.venv-trackers/.installed: pyproject.toml
	@echo '==> MLflow, Weights & Biases and TensorBoard in .venv-trackers (about 1 GB)'
	@$(PYTHON) -m venv .venv-trackers
	@.venv-trackers/bin/python -m pip install --quiet --editable '.[export]'
	@touch $@

# Without a GPU Triton only compiles. Beside the environment, since torch's builds for CPUs have none.
triton: $(BUILD)/triton/.installed

$(BUILD)/triton/.installed: $(INSTALLED)
	@echo '==> Triton in $(BUILD)/triton (190 MB to download)'
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(BUILD)/triton triton==3.6.0
	@touch $@

test-gpu: $(INSTALLED)
	@$(BIN)/python -m pytest -q -m gpu --timeout 600

live-check: $(INSTALLED)
	@PYTHON=$(BIN)/python FASTLAUNCH=$(BIN)/fastlaunch tests/live/live_check.sh

lint: $(INSTALLED)
	@echo '==> ruff'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(INSTALLED)
	@echo '==> mypy --strict'
	@$(BIN)/mypy

wheel: $(INSTALLED)
	@echo '==> wheel, installed without extras into an empty environment'
	@rm -rf $(BUILD)/dist $(BUILD)/empty
	@$(BIN)/python -m build --quiet --outdir $(BUILD)/dist .
	@$(PYTHON) -m venv $(BUILD)/empty
	@$(BUILD)/empty/bin/python -m pip install --quiet --constraint constraints.txt $(BUILD)/dist/*.whl
	@cd $(BUILD) && export FASTLAUNCH_HOME=$$PWD/empty/home && \
	  empty/bin/fastlaunch --help > /dev/null && \
	  empty/bin/fastlaunch prices > /dev/null && \
	  empty/bin/fastlaunch demo > /dev/null && \
	  empty/bin/fastlaunch submit --instance p5.48xlarge --recipe te-fp8 --dry-run > /dev/null && \
	  empty/bin/fastlaunch submit --job-schema > /dev/null && \
	  empty/bin/fastlaunch build --push --dry-run > /dev/null && \
	  empty/bin/fastlaunch iam print --cloudformation > /dev/null
	@$(BUILD)/empty/bin/python -c 'import importlib.util as u; assert u.find_spec("torch") is None'
	@$(BUILD)/empty/bin/python -c 'from fastlaunch.report.page.page import SHIPPED, shipped_text; [shipped_text(n) for n in SHIPPED]'
	@echo 'fastlaunch --help, prices, demo and the dry runs for AWS work from the wheel, without torch'

bench: $(INSTALLED)
	@$(BIN)/python tests/benchmarks/bench.py

tables: $(INSTALLED)
	@$(BIN)/python tests/benchmarks/tables.py

check: lint types wheel docs test test-cloud test-slow

clean:
	rm -rf $(VENV) .venv-sagemaker .venv-trackers $(BUILD) .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
