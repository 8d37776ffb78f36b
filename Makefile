# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# All tasks of this project are targets of this file. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

# Options of cluster-up.
NODES ?= 1
GATES ?= default
# The directory of the cluster. Clusters in different directories can run at the same time.
CLUSTER ?= .cluster
VERSION ?= dev

# Options of image-docker and dockerfile-check. The default of BUILDER is in the Dockerfile.
ARCH ?= $(shell go env GOARCH)
BUILDER ?=
DOCKER ?= docker
DOCKER_FLAGS ?=

NAMESPACE := dra-shared-system
CHART := deployments/helm/dra-driver-shared
IMAGES := bin/images/dra-driver-shared.tar bin/images/nettool.tar
ARCHES := amd64 arm64
STATIC := CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w"
CRD_TYPES := ./api/scheduling/...
# What `make generate` writes: files, and directories with their sources.
GENERATED = netdev/classify $(wildcard api/*/zz_* api/*/*/zz_*) $(CHART)/templates/scheduling.dra-shared.dev_podgroups.yaml deployments/image/Dockerfile docs/user/reference
DOCKERFILE := awk -f deployments/image/dockerfile.awk deployments/image/contents.txt
GO_FILES := $(shell find . -name '*.go' -not -name '*_test.go' -not -path './.cluster*' -o -name '*.o' -path './netdev/*') go.mod go.sum
LINT := go run ./test/lint
# The checks of test/lint that `make lint` includes, of lint-words, lint-lines, and lint-headers.
LINT_CHECKS := lint-words lint-lines lint-headers
# Packages whose tests measure rates and latencies, or end processes under load. They run alone.
MEASURED := /netdev/classify$$|/test/crash$$
# `make lint` runs vet.
GO_TEST := go test -vet=off

##@ Demos and test clusters

demo: prerequisites cluster-binaries bin/helm $(IMAGES) bin/demo ## let pods share a NIC on a real node, and show the rate that each was granted
	@bin/demo

demo-groups: prerequisites cluster-binaries bin/helm $(IMAGES) ## let a group of pods share one claim, on clusters with and without PodGroups of Kubernetes
	@demo/claim-per-group/demo.sh

cluster-up: prerequisites cluster-binaries bin/helm $(IMAGES) ## start a cluster and install the chart [CLUSTER=directory] [NODES=1|2] [GATES=default|all]
	@bin/cluster up --dir $(CLUSTER) --nodes $(NODES) --gates $(GATES) $(addprefix --image ,$(IMAGES))
	@$(MAKE) --no-print-directory install

cluster-down: bin/cluster ## stop the cluster and remove all its files [CLUSTER=directory]
	@bin/cluster down --dir $(CLUSTER)

install: bin/helm ## install or upgrade the chart in the cluster
	@$(CLUSTER)/fabric bin/helm upgrade dra-shared $(CHART) --install --kubeconfig $(CLUSTER)/kubeconfig \
	  --namespace $(NAMESPACE) --create-namespace --values test/env/values.yaml --wait --timeout 60s >$(CLUSTER)/logs/helm.log 2>&1 \
	  || { cat $(CLUSTER)/logs/helm.log; exit 1; }
	echo "chart: installed in namespace $(NAMESPACE)"

reload: bin/cluster $(IMAGES) ## load rebuilt images into the cluster, and restart the plugin and the controller
	bin/cluster load --dir $(CLUSTER) $(IMAGES)
	for kind in daemonset deployment; do
	  $(CLUSTER)/kubectl -n $(NAMESPACE) rollout restart $$kind
	  $(CLUSTER)/kubectl -n $(NAMESPACE) rollout status $$kind --timeout 60s
	done

##@ Tests

test: ## run all checks and test suites, as CI does, and print the time of each
	+@MAKE='$(MAKE)' .ci/suites.sh

test-build: prerequisites cluster-binaries bin/helm bin/golangci-lint bin/controller-gen $(IMAGES) bin/images/crash.tar bin/nettool bin/dra-conformance bin/demo bin/e2e.test ## build what the test suites need

test-unit: ## run the tests of all packages [8 min]
	+@$(MAKE) --no-print-directory test-packages
	$(MAKE) --no-print-directory test-classify
	$(MAKE) --no-print-directory test-crash

test-packages: prerequisites ## run the tests of the packages that do not measure: tables, netlink in namespaces, a fake kubelet
	@$(GO_TEST) -timeout 10m $$(go list ./... | grep -vE '$(MEASURED)')
	cd test/cluster && $(GO_TEST) ./...

test-classify: prerequisites ## measure the traffic of shares with the BPF programs attached
	@$(GO_TEST) -timeout 10m ./netdev/classify

test-crash: prerequisites ## end the plugin at each failpoint, and run it under load
	@$(GO_TEST) -timeout 15m ./test/crash

