# make demo   build what is missing and run the demo model with a cache smaller than its experts
# make test   build what is missing and run every check
# make build  the Python environment in .venv and the libraries in build/lib
# make test-rpc  run the tests of workers alone, with two on this machine
# make test-vulkan  build with Vulkan in build/vulkan and compare logits on its first device
# make exact  compare every architecture with its resident run in more shapes than make test does
# make fuzz   read 100,000 damaged model headers, which takes minutes
# make test-rpc  stream into the memory of two workers on this machine
# make sanitize  run the read pool under ThreadSanitizer, AddressSanitizer and UBSan
# make unpatched  a plain llama.cpp in build/unpatched, for bench/compare.py
# make ui     llama-server's chat page into longhaul-server, with npm
# make fix    format the sources and apply the linter's fixes
# make clean  remove .venv and build
#
# CMAKE_ARGS goes to cmake and stays in force until make clean:
#   CMAKE_ARGS="-DGGML_VULKAN=ON" make build

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
LONGHAUL_CACHE_DIR ?= build/downloads
DEMO = $(BIN)/longhaul-cli --longhaul-cache 0.4 --ctx-size 4096 --temp 0 --single-turn \
    -p "Explain in three short sentences why the sky is blue." -n 96

VENV := .venv
BIN := $(VENV)/bin
NATIVE := build/native
SDIST := $(LONGHAUL_CACHE_DIR)/llama_cpp_python-0.3.36.tar.gz
NATIVE_SOURCES := $(wildcard native/src/*.cpp native/src/*.h native/include/*.h native/tests/*.cpp)

.PHONY: demo test test-rpc exact fuzz sanitize unpatched ui build fix clean check configure

demo: build
	$(DEMO)

test: build
	cmake --build $(NATIVE) --parallel $(JOBS) --target test-llama-archs ggml-rpc-server
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy longhaul
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES))
	$(BIN)/pytest -ra

test-rpc: build
	cmake --build $(NATIVE) --parallel $(JOBS) --target test-llama-archs ggml-rpc-server
	$(BIN)/pytest -ra tests/test_rpc.py tests/test_on_devices.py tests/test_devices.py

# On a machine without a GPU that is Mesa's lavapipe, which ggml uses only when told to.
# VULKAN_TESTS="-k PATTERN" runs some of them: lavapipe takes ten minutes for all.
VULKAN := build/vulkan
VULKAN_TESTS ?=
VULKAN_ENV = LONGHAUL_LIB_DIR="$(CURDIR)/$(VULKAN)/lib" GGML_VK_VISIBLE_DEVICES=0 LONGHAUL_TEST_DEVICE=Vulkan0

test-vulkan: build
	$(if $(call find,glslc),,$(error glslc is missing: apt-get install glslc spirv-headers libvulkan-dev mesa-vulkan-drivers))
	cmake -S native -B $(VULKAN)/native $(if $(call find,ninja),-G Ninja) -DGGML_VULKAN=ON \
	    -DLONGHAUL_LIB_DIR="$(CURDIR)/$(VULKAN)/lib" -DLONGHAUL_LLAMA_SDIST="$(abspath $(SDIST))" \
	    -DPython3_EXECUTABLE="$(CURDIR)/$(BIN)/python"
	cmake --build $(NATIVE) --parallel $(JOBS) --target test-llama-archs
	cmake --build $(VULKAN)/native --parallel $(JOBS) --target longhaul
	$(VULKAN_ENV) $(BIN)/pytest -ra tests/test_on_devices.py $(VULKAN_TESTS)
	$(VULKAN_ENV) GGML_VK_DISABLE_HOST_VISIBLE_VIDMEM=1 $(BIN)/pytest -ra tests/test_on_devices.py -k "qwen3moe-64"

exact: build
	cmake --build $(NATIVE) --parallel $(JOBS) --target test-llama-archs
	LONGHAUL_EXACT=full $(BIN)/pytest -ra tests/test_sweep.py tests/test_types.py tests/test_exact.py

fuzz: $(VENV)/.installed
	LONGHAUL_FUZZ=100000 $(BIN)/pytest -ra -s tests/test_fuzz.py

sanitize: $(VENV)/.installed
	LONGHAUL_SANITIZE=required $(BIN)/pytest -ra tests/test_sanitize.py

UNPATCHED := build/unpatched

unpatched: build
	mkdir -p $(UNPATCHED)/no-patches
	$(BIN)/python native/get_source.py source --cache $(LONGHAUL_CACHE_DIR) \
	    --patches $(UNPATCHED)/no-patches --into $(UNPATCHED)/llama.cpp
	cmake -S $(UNPATCHED)/llama.cpp -B $(UNPATCHED)/build -DCMAKE_BUILD_TYPE=Release \
	    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF \
	    -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF
	cmake --build $(UNPATCHED)/build --parallel $(JOBS) --target llama

ui: configure
	$(if $(call find,npm),,$(error npm is missing: apt-get install npm (Node 22 or newer)))
	cmake -DLLAMA_BUILD_UI=ON $(NATIVE)
	cmake --build $(NATIVE) --parallel $(JOBS)

build: configure
	@cmake --build $(NATIVE) --parallel $(JOBS)

fix: $(VENV)/.installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format -i $(NATIVE_SOURCES))

clean:
	rm -rf $(VENV) build

# Each line ends the run with what to install when a tool is missing or too old.
CC_FOUND = $(if $(filter default,$(origin CC)),$(call find,cc gcc clang),$(call find,$(CC)))
CXX_FOUND = $(if $(filter default,$(origin CXX)),$(call find,c++ g++ clang++),$(call find,$(CXX)))
find = $(firstword $(foreach name,$(1),$(shell command -v $(name) 2>/dev/null;)))
try = $(filter ok,$(shell ($(1)) >/dev/null 2>&1 && echo ok))
CXX17 := printf '\#include <filesystem>\nint main() { if constexpr (true) { return 0; } }\n'

check:
	$(if $(call find,$(PYTHON)),,$(error $(PYTHON) is missing: apt-get install python3 python3-venv))
	$(if $(call try,$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))'),,$(error $(PYTHON) is too old: Python 3.10 or newer is needed, name it by PYTHON=...))
	$(if $(call try,$(PYTHON) -c 'import ensurepip; import venv'),,$(error $(PYTHON) cannot make virtual environments: apt-get install python3-venv))
	$(if $(call find,cmake),,$(error cmake is missing: apt-get install cmake (3.21 or newer)))
	$(if $(call try,cmake --version | awk 'NR == 1 { split($$3, v, "."); exit !(v[1] * 1000 + v[2] >= 3021) }'),,$(error cmake is too old: 3.21 or newer is needed))
	$(if $(CXX_FOUND),,$(error no C++ compiler found: apt-get install g++))
	$(if $(CC_FOUND),,$(error no C compiler found: apt-get install gcc))
	$(if $(call try,$(CXX17) | $(CXX_FOUND) -std=c++17 -x c++ -fsyntax-only -),,$(error $(CXX_FOUND) cannot compile C++17: GCC 9, clang 10 or newer is needed (apt-get install g++)))
	$(if $(call find,git patch),,$(error git or patch is missing: apt-get install patch))
	@:

$(VENV)/.created: | check
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# The bindings alone: they load our patched libraries, so llama.cpp is not compiled a second time.
# A package that is there already is verified as well, before any of its code runs.
$(VENV)/.bindings: $(VENV)/.created
	$(BIN)/python native/get_source.py fetch --cache $(LONGHAUL_CACHE_DIR)
	CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" $(BIN)/python -m pip install --disable-pip-version-check $(SDIST)
	@touch $@

$(VENV)/.installed: $(VENV)/.bindings pyproject.toml
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]'
	@touch $@

# CMake configures again by itself when its own inputs change; this does when CMAKE_ARGS changed.
configure: check $(VENV)/.installed
	@if [ ! -f $(NATIVE)/.configured ] || \
	    { [ -n "$${CMAKE_ARGS-}" ] && [ "$${CMAKE_ARGS-}" != "$$(cat $(NATIVE)/.configured)" ]; }; then \
	    generator=; \
	    if [ ! -f $(NATIVE)/CMakeCache.txt ] && command -v ninja >/dev/null; then generator="-G Ninja"; fi; \
	    cmake -S native -B $(NATIVE) $$generator \
	        -DLONGHAUL_LIB_DIR="$(CURDIR)/build/lib" -DLONGHAUL_LLAMA_SDIST="$(abspath $(SDIST))" \
	        -DPython3_EXECUTABLE="$(CURDIR)/$(BIN)/python" $${CMAKE_ARGS-} && \
	    echo "$${CMAKE_ARGS-}" >$(NATIVE)/.configured; \
	fi
