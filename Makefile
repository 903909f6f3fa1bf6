# make demo       install, train two small models, evaluate both, print the path of the figure
# make test       install what tests need, run the tests that are neither slow nor extra
# make test-all   all tests
# make test-newest    all fast tests of Hugging Face's libraries, with their newest releases
# make test-oldest    those of import and export, with the oldest releases
# make lint       formatting, lint, types
# make docs       build the documentation's site into build/docs; warnings are errors
# make tpu-aot    install the compiler for TPUs, for planning without one (docs/planning.md)
# make cuda-aot   install NVIDIA's compiler and JAX's launcher, for tests of the CUDA kernels without a GPU (docs/gpu.md)
# make gpu-wheels download packages for a machine with a GPU and without a network (docs/gpu.md)

PYTHON ?= python3
PY := .venv/bin/python
# The directory depends on this file, the recipes and the Python version (whose library is the demo's text): a demo that was
# started with others is not changed.
DEMO = runs/quickstart-$(shell $(PY) -c 'import platform; print(platform.python_version())')-$(shell cat Makefile configs/*.py | cksum | cut -d' ' -f1)

.PHONY: demo test test-all test-newest test-oldest lint docs install install-dev tpu-aot cuda-aot gpu-wheels
.DELETE_ON_ERROR:

install: .venv/installed
install-dev: .venv/dev-installed

# Most files of these packages are never imported, and compiling all takes half of an installation: Python compiles and keeps
# what is imported.
export PYTHONDONTWRITEBYTECODE =
PIP = $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
PIP_INSTALL = $(PIP) --constraint constraints.txt

# Made again if the environment's Python is missing or too old. An older pip takes half as long again.
ifneq ($(shell .venv/bin/python -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null),True)
.PHONY: .venv/made
endif
.venv/made:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear --upgrade-deps .venv
	touch $@

# The file is written last, so that an interrupted installation resumes.
.venv/installed .venv/dev-installed .venv/docs-installed: pyproject.toml constraints.txt .venv/made
	$(PIP_INSTALL) --editable '.$(EXTRAS)'
	touch .venv/installed $@

.venv/installed: EXTRAS =
# Tests and lint need more than the demo: linters, test runners, lm-eval.
.venv/dev-installed: EXTRAS = [dev,lm-eval]
.venv/docs-installed: EXTRAS = [docs]

# Fewer steps, windows and lengths than in the recipe, and both models at the same time: five minutes on two CPU cores.
DEMO_STEPS = --config.train.num_steps=200 --config.train.eval_interval=100
demo: install
	$(PY) train.py --config=configs/quickstart.py:processor=none $(DEMO_STEPS) --workdir=$(DEMO)/kerple & \
	$(PY) train.py --config=configs/quickstart.py:processor=dape,kernel=3 $(DEMO_STEPS) --workdir=$(DEMO)/dape1x3-kerple \
	    && wait $$!
	$(PY) eval.py --workdir=$(DEMO)/kerple,$(DEMO)/dape1x3-kerple --lengths=64,256,2048 --max_windows=24

# Not installed into the environment: if JAX finds libtpu, every command on a machine without a TPU searches for one and
# prints warnings.
tpu-aot: .venv/tpu-aot/installed

.venv/tpu-aot/installed: constraints.txt | install
	$(PIP_INSTALL) --upgrade --no-deps --target .venv/tpu-aot libtpu
	touch $@

# Beside the environment for the same reason. The plugin must be of JAX's version.
cuda-aot: .venv/cuda-aot/installed

.venv/cuda-aot/installed: constraints.txt | install
	$(PIP_INSTALL) --upgrade --no-deps --target .venv/cuda-aot nvidia-cuda-nvrtc nvidia-cuda-nvdisasm \
	    jax-cuda13-plugin==$$($(PY) -c 'import jax; print(jax.__version__)')
	touch $@

# Packages that machines with PyTorch, JAX and its CUDA plugin usually lack, for Linux and Python 3.12.
gpu-wheels: build/gpu-wheels/downloaded

WHEEL_PLATFORMS = $(foreach tag,manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1,--platform $(tag)_x86_64)
build/gpu-wheels/downloaded: constraints.txt | install
	mkdir -p $(@D)
	$(PY) -m pip download --quiet --disable-pip-version-check --constraint constraints.txt --dest $(@D) --no-deps \
	    --only-binary=:all: --python-version 3.12 --implementation cp $(WHEEL_PLATFORMS) \
	    array-record backports.zstd beartype cattrs grain ml-collections portpicker tensorboardX
	touch $@

# `make test MARKS='not exhaustive'` is the longer selection; `.ci/run` divides it between this and `make test-newest`.
MARKS = not slow and not extra
test: install-dev
	$(PY) -m pytest -n auto --dist worksteal -m '$(MARKS)'

test-all: install-dev
	$(PY) -m pytest -n auto --dist worksteal

# transformers in other versions, beside the environment. The newest have no constraints, so that a change in them is seen, and
# come with what they need; the oldest are those of the extra hf, among the other packages of the environment.
OLDEST = $(shell sed -n 's/^hf = .*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
test-newest: HF = huggingface-hub safetensors tokenizers transformers
test-newest: FILES = $(shell grep -l pytest.mark.hf tests/*.py)
test-oldest: FILES = tests/test_export.py tests/test_import.py
test-oldest: HF = --no-deps 'transformers==$(OLDEST).*' 'huggingface-hub<2' 'tokenizers<=0.23.0' httpx httpcore h11
test-newest test-oldest: test-%: install-dev
	rm -rf .venv/$*
	$(PIP) --upgrade --target .venv/$* $(HF)
	PYTHONPATH=$(CURDIR)/.venv/$* $(PY) -m pytest -n auto --dist worksteal -m 'hf and not slow' $(FILES)

docs: .venv/docs-installed
	$(PY) -m sphinx -b html -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

lint: install-dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright

# `make tables CHECK=--check` fails if a page is not up to date, and changes nothing.
CHECK = -r
tables: install-dev
	$(PY) -m cogapp -P -p 'from experiments.tables import *' $(CHECK) README.md docs/*.md