test-fuzz: ## run each fuzz target for 30,000 inputs [1 min]
	@.ci/fuzz.sh 30000

test-controlplane: prerequisites cluster-binaries bin/helm $(IMAGES) ## test the controller on a real control plane with simulated nodes [RUN=regexp] [3 min]
	@CONTROLPLANE=1 $(GO_TEST) -count=1 -timeout 20m ./test/controlplane $(if $(RUN),-v -run '$(RUN)',)

test-matrix: prerequisites bin/cluster bin/helm $(IMAGES) ## run test-controlplane on each supported version of Kubernetes, and write docs/dev/matrix.md [VERSIONS="v1.36.3 ..."] [10 min to build each version]
	@test/controlplane/matrix.sh $(VERSIONS)

e2e: prerequisites cluster-binaries bin/helm $(IMAGES) bin/images/crash.tar bin/nettool bin/dra-conformance bin/e2e.test ## run the stories of test/e2e on real clusters [RUN=name] [10 min]
	@test/e2e/run.sh $(if $(RUN),'$(RUN)',)

bench: prerequisites ## measure the latency of attaching a link, the latency of its netlink calls alone, and how steady granted rates are
	@go test -run '^$$' -bench . -benchtime 300x ./netdev

bench-controlplane: prerequisites cluster-binaries bin/helm $(IMAGES) bin/dra-shared-controller ## measure writes per pod, time to reservation, and memory for 10,000 pods in both modes, and write docs/dev/scale.md [15 min]
	@test/controlplane/bench.sh

##@ Checks

lint: bin/golangci-lint $(LINT_CHECKS) ## check style, and which package imports which [1 min]
	@bin/golangci-lint run ./...
	cd test/cluster && ../../bin/golangci-lint run --config ../../.golangci.yml ./...

lint-words: ## reject wordings that read like a translation [ARGS=--count]
	@$(LINT) words $(ARGS)

lint-lines: ## reject lines of more than 120 columns in Go files [ARGS=--count]
	@$(LINT) lines $(ARGS)

lint-headers: ## reject source files without a license header [ARGS=--count]
	@$(LINT) headers $(ARGS)

fix-headers: ## insert missing license headers
	@$(LINT) headers --fix

generate: prerequisites-clang bin/controller-gen ## generate BPF objects, deepcopy functions, the CRD, the Dockerfile, and docs/user/reference from their sources
	@go generate ./netdev/...
	bin/controller-gen object:headerFile=test/lint/header.go.txt paths=./api/...
	bin/controller-gen crd paths=$(CRD_TYPES) output:crd:dir=$(CHART)/templates
	$(DOCKERFILE) >deployments/image/Dockerfile
	go run ./internal/tools/reference

generate-check: ## check that no generated file differs from what its sources generate
	@tmp=$$(mktemp -d); trap "rm -rf $$tmp" EXIT
	tar -cf $$tmp/before.tar $(GENERATED)
	$(MAKE) --no-print-directory generate
	mkdir $$tmp/before; tar -xf $$tmp/before.tar -C $$tmp/before
	differs=
	for path in $(GENERATED); do diff -r $$tmp/before/$$path $$path || differs="$$differs $$path"; done
	[ -z "$$differs" ] || { rm -rf $(GENERATED); tar -xf $$tmp/before.tar; echo "generate-check: differs from its source, run make generate:$$differs"; exit 1; }

chart-check: bin/helm ## lint the chart, and check that its schema rejects wrong values
	@bin/helm lint --quiet $(CHART) --values test/env/values.yaml
	bin/helm template x $(CHART) --set config.networks[0].nam=x >/dev/null 2>&1 && { echo "chart: the schema accepts an unknown field"; exit 1; }
	bin/helm template x $(CHART) --set plugin.verbosity=loud >/dev/null 2>&1 && { echo "chart: the schema accepts a word as a number"; exit 1; }
	bin/helm template x $(CHART) --set controller.mode=both >/dev/null 2>&1 && { echo "chart: the schema accepts an unknown mode"; exit 1; }
	bin/helm template x $(CHART) --values test/env/values.yaml >/dev/null
	bin/helm template x $(CHART) --set controller.certManager=true | grep -q 'secretName: x-controller-webhook' \
	  || { echo "chart: controller.certManager creates no certificate"; exit 1; }

##@ Build

build: bin/dra-shared-plugin bin/dra-shared-hook bin/dra-shared-controller ## build the static binaries of the image

image: bin/images/dra-driver-shared.tar ## build the image for this machine as a docker archive, without a container engine

image-archives: $(ARCHES:%=bin/images/dra-driver-shared-%.tar) ## build the image for amd64 and arm64 as docker archives

