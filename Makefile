SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
COMPOSE_FILE := docker-compose.training.yml
BOXES_FILE := docker-compose.boxes.yml
BOX_FILE := docker-compose.box.yml

# The first Python 3.11+ on PATH; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# One place for the version: pyproject.toml.
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
MARKERS ?= not gpu and not docker and not simulated_gpu and not engines and not long
PYTEST_ARGS ?=
# How many test processes run beside each other.
TEST_PROCESSES ?= 2
# A simulated GPU beside the checkout, for torch's CUDA build; few machines have it.
SIMULATED_GPU ?= ../shared/simulated_gpu
SIMULATED_GPU_VENV ?= .venv-simulated-gpu
# Exactly: tests read manifests with them. Longhaul itself needs neither.
ENGINES := skypilot==0.14.1
ENGINES_VENV ?= .venv-engines
OLDEST_VENV ?= .venv-oldest

.PHONY: help setup demo house test test-long test-oldest test-docker test-docker-core simulated-gpu test-simulated-gpu engines test-engines check openapi bench bench-smoke peers up logs down env box revoke-box lock

help: ## print this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP) ## create .venv from the locks (instant when they have not changed)

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "make setup: no Python 3.11 or newer on PATH; install one or give PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first, by version: a machine with a GPU gets the CUDA build, a lock with hashes could name only one of them.
$(STAMP): requirements.lock requirements.dev.lock pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock -r requirements.dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	@touch $@

demo: setup ## train a tiny model here and now, without Docker or a GPU (TASK=chat or classify: others)
	$(BIN)/longhaul demo --task $(or $(TASK),recipes)

test: setup ## run the tests (MARKERS="gpu" or "docker" for the others, PYTEST_ARGS for more)
	$(BIN)/python -m pytest -m "$(MARKERS)" -n $(TEST_PROCESSES) $(PYTEST_ARGS)

test-long: setup ## run the tests that train whole jobs on several boxes, engines or ranks (minutes)
	$(BIN)/python -m pytest -m "long and not gpu and not docker and not simulated_gpu" -n $(TEST_PROCESSES) $(PYTEST_ARGS)

house: setup ## print how large the packages are, and what in them is long
	$(BIN)/python -m tests.house

# uv, for pip cannot be asked for the oldest. Tools of tests are as new as these releases let them be.
$(OLDEST_VENV)/.setup-stamp: pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "make test-oldest: no Python 3.11 or newer on PATH; install one or give PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv $(TORCH)
	VIRTUAL_ENV=$(OLDEST_VENV) $(OLDEST_VENV)/bin/uv pip install --quiet --resolution lowest-direct -e '.[service,worker,local]'
	VIRTUAL_ENV=$(OLDEST_VENV) $(OLDEST_VENV)/bin/uv pip install --quiet -e '.[service,worker,local,dev]'
	@touch $@

test-oldest: $(OLDEST_VENV)/.setup-stamp ## run the tests with the oldest releases that pyproject.toml allows (3 GB of disk; half an hour)
	$(OLDEST_VENV)/bin/python -m pytest -m "$(MARKERS)" -n $(TEST_PROCESSES) $(PYTEST_ARGS)

test-docker: setup ## build the containers, run jobs in them, stop them half-way (needs a Docker engine; minutes)
	$(BIN)/python -m pytest -m docker tests/docker $(PYTEST_ARGS)

test-docker-core: setup ## of these only the start: build, up, one job, stop, up, down (needs a Docker engine)
	$(BIN)/python -m pytest -m docker tests/docker/test_core.py $(PYTEST_ARGS)

simulated-gpu: ## create .venv-simulated-gpu: torch's CUDA build and a GPU that computes nothing (5.5 GB of disk; minutes)
	@[ -e $(SIMULATED_GPU) ] || { echo "make simulated-gpu: there is no $(SIMULATED_GPU)" >&2; exit 1; }
	$(SIMULATED_GPU)/setup . $(SIMULATED_GPU_VENV)
	$(SIMULATED_GPU)/build $(SIMULATED_GPU_VENV)
	@[ -e $(SIMULATED_GPU_VENV)/.self-tested ] || \
		VENV=$(SIMULATED_GPU_VENV) $(SIMULATED_GPU)/run python tests/simulated_gpu/driver_check.py && touch $(SIMULATED_GPU_VENV)/.self-tested

