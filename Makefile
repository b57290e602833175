# Two commands: `make quickstart` trains and tries a small FLASH; `make test` checks it. Both install what they need.

VENV := .venv
BIN := $(VENV)/bin
TPU_VENV := .venv-tpu
RUN := runs/quickstart
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal
LARGEST := tests/contracts/test_kernels.py tests/contracts/test_mixers.py
RUNS := tests/training tests/robustness tests/preparing
# In a process of its own: one process for all runs grew to 17 GB, and a test of three workers had no memory left.
EVERY_CONFIG := tests/training/test_every_config.py
ALSO_ON_JAX := $(LARGEST) tests/contracts/test_models.py tests/contracts/test_language_models.py \
	tests/contracts/test_streams.py tests/test_block_loop.py tests/test_cross_entropy.py tests/generation/test_decoding.py \
	tests/generation/test_samplers.py tests/test_linear_forms.py tests/test_linear_layers.py \
	tests/test_random_features.py tests/test_fused_attention.py tests/test_fused_flash.py tests/test_fused_gau.py \
	tests/test_fused_scan.py tests/test_fused_decays.py tests/test_fused_cross_entropy.py tests/test_fused_norm.py \
	tests/test_fused_glu.py tests/training/test_step.py
# How fast XLA compiles is how long the tests on JAX take, and a part of those on TensorFlow.
SOON := XLA_FLAGS="--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
ON_JAX := KERAS_BACKEND=jax JAX_ENABLE_X64=1 $(SOON)
# Each of the two processes has a core; `make test-all` leaves XLA and the threads as users have them.
ON_TENSORFLOW := TF_NUM_INTRAOP_THREADS=1 OMP_NUM_THREADS=1 $(SOON)
MASKED_CODE := scripts/masked_code.txt

.PHONY: help quickstart lint test test-all test-faults docs tpu-check clean

help:
	@echo "make quickstart   install, train a small FLASH on this Python's standard library, evaluate it, fill a mask"
	@echo "make test         install, then ruff, import-linter and the tests of every part: ten minutes on two cores"
	@echo "make test-all     all tests: every option and config, exports, notebooks, compilers for TPUs, several processes"
	@echo "make test-faults  plant small faults in a copy, one at a time, and name the test that catches each"
	@echo "make docs         install, then build the documentation into site/; a warning is an error"
	@echo "make tpu-check    install what a Cloud TPU VM runs into $(TPU_VENV), and try every config's step against a TPU's operators"
	@echo "make clean        remove $(VENV) and $(TPU_VENV); runs/ stays"

quickstart: $(VENV)/.installed
	@$(BIN)/flash-tf train quickstart --model-dir $(RUN)
	@echo; echo "\$$ flash-tf evaluate $(RUN)"
	@$(BIN)/flash-tf evaluate $(RUN)
	@echo; echo "\$$ flash-tf fill-mask $(RUN) \"\$$(cat $(MASKED_CODE))\""
	@$(BIN)/flash-tf fill-mask $(RUN) "$$(cat $(MASKED_CODE))"
	@echo; echo "Next, after . $(BIN)/activate:"
	@echo "  flash-tf fill-mask $(RUN) \"\$$(cat FILE)\"                 # your own code; it is sure of more with lines around"
	@echo "  flash-tf describe mlm_c4/flash                        # the paper's model: parameters, FLOPs, memory"
	@echo "  flash-tf train quickstart --model-dir runs/quad --set 'model.mixer={type: gau, key_dim: 64}'"
	@echo "  tensorboard --logdir runs                             # the curves"

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/lint-imports --no-logo

test: lint
	@$(ON_TENSORFLOW) $(PYTEST) -m "not full" tests
	@$(ON_JAX) $(PYTEST) -m "not full and not one_backend" $(ALSO_ON_JAX)

# In parts, each in processes of its own, because what XLA has compiled stays in memory: all of it would take 24 GB.
test-all: lint
	@$(PYTEST) -m "full or not full" $(LARGEST)
	@$(PYTEST) -m "full or not full" tests/contracts $(LARGEST:%=--ignore=%)
	@$(PYTEST) -m "full or not full" $(EVERY_CONFIG)
	@$(PYTEST) -m "full or not full" $(RUNS) --ignore=$(EVERY_CONFIG)
	@$(PYTEST) -m "full or not full" tests --ignore=tests/contracts $(RUNS:%=--ignore=%)
	@$(ON_JAX) $(PYTEST) -m "not one_backend" $(LARGEST)
	@$(ON_JAX) $(PYTEST) -m "not one_backend" $(filter-out $(LARGEST),$(ALSO_ON_JAX)) tests/contracts/test_masks.py tests/contracts/test_keras.py

test-faults: $(VENV)/.installed-dev
	@$(BIN)/python tests/planted_faults.py --write docs/planted_faults.md

docs: $(VENV)/.installed-dev
	@$(BIN)/mkdocs build --strict

tpu-check: $(TPU_VENV)/.installed
	@sh scripts/tpu_check.sh $(TPU_VENV)

# The stamps are made last and depend on pyproject.toml, so that an interrupted install is done again.
$(VENV)/.installed: pyproject.toml
	@sh scripts/install.sh $(VENV) ".[tensorflow]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml
	@sh scripts/install.sh $(VENV) ".[dev]"
	@touch $@ $(VENV)/.installed

$(TPU_VENV)/.installed: pyproject.toml requirements/tpu.txt
	@sh scripts/install_tpu.sh $(TPU_VENV)
	@touch $@

clean:
	rm -rf $(VENV) $(TPU_VENV)
