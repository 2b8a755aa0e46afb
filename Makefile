# Every task of the repository; `make help` lists them.
# SPDX-License-Identifier: BSD-3-Clause

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= $(shell nproc)
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
DEMO   ?=
PYTEST ?= tests

.PHONY: help demo test ctest fuzz sanitize coverage mutate mutate-isa build kernels \
        standin bench-sim bench-overhead bench-accuracy bench-memory \
        bench-bounds bench-features bench-guard lint format clean distclean

help:
	@echo 'make demo            trains a GPT on the simulated gfx906, beside stock attention'
	@echo 'make test            C and Python tests (FA_TEST=full: the slow ones too)'
	@echo 'make ctest           C tests of the host layer (FA_SANITIZE=address,undefined)'
	@echo 'make sanitize        C and simulator tests under ASan, UBSan and TSan (5 min)'
	@echo 'make coverage        error exits of the C code that no test reaches (fails if any)'
	@echo 'make fuzz            damaged objects and random kernels (FUZZ_SECONDS=600)'
	@echo 'make build           extension, simulator and kernels into the source tree'
	@echo 'make kernels         kernels and their table (FA_ARCHS="gfx906;gfx1100" or all)'
	@echo 'make standin         the same kernels through nvcc for NVIDIA cards'
	@echo 'make bench-sim       speed of the simulator; also bench-overhead, bench-accuracy,'
	@echo '                     bench-memory, bench-bounds, bench-features, bench-guard'
	@echo 'make mutate          is each wait and barrier of the kernels needed? (15-30 min)'
	@echo 'make mutate-isa      has each row of the instruction lists a test? (1 min)'
	@echo 'make lint, format    clang-format, ruff, mypy, hadolint'
	@echo 'make clean           remove what was built; distclean: and $(VENV)'
	@echo
	@echo 'PYTHON=python3.12    the Python to use; a torch >= 2.4 in it is reused'
	@echo 'TORCH_INDEX_URL=URL  where a CPU build of torch comes from otherwise'
	@echo 'DEMO="--quick"       options for the demo; PYTEST=tests/test_x.py what pytest runs'

# Set-up runs again only if it changed itself.
$(READY): scripts/bootstrap.py requirements-dev.txt
	@$(PYTHON) scripts/bootstrap.py --venv $(VENV)
	@touch $@

# The editable install makes the packages importable and brings `hipsim`; from
# then on build_ext compiles what changed.
$(VENV)/.installed: $(READY) pyproject.toml
	@echo 'compiling extension, simulator and kernels: some minutes at first'
	@$(PY) -m pip install -q --disable-pip-version-check --no-deps \
	    --no-build-isolation -e .
	@touch $@

build: $(VENV)/.installed
	@mkdir -p build
	@$(PY) setup.py -q build_ext --inplace

# Passive: OpenMP threads that spin take a busy machine's cores from each other
# (measured 1.4 against 0.4 s for a training step beside one other program).
demo: build
	@OMP_WAIT_POLICY=passive $(PY) examples/demo.py $(DEMO)

# One simulator thread per test process: the processes use the cores already. One
# process more than there are cores: a fifth of the time tests wait, for deadlines
# and for processes of their own (measured on two cores).
test: build ctest
	@OMP_NUM_THREADS=1 HIPSIM_THREADS=1 $(PY) -m pytest -q -n $$(($(JOBS) + 1)) \
	    $(PYTEST)

# The sanitizers of the C tests stay out of the extension, which Python loads.
ctest: $(VENV)/.installed
	@mkdir -p build
	@FA_SANITIZE= $(PY) setup.py -q build_ext --inplace
	@$(MAKE) --no-print-directory -C tests/c

# Both leave what `build` made alone: their builds lie in build/.
sanitize: build
	@$(PY) scripts/sanitize.py -n $(JOBS)

# Every error exit of csrc/host and csrc/python that no test reaches.
coverage: build
	@$(PY) scripts/coverage.py -n $(JOBS)

fuzz:
	@$(MAKE) --no-print-directory -C tests/fuzz

kernels: build
	@$(PY) -m build_support.code_objects --out flash_attn_rocm/_code

standin: $(READY)
	@$(PY) -m build_support.code_objects --standin --out flash_attn_rocm/_code

bench-sim: build
	@$(PY) benchmarks/sim_speed.py

bench-overhead: build
	@$(PY) benchmarks/overhead.py

bench-accuracy: build
	@$(PY) benchmarks/accuracy.py

bench-memory: build
	@$(PY) benchmarks/memory.py

bench-bounds: build
	@$(PY) benchmarks/bounds.py

bench-features: build
	@$(PY) benchmarks/features.py

bench-guard: build
	@$(PY) benchmarks/guard.py

mutate: build
	@$(PY) scripts/mutate.py --json build/mutation.json

mutate-isa: build
	@$(PY) scripts/mutate_isa.py --json build/mutation_isa.json

C_FILES := $(shell find csrc tests -name '*.[ch]') $(wildcard csrc/kernels/*.hip)

lint: $(READY)
	@$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)
	@$(VENV)/bin/ruff check -q .
	@$(VENV)/bin/ruff format -q --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/hadolint Dockerfile

format: $(READY)
	@$(VENV)/bin/clang-format -i $(C_FILES)
	@$(VENV)/bin/ruff check -q --fix .
	@$(VENV)/bin/ruff format -q .

clean:
	rm -rf build dist *.egg-info flash_attn_rocm/_code
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	rm -f flash_attn_rocm/*.so hipsim/*.so

distclean: clean
	rm -rf $(VENV)
