# Everything that is done with this project is a target here. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

# Options of cluster-up.
NODES ?= 1
GATES ?= default
# The cluster's directory; two may run side by side in two directories.
CLUSTER ?= .cluster
VERSION ?= dev

NAMESPACE := dra-shared-system
CHART := deployments/helm/dra-driver-shared
IMAGES := bin/images/dra-driver-shared.tar bin/images/nettool.tar
STATIC := CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w"
FUZZ := accel:FuzzFind controlplane/claims:FuzzName controlplane/reservedfor:FuzzParse api/v1alpha1:FuzzParameters api/config/v1alpha1:FuzzLoad attach:FuzzRecordPath attach:FuzzHookState attach:FuzzRequest attach:FuzzRecord driver/record:FuzzUID driver/record:FuzzClaim
CRD_TYPES := ./api/scheduling/...
DOCKERFILE := awk -f deployments/image/dockerfile.awk deployments/image/contents.txt
GO_FILES := $(shell find . -name '*.go' -not -path './.cluster*' -o -name '*.o' -path './netdev/*') go.mod go.sum

##@ Try it

demo: prerequisites cluster-binaries bin/helm $(IMAGES) bin/demo ## pods share a NIC on a real node, each with what it was granted
	@bin/demo

demo-groups: prerequisites cluster-binaries bin/helm $(IMAGES) ## one claim for a group of pods, where Kubernetes has groups and where it has none
	@demo/claim-per-group/demo.sh

cluster-up: prerequisites cluster-binaries bin/helm $(IMAGES) ## a cluster with the chart installed [CLUSTER=directory] [NODES=1|2] [GATES=default|all]
	@bin/cluster up --dir $(CLUSTER) --nodes $(NODES) --gates $(GATES) $(addprefix --image ,$(IMAGES))
	@$(MAKE) --no-print-directory install

cluster-down: bin/cluster ## end that cluster; nothing of it is left
	@bin/cluster down --dir $(CLUSTER)

install: bin/helm ## install or upgrade the chart in the cluster
	@$(CLUSTER)/network bin/helm upgrade dra-shared $(CHART) --install --kubeconfig $(CLUSTER)/kubeconfig \
	  --namespace $(NAMESPACE) --create-namespace --values test/env/values.yaml --wait --timeout 60s >$(CLUSTER)/logs/helm.log 2>&1 \
	  || { cat $(CLUSTER)/logs/helm.log; exit 1; }
	echo "chart: installed in namespace $(NAMESPACE)"

reload: bin/cluster $(IMAGES) ## load the images anew into the cluster and restart plugin and controller
	bin/cluster load --dir $(CLUSTER) $(IMAGES)
	for kind in daemonset deployment; do
	  $(CLUSTER)/kubectl -n $(NAMESPACE) rollout restart $$kind
	  $(CLUSTER)/kubectl -n $(NAMESPACE) rollout status $$kind --timeout 60s
	done

##@ Test

test: lint generate-check test-unit test-fuzz chart-check test-controlplane e2e demo ## everything CI runs
	@echo "test: all passed"

test-unit: prerequisites ## tables, real netlink in namespaces, the plugin against a fake kubelet, killed at every step, under load [8 min]
	@go test -timeout 10m $$(go list ./... | grep -v -e /netdev/classify -e /test/crash)
	# What is measured is measured alone.
	go test -timeout 10m ./netdev/classify
	go test -timeout 15m ./test/crash
	cd test/cluster && go vet ./... && go test ./...

test-fuzz: ## each fuzz target for a moment [1 min]
	@for target in $(FUZZ); do
	  go test -run '^$$' -fuzz "^$${target#*:}$$" -fuzztime 30000x ./$${target%%:*}
	done

e2e: prerequisites cluster-binaries bin/helm $(IMAGES) bin/images/crash.tar bin/nettool bin/dra-conformance ## the stories of test/e2e on real clusters [RUN=name] [10 min]
	@test/e2e/run.sh $(if $(RUN),'$(RUN)',)

test-controlplane: prerequisites cluster-binaries bin/helm $(IMAGES) ## the controller on a real control plane with simulated nodes: a thousand pods, death between any two writes [3 min]
	@CONTROLPLANE=1 go test -count=1 -timeout 20m ./test/controlplane $(if $(RUN),-v -run '$(RUN)',)

test-matrix: prerequisites bin/cluster bin/helm $(IMAGES) ## the same on each version of Kubernetes that is supported [VERSIONS="v1.36.3 ..."]; writes docs/dev/matrix.md [each 10 min to build, once]
	@test/controlplane/matrix.sh $(VERSIONS)

bench-controlplane: prerequisites cluster-binaries bin/helm $(IMAGES) bin/dra-shared-controller ## writes per pod, time to reservation and memory, for 10,000 pods, in both modes; writes docs/dev/scale.md [15 min]
	@test/controlplane/bench.sh