test-simulated-gpu: simulated-gpu ## run the tests that need a simulated GPU
	VENV=$(SIMULATED_GPU_VENV) $(SIMULATED_GPU)/run python -m pytest -m simulated_gpu tests/simulated_gpu -n $(TEST_PROCESSES) $(PYTEST_ARGS)

engines: $(ENGINES_VENV)/.setup-stamp ## create .venv-engines: SkyPilot's own package (1 GB of disk; minutes)

$(ENGINES_VENV)/.setup-stamp: Makefile
	@[ -n "$(PYTHON)" ] || { echo "make engines: no Python 3.11 or newer on PATH; install one or give PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(ENGINES)
	@touch $@

test-engines: setup engines ## run the tests that need SkyPilot's own package
	ENGINES_VENV=$(ENGINES_VENV) $(BIN)/python -m pytest -m engines tests/engines $(PYTEST_ARGS)

# --env-file: what a person's own .env says is not the matter here. Without Compose the file is at least read.
check: setup ## formatting, lint, types, import rules, OpenAPI document, reference, Dockerfile and compose file
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m service.docs.schema --check
	$(BIN)/hadolint Dockerfile.training
	@if docker compose version >/dev/null 2>&1; then \
		for files in "-f $(COMPOSE_FILE)" "-f $(COMPOSE_FILE) -f $(BOXES_FILE) -f docker-compose.no-gpu.yml" "-f $(BOX_FILE) -f docker-compose.box-cdi.yml"; do \
			env UID=1000 GID=1000 LONGHAUL_API_KEY=checked LONGHAUL_REDIS_PASSWORD=checked LONGHAUL_SHARED=/checked \
				LONGHAUL_BOX=checked LONGHAUL_BOX_PASSWORD=checked LONGHAUL_FIRST_BOX=checked:6380 \
				docker compose --env-file .env.example $$files config --quiet \
			&& echo "$$files: docker compose config finds no fault" || exit 1; \
		done; \
	else \
		$(BIN)/python -c 'import sys, yaml; [yaml.safe_load(open(each)) for each in sys.argv[1:]]' $(COMPOSE_FILE) $(BOXES_FILE) $(BOX_FILE) \
		&& echo "$(COMPOSE_FILE), $(BOXES_FILE), $(BOX_FILE): only parsed as YAML, for there is no 'docker compose' here"; \
	fi

openapi: setup ## write docs/openapi.json, docs/reference/ and the variables of sinks from the code
	$(BIN)/python -m service.docs.schema

bench: setup ## run one measurement: make bench BENCH=name
	@[ -n "$(BENCH)" ] || { echo "make bench: say which, BENCH=name of a file in benchmarks/" >&2; exit 1; }
	$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)

bench-smoke: setup ## run every benchmark at its smallest size, and check the keys of its JSON (3 minutes)
	$(BIN)/python -m benchmarks.smoke $(ARGS)