image-docker: ## build the image from source with Docker [ARCH=arm64] [BUILDER=image] [DOCKER_FLAGS=...]
	@mkdir -p bin/images
	DOCKER_BUILDKIT=1 $(DOCKER) build --platform linux/$(ARCH) $(if $(BUILDER),--build-arg BUILDER=$(BUILDER)) $(DOCKER_FLAGS) \
	  --file deployments/image/Dockerfile --tag dra-driver-shared:$(VERSION)-$(ARCH) .
	$(DOCKER) save --output bin/images/docker-$(ARCH).tar dra-driver-shared:$(VERSION)-$(ARCH)

dockerfile-check: image-docker bin/cluster bin/images/dra-driver-shared-$(ARCH).tar ## check that Docker builds the same files as image-archives [same options]
	@bin/cluster compare bin/images/dra-driver-shared-$(ARCH).tar bin/images/docker-$(ARCH).tar
	echo "dockerfile-check: the images for $(ARCH) are the same"

bin/%: $(GO_FILES)
	@mkdir -p bin
	case $* in
	dra-*) $(STATIC) -o $@ ./cmd/$* ;;
	demo) $(STATIC) -o $@ ./demo ;;
	*) $(STATIC) -o $@ ./test/$* ;;
	esac

bin/golangci-lint:
	@mkdir -p bin
	echo "build: golangci-lint"
	GOBIN=$(CURDIR)/bin go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

bin/controller-gen:
	@mkdir -p bin
	echo "build: controller-gen"
	GOBIN=$(CURDIR)/bin go install sigs.k8s.io/controller-tools/cmd/controller-gen@v0.23.0

bin/cluster: $(wildcard test/cluster/*.go test/cluster/*/*.go test/cluster/go.*)
	@mkdir -p bin
	cd test/cluster && $(STATIC) -o ../../bin/cluster .

bin/helm: test/helm/main.go test/helm/go.mod
	@mkdir -p bin
	echo "build: Helm"
	cd test/helm && $(STATIC) -o ../../bin/helm .

bin/e2e.test: $(GO_FILES) $(wildcard test/e2e/*.go)
	@mkdir -p bin
	go test -c -o $@ ./test/e2e

bin/images/dra-driver-shared.tar: bin/cluster bin/dra-shared-plugin bin/dra-shared-hook bin/dra-shared-controller deployments/image/contents.txt
	@bin/cluster image --contents deployments/image/contents.txt --tag registry.local/dra-driver-shared:$(VERSION) --out $@

# The binaries and the image for each architecture. The content list names bin/; its copy names bin/ARCH/.
define arch-rules
bin/$(1)/dra-%: $(GO_FILES)
	@mkdir -p bin/$(1)
	GOOS=linux GOARCH=$(1) $(STATIC) -o $$@ ./cmd/dra-$$*

bin/images/dra-driver-shared-$(1).tar: bin/cluster bin/$(1)/dra-shared-plugin bin/$(1)/dra-shared-hook bin/$(1)/dra-shared-controller deployments/image/contents.txt
	@sed 's,^bin/,bin/$(1)/,' deployments/image/contents.txt >bin/$(1)/contents.txt
	bin/cluster image --contents bin/$(1)/contents.txt --tag registry.local/dra-driver-shared:$(VERSION)-$(1) --arch $(1) --out $$@
endef
$(foreach arch,$(ARCHES),$(eval $(call arch-rules,$(arch))))

# The plugin of the crash tests, which exits at the failpoint that the test names.
bin/crash/dra-shared-plugin: $(GO_FILES)
	@mkdir -p bin/crash
	$(STATIC) -tags crash -o $@ ./cmd/dra-shared-plugin

bin/images/crash.tar: bin/cluster bin/crash/dra-shared-plugin bin/dra-shared-hook bin/dra-shared-controller deployments/image/contents.txt
	@sed 's,bin/dra-shared-plugin,bin/crash/dra-shared-plugin,' deployments/image/contents.txt >bin/crash/contents.txt
	bin/cluster image --contents bin/crash/contents.txt --tag registry.local/dra-driver-shared:crash --out $@

bin/images/nettool.tar: bin/cluster bin/nettool test/nettool/image.txt
	@bin/cluster image --contents test/nettool/image.txt --tag registry.local/nettool:dev --out $@

cluster-binaries: bin/cluster | prerequisites ## build Kubernetes, containerd, and runc for the test cluster; later runs use a cache
	@bin/cluster build

prerequisites-clang: | prerequisites
	@test/env/prerequisites.sh clang

prerequisites: ## check for the programs that the tests need; install them where apt-get exists
	@test/env/prerequisites.sh

##@ About

help: ## print this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-zA-Z0-9_-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo demo-groups cluster-up cluster-down install reload test test-build test-unit test-packages test-classify test-crash \
  test-fuzz test-controlplane test-matrix e2e bench bench-controlplane lint lint-words lint-lines lint-headers fix-headers \
  generate generate-check chart-check build image image-archives image-docker dockerfile-check cluster-binaries \
  prerequisites prerequisites-clang help