lint: bin/golangci-lint ## style, and the arrows between packages [1 min]
	@bin/golangci-lint run ./...
	cd test/cluster && ../../bin/golangci-lint run --config ../../.golangci.yml ./...

bench: prerequisites ## how long an attach takes beside the floor that netlink sets, and how steady a grant is
	@go test -run '^$$' -bench . -benchtime 300x ./netdev

generate: prerequisites-clang bin/controller-gen ## what is made from something else: BPF objects, CRDs, the Dockerfile
	@go generate ./netdev/...
	bin/controller-gen object paths=$(CRD_TYPES)
	bin/controller-gen crd paths=$(CRD_TYPES) output:crd:dir=$(CHART)/templates
	$(DOCKERFILE) >deployments/image/Dockerfile

generate-check: prerequisites-clang bin/controller-gen ## nothing has drifted from what it is made of
	@tmp=$$(mktemp -d); trap "rm -rf $$tmp" EXIT
	bin/controller-gen crd paths=$(CRD_TYPES) output:crd:dir=$$tmp object:headerFile= output:object:dir=$$tmp
	for file in $$tmp/*; do
	  cmp $$file $$(ls $(CHART)/templates/$${file##*/} api/scheduling/v1beta1/$${file##*/} 2>/dev/null) || { echo "$${file##*/} is not what the Go types say: run make generate"; exit 1; }
	done
	cp -r netdev/classify $$tmp/before
	go generate ./netdev/...
	$(DOCKERFILE) >$$tmp/Dockerfile
	cmp $$tmp/Dockerfile deployments/image/Dockerfile || { echo "deployments/image/Dockerfile is not what contents.txt says: run make generate"; exit 1; }
	diff -r $$tmp/before netdev/classify || { rm -rf netdev/classify; cp -r $$tmp/before netdev/classify; echo "netdev/classify: generated files are not what bpf/ says: run make generate"; exit 1; }

chart-check: bin/helm ## the chart: lint, and what its schema refuses
	@bin/helm lint --quiet $(CHART) --values test/env/values.yaml
	bin/helm template x $(CHART) --set config.networks[0].nam=x >/dev/null 2>&1 && { echo "the chart's schema accepts an unknown field"; exit 1; }
	bin/helm template x $(CHART) --set plugin.verbosity=loud >/dev/null 2>&1 && { echo "the chart's schema accepts a word for a number"; exit 1; }
	bin/helm template x $(CHART) --set controller.mode=both >/dev/null 2>&1 && { echo "the chart's schema accepts an unknown mode"; exit 1; }
	bin/helm template x $(CHART) --values test/env/values.yaml >/dev/null
	bin/helm template x $(CHART) --set controller.certManager=true | grep -q 'secretName: x-controller-webhook' || { echo "cert-manager makes no certificate"; exit 1; }

##@ Build

build: bin/dra-shared-plugin bin/dra-shared-hook bin/dra-shared-controller ## the binaries, static

image: bin/images/dra-driver-shared.tar ## the image, as a docker archive (see deployments/image)

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

bin/images/dra-driver-shared.tar: bin/cluster bin/dra-shared-plugin bin/dra-shared-hook bin/dra-shared-controller deployments/image/contents.txt
	@bin/cluster image --contents deployments/image/contents.txt --tag registry.local/dra-driver-shared:$(VERSION) --out $@

# A plugin that dies where it is told to, for tests.
bin/crash/dra-shared-plugin: $(GO_FILES)
	@mkdir -p bin/crash
	$(STATIC) -tags crash -o $@ ./cmd/dra-shared-plugin

bin/images/crash.tar: bin/cluster bin/crash/dra-shared-plugin bin/dra-shared-hook bin/dra-shared-controller deployments/image/contents.txt
	@sed 's,bin/dra-shared-plugin,bin/crash/dra-shared-plugin,' deployments/image/contents.txt >bin/crash/contents.txt
	bin/cluster image --contents bin/crash/contents.txt --tag registry.local/dra-driver-shared:crash --out $@

bin/images/nettool.tar: bin/cluster bin/nettool test/nettool/image.txt
	@bin/cluster image --contents test/nettool/image.txt --tag registry.local/nettool:dev --out $@

cluster-binaries: bin/cluster ## Kubernetes, containerd and runc for the test cluster; cached after the first time
	@bin/cluster build

prerequisites-clang:
	@test/env/prerequisites.sh clang

prerequisites: ## what the machine must have; installed where there is apt-get
	@test/env/prerequisites.sh

##@ About

help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-zA-Z0-9_-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo demo-groups cluster-up cluster-down install reload test test-unit test-fuzz test-controlplane test-matrix bench-controlplane e2e lint bench generate generate-check chart-check \
  build image cluster-binaries prerequisites prerequisites-clang help