peers: ## create .venv-peers: TRL, which causal models are measured against (gigabytes of disk; minutes)
	@[ -n "$(PYTHON)" ] || { echo "make peers: no Python 3.11 or newer on PATH; install one or give PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) trl==1.16.0 'transformers==5.23.*'

# .env names the compose files; one of an earlier version does not.
COMPOSE = $(strip docker compose $(shell grep -qs '^COMPOSE_FILE=' .env || echo -f $(COMPOSE_FILE)))
NEEDS_COMPOSE = docker compose version >/dev/null 2>&1 || { echo "make $@: there is no 'docker compose' (Compose v2.24 or newer; the older docker-compose v1 cannot read these files): see docs/docker.md" >&2; exit 1; }

up: ## build and start all containers, and wait until they are healthy
	@[ -e .env ] || { echo "make up: no .env; run 'make env' first" >&2; exit 1; }
	@$(NEEDS_COMPOSE)
	@$(COMPOSE) up --build --detach --wait --wait-timeout 600 || { \
		echo "make up: not all containers are healthy; '$(COMPOSE) ps' shows which, 'make logs' why" >&2; \
		echo "  without an NVIDIA GPU: set COMPOSE_FILE=docker-compose.training.yml:docker-compose.cpu.yml in .env" >&2; exit 1; }
	@setting() { sed -n "s/^$$1=//p" .env; }; runs=$$(setting LONGHAUL_RUNS); shared=$$(setting LONGHAUL_SHARED); \
	grep -qsE '^COMPOSE_FILE=.*docker-compose\.(cpu|no-gpu)\.yml' .env || grep -qs '"examined_at": [0-9]' $${runs:-$${shared:+$$shared/}runs}/.gpus/*.json || \
		echo "make up: no GPU was examined here yet; 10 minutes at most: $(COMPOSE) run --rm --build worker doctor"
	@! grep -qs '^COMPOSE_FILE=$(BOX_FILE)' .env || { echo "make up: the worker is healthy; 'longhaul workers' on the first box lists it"; exit 0; }; \
	port=$$(sed -n 's/^LONGHAUL_PORT=//p' .env); url=http://127.0.0.1:$${port:-8000}; \
	[ "$${port:-8000}" = 8000 ] || more=" LONGHAUL_URL=$$url"; \
	echo "make up: all containers are healthy; open $$url in a browser, or: export \$$(grep ^LONGHAUL_API_KEY= .env)$${more:-}, then longhaul submit FILE --watch"

logs: ## follow the logs of all containers
	@$(NEEDS_COMPOSE)
	$(COMPOSE) logs --follow --tail 100

down: ## stop and remove all containers; a running job saves a checkpoint first, and volumes stay
	@$(NEEDS_COMPOSE)
	$(COMPOSE) down

# UID and GID are those of the person, also under sudo: the containers write ./runs as that user.
env: ## write .env (your UID and GID, a random API key and Redis password) and make ./runs and ./data
	@[ ! -e .env ] || { echo "make env: .env exists and is left as it is; remove it first for a new one (and a new API key)" >&2; exit 1; }
	@uid=$${SUDO_UID:-$$(id -u)}; gid=$${SUDO_GID:-$$(id -g)}; \
	if [ "$$uid" = 0 ]; then uid=1000 gid=1000; echo "make env: run as root; the containers will run as 1000:1000"; fi; \
	key=lh_$$(head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n'); \
	password=$$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n'); \
	umask 077; trap 'rm -f .env.new' EXIT; \
	grep -vE '^(UID|GID|LONGHAUL_BOX|LONGHAUL_API_KEY|LONGHAUL_REDIS_PASSWORD)=' .env.example > .env.new; \
	printf 'UID=%s\nGID=%s\nLONGHAUL_BOX=%s\nLONGHAUL_API_KEY=%s\nLONGHAUL_REDIS_PASSWORD=%s\n' \
		"$$uid" "$$gid" "$$(uname -n | tr -cd 'A-Za-z0-9_.-')" "$$key" "$$password" >> .env.new; \
	umask 022; mkdir -p runs data; \
	if [ "$$(id -u)" = 0 ]; then chown "$$uid:$$gid" .env.new runs data; fi; \
	mv .env.new .env; echo "wrote .env; made ./runs and ./data"

# A private CA, which alone the other box trusts; the certificate of Redis here, for every HOST that a box was told; a
# password for each box, of which only the hash stays here. The group may read what Redis reads: its container is in it.
box: ## let another box train: make box NAME=gpu2 HOST=<address of this box> (docs/many-boxes.md)
	@[[ "$(NAME)" =~ ^[a-z0-9][a-z0-9-]{0,30}$$ ]] || { echo "make box: give the other box a name, such as NAME=gpu2: lower-case letters, digits, hyphens" >&2; exit 1; }
	@[ -e .env ] || { echo "make box: no .env; run 'make env' first" >&2; exit 1; }
	@[[ "$(NAME)" != keys && "$(NAME)" != hosts ]] || { echo "make box: boxes/$(NAME) is a file of 'make box' itself; give the box another name" >&2; exit 1; }
	@! grep -qx 'LONGHAUL_BOX=$(NAME)' .env || { echo "make box: $(NAME) is the name of this box (LONGHAUL_BOX in .env); give the other one another" >&2; exit 1; }
	@[ -n "$(HOST)" ] || [ -s boxes/hosts ] || { echo "make box: say at which address the other box reaches this one, HOST=192.168.1.10 or a name" >&2; exit 1; }
	@[[ "$(HOST)" =~ ^([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?)?$$ || "$(HOST)" =~ ^[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*$$ ]] || \
		{ echo "make box: HOST=$(HOST) is neither a name nor an address; give it without port and brackets, as in HOST=192.168.1.10 or HOST=fd00::1" >&2; exit 1; }
	@command -v openssl >/dev/null || { echo "make box: there is no openssl here; install it" >&2; exit 1; }
	@umask 027; mkdir -p boxes; trap 'rm -f boxes/*.new' EXIT; ec='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'; \
	setting() { sed -n "s/^$$1=//p" .env; }; \
	quiet() { openssl "$$@" 2> boxes/said.new || { cat boxes/said.new >&2; echo "make box: openssl failed, and the certificate is as it was" >&2; exit 1; }; }; \
	if [ ! -e boxes/ca.crt ]; then \
		quiet req -x509 $$ec -days 7300 -subj "/CN=Longhaul CA" -addext keyUsage=critical,keyCertSign -keyout boxes/ca.key.new -out boxes/ca.crt.new; \
		chmod 600 boxes/ca.key.new; mv boxes/ca.key.new boxes/ca.key; mv boxes/ca.crt.new boxes/ca.crt; \
	fi; \
	host=$(HOST); host=$${host:-$$(tail -n 1 boxes/hosts)}; \
	if ! grep -qsxF "$$host" boxes/hosts; then \
		{ cat boxes/hosts 2>/dev/null || true; echo "$$host"; } > boxes/hosts.new; \
		names=$$(while read -r each; do if [[ $$each =~ ^[0-9.]+$$|: ]]; then echo "IP:$$each"; else echo "DNS:$$each"; fi; done < boxes/hosts.new | paste -sd,); \
		quiet req -new $$ec -subj "/CN=Longhaul" -keyout boxes/server.key.new -out boxes/csr.new; \
		quiet x509 -req -in boxes/csr.new -CA boxes/ca.crt -CAkey boxes/ca.key -set_serial 0x$$(openssl rand -hex 16) -days 7300 \
			-extfile <(echo "subjectAltName=$$names"; echo "extendedKeyUsage=serverAuth") -out boxes/server.crt.new; \
		chmod 640 boxes/server.key.new; for file in server.key server.crt hosts; do mv boxes/$$file.new boxes/$$file; done; \
	fi; \
	password=$$(openssl rand -hex 32); \
	{ grep -sv '^$(NAME) ' boxes/keys || true; echo "$(NAME) $$(printf %s "$$password" | openssl dgst -sha256 -r | cut -d' ' -f1)"; } > boxes/keys.new; \
	mv boxes/keys.new boxes/keys; mkdir -p boxes/$(NAME); chmod 700 boxes/$(NAME); cp boxes/ca.crt boxes/$(NAME); chmod 644 boxes/$(NAME)/ca.crt; \
	if [[ $$host = *:* ]]; then host="[$$host]"; fi; \
	printf '%s\n' COMPOSE_FILE=$(BOX_FILE) "UID=$$(setting UID)" "GID=$$(setting GID)" LONGHAUL_BOX=$(NAME) "LONGHAUL_BOX_PASSWORD=$$password" \
		"LONGHAUL_FIRST_BOX=$$host:6380" "LONGHAUL_SHARED=$$(setting LONGHAUL_SHARED)" LONGHAUL_GPUS=all > boxes/$(NAME)/.env; \
	chmod 600 boxes/$(NAME)/.env; \
	if [ "$$(id -u)" = 0 ]; then chown -R "$$(setting UID):$$(setting GID)" boxes; fi; \
	echo "wrote boxes/$(NAME)/.env and ca.crt: copy both into the clone on $(NAME)"; \
	echo "here, to let it in: docker compose up -d && docker compose restart redis"

revoke-box: ## end the key of another box: make revoke-box NAME=gpu2
	@[[ "$(NAME)" =~ ^[a-z0-9-]+$$ ]] && grep -qs '^$(NAME) ' boxes/keys || { echo "make revoke-box: no box has the name '$(NAME)'; boxes/keys lists them" >&2; exit 1; }
	@sed -i '/^$(NAME) /d' boxes/keys; rm -rf boxes/$(NAME)
	@echo "removed the key of $(NAME); it is refused from the next start of Redis on: docker compose restart redis"

lock: $(BIN)/python ## regenerate the lock files from pyproject.toml (UPGRADE=1: newest releases)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip-tools>=7.5'
	$(BIN)/python .ci/lock.py $(if $(UPGRADE),--upgrade)
