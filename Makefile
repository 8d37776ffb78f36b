# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# All tasks of this project are targets of this file. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

# Programs and tests are built with the same flags as the test clusters, so that the libraries of
# Kubernetes, which all of them need, compile once on a machine with an empty cache.
export CGO_ENABLED := 0
export GOFLAGS := $(strip $(shell go env GOFLAGS) -trimpath)

# Options of cluster-up.
NODES ?= 1
GATES ?= default
# The directory of the cluster. Clusters in different directories can run at the same time.
CLUSTER ?= .cluster
# The directory of the files of a kind cluster.
KIND ?= .cluster-kind
VERSION ?= dev

# Options of the lab's targets: the kernels of `make lab`, that of the others, and
# that of test-lab, which is the oldest.
KERNELS ?= 6.1 6.12 6.12-amd64
KERNEL ?= 6.12
LAB_KERNEL ?= 6.1
PACKAGES ?= netdev netdev/classify
APPEND ?=
ONLY ?=

# Numbers of shares that bench-node measures.
SHARES ?= 10 1000 3000

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
# What `make generate` writes: files, and directories with their sources.
GENERATED = netdev/classify $(wildcard api/*/zz_* api/*/*/zz_*) $(wildcard $(CHART)/templates/*.dra-shared.dev_*.yaml) deployments/image/Dockerfile .github/workflows/ci.yml docs/user/reference
DOCKERFILE := awk -f deployments/image/dockerfile.awk go.mod deployments/image/contents.txt
# Sets the version of Go in the workflow to that of go.mod.
WORKFLOW := sed -i "s/golang:[^ ]*-bookworm/golang:$$(sed -n 's/^toolchain go//p' go.mod)-bookworm/" .github/workflows/ci.yml
GO_FILES := $(shell find . -name '*.go' -not -name '*_test.go' -not -path './.cluster*' -o -name '*.o' -path './netdev/*') go.mod go.sum
LINT := bin/lint
# The checks of test/lint that `make lint` includes, of lint-words, lint-lines, lint-logs, and lint-headers.
LINT_CHECKS := lint-words lint-lines lint-logs lint-headers
# Packages whose tests measure rates and latencies, or end processes under load. They run alone.
MEASURED := /netdev/classify$$|/test/crash$$
# Runs go test without vet, which `make lint` runs: $(GO_TEST) FLAGS -- PACKAGES.
GO_TEST := $(CURDIR)/.ci/gotest.sh

##@ Demos and test clusters

demo: prerequisites cluster-binaries bin/helm $(IMAGES) bin/demo ## let pods share a NIC on a real node, and show the rate that each was granted
	@bin/demo

demo-groups: prerequisites cluster-binaries bin/helm $(IMAGES) ## let a group of pods share one claim, on clusters with and without PodGroups of Kubernetes
	@demo/claim-per-group/demo.sh

demo-jobset: prerequisites cluster-binaries bin/helm $(IMAGES) bin/images/jobset.tar ## let the pods of a Job share two claims, and give each Job of a JobSet its own
	@demo/jobset/demo.sh

demo-kueue: prerequisites cluster-binaries bin/helm $(IMAGES) bin/images/kueue.tar ## give a team a quota of bandwidth with Kueue: a Job waits, another is suspended and resumed, and a third is denied
	@demo/kueue/demo.sh

demo-addresses: prerequisites cluster-binaries bin/helm $(IMAGES) ## give the pods of a Deployment and of a StatefulSet addresses of a pool, and lose a node
	@demo/addresses/demo.sh

kind-demo: prerequisites-kind kind-binaries ## the same demo in a kind cluster; starts a Docker daemon if there is none [NODES=1|2]
	@bin/kind-demo demo --dir $(KIND) --nodes $(NODES)

kind-up: prerequisites-kind kind-binaries ## create a kind cluster with a NIC to share, and install the chart [KIND=directory] [NODES=1|2]
	@bin/kind-demo up --dir $(KIND) --nodes $(NODES)

kind-down: bin/kind-demo ## remove the kind cluster and everything that came with it [KIND=directory]
	@bin/kind-demo down --dir $(KIND)

cluster-up: prerequisites cluster-binaries bin/helm $(IMAGES) ## start a cluster and install the chart [CLUSTER=directory] [NODES=1|2] [GATES=default|all|workload]
	@bin/cluster up --dir $(CLUSTER) --nodes $(NODES) --gates $(GATES) $(addprefix --image ,$(IMAGES))
	@$(MAKE) --no-print-directory install

cluster-down: bin/cluster ## stop the cluster and remove all its files [CLUSTER=directory]
	@bin/cluster down --dir $(CLUSTER)

install: bin/helm ## install or upgrade the chart in the cluster
	@$(CLUSTER)/network bin/helm upgrade dra-shared $(CHART) --install --kubeconfig $(CLUSTER)/kubeconfig \
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

test-build: prerequisites-dhcp cluster-binaries bin/helm bin/gotestsum $(IMAGES) bin/images/crash.tar bin/nettool bin/images/dra-conformance.tar bin/dra-conformance bin/demo bin/e2e.test bin/kind bin/kind-demo bin/jobset bin/dra-shared-controller previous-release ## build what the test suites need, except the checks
	@# Compiling next to the suites that measure would change what they measure, and the longest suite that waits
	@# would start late.
	go test -vet=off -c -o /dev/null ./netdev/classify ./test/crash ./test/controlplane
	(cd test/bench && go test -vet=off -c -o /dev/null . && go build -o /dev/null ./report)

test-unit: ## run the tests of all packages [20 min]
	+@$(MAKE) --no-print-directory test-packages
	$(MAKE) --no-print-directory test-classify
	$(MAKE) --no-print-directory test-rates
	$(MAKE) --no-print-directory test-crash

test-packages: prerequisites-dhcp bin/helm ## run the tests of the packages that do not measure: tables, netlink in namespaces, a fake kubelet
	@(cd conformance && $(GO_TEST) -- ./...) & conformance=$$! # mostly waits, as the slowest packages do
	result=0
	$(GO_TEST) -p 4 -timeout 10m -- $$(go list ./... | grep -vE '$(MEASURED)') || result=$$?
	(cd test/cluster && $(GO_TEST) -- ./...) || result=$$?
	(cd test/bench && $(GO_TEST) -- ./...) || result=$$?
	# The chart is outside the module, so that cached results ignore its changes.
	(cd test/monitoring && $(GO_TEST) -count=1 -- ./...) || result=$$?
	wait $$conformance || result=$$?
	exit $$result

# Tests of netdev/classify that measure rates and latencies. They run alone, one after the other.
RATES := ^Test(Traffic|Queues|FairQueue|Forwarded|RawFrames|Latency|NeighborDiscovery|TCX_limits|BridgeMode_(limits|lends)|Program_costOfCheck|Attack_(multicastFlood|neighborFlood|floodOfShare|broadcastQueue|broadcastCutoff|manySegments))

test-classify: prerequisites-dhcp ## check which frames the BPF programs permit, count, and drop
	@$(GO_TEST) -timeout 15m -run '^TestAttack' -skip '$(RATES)' -- ./netdev/classify & attacks=$$!
	result=0
	$(GO_TEST) -timeout 15m -skip '^TestAttack|$(RATES)' -- ./netdev/classify || result=$$?
	wait $$attacks || result=$$?
	exit $$result

test-rates: prerequisites-dhcp ## measure the rates and latencies of shares with the BPF programs attached
	@$(GO_TEST) -timeout 15m -run '$(RATES)' -- ./netdev/classify

# Tests of test/crash that mostly wait for the kernel run in several processes next to the others, each process in a
# separate network namespace.
EACH     := ^TestPlugin_killedAtEachFailpoint$$
REPEATED := ^TestPlugin_killedRepeatedlyWithManyClaims$$
LEASING  := ^TestPlugin_killedWhileLeasing$$
POOLS    := ^TestPlugin_killedWhileAssigningAddresses$$
RANDOM   := ^TestAddresses_randomFaults$$
PARTS    := '$(LEASING)' '$(POOLS)' '$(RANDOM)' '$(EACH)/^part=0$$' '$(EACH)/^part=[^0]' \
  '$(REPEATED)/^batch=[02468]$$' $(if $(filter-out 1,$(BATCHES)),'$(REPEATED)/^batch=[13579]$$')

test-crash: prerequisites-dhcp ## end the plugin at each failpoint, and run it under load [BATCHES=1 of ten claims, up to 10]
	@export CRASH_BATCHES=$(or $(BATCHES),1)
	processes=
	for part in $(PARTS); do $(GO_TEST) -timeout 25m -run "$$part" -- ./test/crash & processes="$$processes $$!"; done
	result=0
	$(GO_TEST) -timeout 25m -skip '$(EACH)|$(REPEATED)|$(LEASING)|$(POOLS)|$(RANDOM)' -- ./test/crash || result=$$?
	for process in $$processes; do wait $$process || result=$$?; done
	exit $$result

test-addresses: prerequisites-dhcp ## attach pods with addresses of a pool under random faults on three nodes, and write docs/dev/scale-addresses.md [ATTACHES=10000] [SEED=n] [10 min]
	@test/crash/addresses.sh $(or $(ATTACHES),10000) $(SEED)

test-fuzz: ## run each fuzz target for 30,000 inputs [1 min]
	@.ci/fuzz.sh 30000

# The packages of test-race, without those that load BPF programs, and without internal/capability: the race detector
# needs cgo, with which Go cannot drop a capability of all threads.
RACE := ./driver/... ./controlplane/... ./attach/... ./cdi/... ./internal/... ./device/...

test-race: prerequisites-dhcp ## run the tests of the plugin and the controller with the race detector [13 min]
	@CGO_ENABLED=1 $(GO_TEST) -race -timeout 20m -- $$(go list $(RACE) | grep -v '/internal/capability$$')

test-controlplane: prerequisites cluster-binaries bin/helm bin/jobset $(IMAGES) bin/dra-shared-controller ## test the controller on a real control plane with simulated nodes [RUN=regexp] [GATES=default|all|workload] [13 min]
	@CONTROLPLANE=1 $(if $(filter-out default,$(GATES)),CONTROLPLANE_GATES=$(GATES) )$(GO_TEST) -count=1 -timeout 25m $(if $(RUN),-v -run '$(RUN)',) -- ./test/controlplane

test-jobset: prerequisites cluster-binaries bin/helm bin/jobset $(IMAGES) bin/dra-shared-controller ## test claims of Jobs with the real JobSet controller, in both modes [RUN=regexp] [10 min]
	@for gates in default all; do
	  CONTROLPLANE=1 CONTROLPLANE_OTHER=jobset CONTROLPLANE_GATES=$$gates $(GO_TEST) -count=1 -timeout 30m -v -run '$(or $(RUN),TestJobSet|TestJobClaims|TestListedClaims)' -- ./test/controlplane
	done

test-lws: prerequisites cluster-binaries bin/helm bin/lws $(IMAGES) bin/dra-shared-controller ## test claims of replicas with the real controller of LeaderWorkerSets, and crashes during releases, in both modes [RUN=regexp] [8 min]
	@for gates in default all; do
	  CONTROLPLANE=1 CONTROLPLANE_OTHER=lws CONTROLPLANE_GATES=$$gates $(GO_TEST) -count=1 -timeout 20m -v -run '$(or $(RUN),TestLWS|TestReplicas|TestRelease_controllerKilled)' -- ./test/controlplane
	done

test-kueue: prerequisites cluster-binaries bin/helm bin/kueue bin/jobset $(IMAGES) bin/dra-shared-controller ## test claims and gates with the real Kueue, in both modes [RUN=regexp] [5 min]
	@for gates in default all; do
	  CONTROLPLANE=1 CONTROLPLANE_OTHER=kueue CONTROLPLANE_GATES=$$gates $(GO_TEST) -count=1 -timeout 20m -v -run '$(or $(RUN),TestKueue)' -- ./test/controlplane
	done

test-matrix: prerequisites bin/cluster bin/helm bin/jobset $(IMAGES) bin/dra-shared-controller ## run test-controlplane on each supported version of Kubernetes, and write docs/dev/matrix.md [VERSIONS="v1.36.3 v1.37.1/workload ..."] [10 min to build each version]
	@test/controlplane/matrix.sh $(VERSIONS)

test-kind: prerequisites-kind kind-binaries ## run the demo and the tests of two nodes in a kind cluster; starts a Docker daemon if there is none [2 min]
	@TEST_KIND=1 $(GO_TEST) -count=1 -timeout 15m -- ./test/kind/...

e2e: prerequisites-dhcp cluster-binaries bin/helm $(IMAGES) bin/images/crash.tar bin/nettool bin/images/dra-conformance.tar bin/dra-conformance bin/e2e.test previous-release ## run the stories of test/e2e on real clusters, except the long ones [RUN=name] [20 min]
	@test/e2e/run.sh $(if $(RUN),'$(RUN)',)

e2e-long: prerequisites-dhcp cluster-binaries bin/helm $(IMAGES) bin/images/crash.tar bin/nettool bin/e2e.test ## run the long stories of test/e2e, and write docs/dev/long-stories.md [10 min]
	@test/e2e/run.sh --long

test-privileges: prerequisites-dhcp cluster-binaries bin/helm $(IMAGES) bin/nettool bin/e2e.test ## check that the plugin needs each of its privileges, and write docs/dev/privileges.md [10 min]
	@test/e2e/privileges.sh

lab: lab-build ## run the tests of netdev and stories on each kernel in virtual machines, and write docs/dev/matrix.md [KERNELS="6.1 6.12 ..."] [APPEND=argument of the kernels] [ONLY=kernel|node] [10 min each]
	@bin/lab pass --matrix docs/dev/matrix.md $(if $(APPEND),--append '$(APPEND)') $(if $(ONLY),--only $(ONLY)) $(KERNELS)

lab-test: prerequisites-lab bin/lab ## run the tests of packages in a guest [KERNEL=6.12] [PACKAGES="netdev ..."] [APPEND=argument] [RUN=regexp]
	@bin/lab test --kernel $(KERNEL) $(if $(APPEND),--append '$(APPEND)') $(PACKAGES) -- -test.v $(if $(RUN),-test.run '$(RUN)')

lab-up: lab-build ## start a cluster whose node is a virtual machine, until an interrupt [KERNEL=6.12] [APPEND=argument] [CLUSTER=directory]
	@bin/lab up --kernel $(KERNEL) --dir $(CLUSTER) $(if $(APPEND),--append '$(APPEND)')

lab-stories: lab-build ## run stories on a cluster whose node is a virtual machine [KERNEL=6.12] [APPEND=argument] [RUN=regexp]
	@bin/lab stories --kernel $(KERNEL) $(if $(APPEND),--append '$(APPEND)') $(if $(RUN),--run '$(RUN)')

test-lab: lab-build ## run a quick pass of the lab on one kernel [LAB_KERNEL=6.1] [10 min]
	@bin/lab pass --quick $(LAB_KERNEL)

lab-build: prerequisites-lab cluster-binaries bin/helm bin/lab bin/e2e.test bin/nettool $(IMAGES) ## build what the lab needs

test-runtimes: prerequisites-dhcp cluster-binaries bin/helm $(IMAGES) bin/nettool bin/images/dra-conformance.tar bin/dra-conformance bin/e2e.test ## run the stories of a node with each container runtime, and write docs/dev/matrix.md [RUN=regexp] [RUNTIMES="cri-o/crun ..."] [7 min each]
	@test/env/prerequisites.sh runtimes
	test/e2e/runtimes.sh '$(or $(RUN),.*)' $(RUNTIMES)

test-kubelets: prerequisites-dhcp cluster-binaries bin/helm $(IMAGES) bin/nettool bin/images/dra-conformance.tar bin/dra-conformance bin/e2e.test ## run the stories of a node with the kubelets of each supported version, and write docs/dev/matrix.md [RUN=regexp] [KUBELETS="v1.36.3/v1.37.1 ..."] [7 min each, 10 min to build each version]
	@test/e2e/kubelets.sh '$(or $(RUN),.*)' $(KUBELETS)

bench: prerequisites bin/cni ## compare pods' starts, ends, and limits with CNI plugins and with the kernel alone, and write docs/dev/performance.md [PODS=200] [RUNS=3] [15 min]
	@test/bench/bench.sh $(or $(PODS),200) $(or $(RUNS),3)

bench-check: prerequisites ## compare the times of a pod's start and end with the committed results of make bench, within a wide bound [20 s]
	@results=$$(go test -vet=off -run '^$$' -bench 'BenchmarkPlugin/shares=10$$/parallel=1$$' -benchtime 50x -count 3 ./test/crash &&
	  cd test/bench && go test -vet=off -run '^$$' -bench 'BenchmarkKernel/shares=10$$/parallel=1$$' -benchtime 50x -count 3 .) \
	  || { echo "$$results"; exit 1; }
	cd test/bench && go run ./report check ../../docs/dev/performance/bench.txt <<<"$$results"

bench-addresses: prerequisites cluster-binaries bin/cni bin/cni/whereabouts ## compare attaching with an address of a pool, with a static one, and with host-local and whereabouts, and write its section of docs/dev/scale-addresses.md [8 min]
	@test/bench/addresses.sh

# CNI plugins for make bench.
bin/cni: test/bench/go.mod
	@mkdir -p $@
	cd test/bench && CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o ../../$@/ tool && touch ../../$@

# whereabouts, with the manifests of its module in bin/whereabouts-config. It is built in a copy of its module, because
# its go.mod replaces a dependency, which `go install` refuses.
bin/cni/whereabouts: test/whereabouts/version | bin/cni
	@echo "build: whereabouts"
	rm -rf bin/whereabouts-src bin/whereabouts-config
	cp -r "$$(go mod download -json github.com/k8snetworkplumbingwg/whereabouts@$$(cat test/whereabouts/version) | sed -n 's/.*"Dir": "\(.*\)",/\1/p')" bin/whereabouts-src
	chmod -R u+w bin/whereabouts-src
	(cd bin/whereabouts-src && $(STATIC) -o ../cni/whereabouts ./cmd)
	mkdir bin/whereabouts-config
	cp bin/whereabouts-src/doc/crds/{whereabouts.cni.cncf.io_*,daemonset-install}.yaml bin/whereabouts-config
	rm -rf bin/whereabouts-src

bench-node: prerequisites ## measure attaching, reading, and comparing up to 3,000 shares, and a plugin with them, and write docs/dev/scale-node.md [SHARES="10 1000 3000"] [10 min]
	@test/scale/bench.sh $(SHARES)

profiles: prerequisites ## profile a plugin with 3,000 shares, and write docs/dev/profiles [4 min]
	@test/scale/profiles.sh $(lastword $(SHARES))

bench-controlplane: prerequisites cluster-binaries bin/helm $(IMAGES) bin/dra-shared-controller ## measure writes per pod, time to reservation, and memory for 10,000 pods in both modes, and write docs/dev/scale.md [15 min]
	@test/controlplane/bench.sh

bench-memory: prerequisites cluster-binaries bin/helm $(IMAGES) bin/dra-shared-controller ## measure the controller's memory with 150,000 claims of other drivers, and write that section of docs/dev/scale.md [CLAIMS=150000] [5 min]
	@CONTROLPLANE_CLAIMS=$(CLAIMS) test/controlplane/memory.sh

##@ Checks

lint: bin/golangci-lint $(LINT_CHECKS) ## check style, and which package imports which [1 min]
	@bin/golangci-lint run ./...
	(cd test/cluster && ../../bin/golangci-lint run --config ../../.golangci.yml ./...)
	(cd conformance && ../bin/golangci-lint run --config ../.golangci.yml ./...)
	(cd test/bench && ../../bin/golangci-lint run --config ../../.golangci.yml ./...)
	(cd test/monitoring && ../../bin/golangci-lint run --config ../../.golangci.yml ./...)

lint-words: $(LINT) ## reject wordings that read like a translation [ARGS=--count]
	@$(LINT) words $(ARGS)

lint-lines: $(LINT) ## reject lines of more than 120 columns in Go files, prose, and comments [ARGS=--count]
	@$(LINT) lines $(ARGS)

lint-logs: $(LINT) ## reject log messages that are not constant, and keys that are not in test/lint/logkeys.go [ARGS=--count]
	@$(LINT) logs $(ARGS)

lint-headers: $(LINT) ## reject source files without a license header [ARGS=--count]
	@$(LINT) headers $(ARGS)

fix-headers: $(LINT) ## insert missing license headers
	@$(LINT) headers --fix

generate: prerequisites-clang bin/controller-gen ## generate BPF objects, deepcopy functions, the CRD, the Dockerfile, the version of Go in ci.yml, and docs/user/reference from their sources
	@go generate ./netdev/...
	bin/controller-gen object:headerFile=test/lint/header.go.txt crd paths=./api/... output:crd:dir=$(CHART)/templates
	$(DOCKERFILE) >deployments/image/Dockerfile
	$(WORKFLOW)
	go run ./docs/generate

generate-check: bin/controller-gen | prerequisites-clang ## check that no generated file differs from what its sources generate
	@copy=$$(mktemp -d); trap "rm -rf $$copy" EXIT
	git ls-files --cached --others --exclude-standard | tar -cf - --ignore-failed-read -T - 2>/dev/null | tar -xf - -C $$copy
	ln -s $(CURDIR)/bin $$copy/bin
	$(MAKE) --no-print-directory -C $$copy generate
	differs=
	for path in $(GENERATED); do diff -r $$path $$copy/$$path || differs="$$differs $$path"; done
	[ -z "$$differs" ] || { echo "generate-check: differs from its source, run make generate:$$differs"; exit 1; }

chart-check: bin/helm ## lint the chart, test which values it accepts and what it renders, and compare the plugin's role
	@bin/helm lint --quiet $(CHART) --values test/env/values.yaml
	sh reports/drivers/dra-driver-shared/rbac.sh | diff reports/drivers/dra-driver-shared/rbac.yaml - \
	  || { echo "chart: the plugin's role differs from the one that the conformance suite tests: write rbac.yaml with rbac.sh"; exit 1; }
	$(GO_TEST) -- ./test/chart

##@ Build

build: bin/dra-shared-plugin bin/dra-shared-hook bin/dra-shared-probe bin/dra-shared-controller ## build the static binaries of the image

image: bin/images/dra-driver-shared.tar ## build the image for this machine as a docker archive, without a container engine

image-archives: $(ARCHES:%=bin/images/dra-driver-shared-%.tar) ## build the image for amd64 and arm64 as docker archives

chart-package: bin/helm ## package the chart in bin/release
	@bin/helm package $(CHART) --destination bin/release

image-docker: ## build the image from source with Docker [ARCH=arm64] [BUILDER=image] [DOCKER_FLAGS=...]
	@mkdir -p bin/images
	DOCKER_BUILDKIT=1 $(DOCKER) build --platform linux/$(ARCH) $(if $(BUILDER),--build-arg BUILDER=$(BUILDER)) $(DOCKER_FLAGS) \
	  --file deployments/image/Dockerfile --tag dra-driver-shared:$(VERSION)-$(ARCH) .
	$(DOCKER) save --output bin/images/docker-$(ARCH).tar dra-driver-shared:$(VERSION)-$(ARCH)

dockerfile-check: image-docker bin/cluster bin/images/dra-driver-shared-$(ARCH).tar ## check that Docker builds the same files as image-archives [same options]
	@bin/cluster compare bin/images/dra-driver-shared-$(ARCH).tar bin/images/docker-$(ARCH).tar
	echo "dockerfile-check: the images for $(ARCH) are the same"

bin/dra-conformance: conformance/requirements.yaml conformance/report.schema.json

bin/%: $(GO_FILES)
	@mkdir -p bin
	case $* in
	dra-conformance) cd conformance && $(STATIC) -o ../$@ ./cmd/dra-conformance ;;
	dra-*) $(STATIC) -o $@ ./cmd/$* ;;
	demo) $(STATIC) -o $@ ./demo ;;
	kind-demo) $(STATIC) -o $@ ./demo/kind ;;
	*) $(STATIC) -o $@ ./test/$* ;;
	esac

bin/golangci-lint:
	@mkdir -p bin
	echo "build: golangci-lint"
	GOBIN=$(CURDIR)/bin go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

bin/gotestsum:
	@mkdir -p bin
	echo "build: gotestsum"
	GOBIN=$(CURDIR)/bin go install gotest.tools/gotestsum@v1.13.0

bin/kind:
	@mkdir -p bin
	echo "build: kind"
	GOBIN=$(CURDIR)/bin go install sigs.k8s.io/kind@v0.33.0

bin/controller-gen:
	@mkdir -p bin
	echo "build: controller-gen"
	GOBIN=$(CURDIR)/bin go install sigs.k8s.io/controller-tools/cmd/controller-gen@v0.23.0

bin/cluster: $(wildcard test/cluster/*.go test/cluster/*/*.go test/cluster/kindnode/files/* test/cluster/go.*)
	@mkdir -p bin
	cd test/cluster && $(STATIC) -o ../../bin/cluster .

# The JobSet controller, with the manifests of its module in bin/jobset-config.
bin/jobset: test/jobset/go.mod
	@mkdir -p bin
	echo "build: JobSet"
	rm -rf bin/jobset-config
	(cd test/jobset && $(STATIC) -o ../../$@ sigs.k8s.io/jobset)
	cp -r "$$(cd test/jobset && go list -m -f '{{.Dir}}' sigs.k8s.io/jobset)/config" bin/jobset-config
	chmod -R u+w bin/jobset-config

# The controller of LeaderWorkerSets, with the manifests of its module in bin/lws-config.
bin/lws: test/lws/go.mod
	@mkdir -p bin
	echo "build: LeaderWorkerSet"
	rm -rf bin/lws-config
	(cd test/lws && $(STATIC) -o ../../$@ sigs.k8s.io/lws/cmd)
	cp -r "$$(cd test/lws && go list -m -f '{{.Dir}}' sigs.k8s.io/lws)/config" bin/lws-config
	chmod -R u+w bin/lws-config

# Kueue, with the manifests of its module in bin/kueue-config. It is built in a copy of its
# module: as a dependency, its versions would conflict with sums that the checksum database lacks.
bin/kueue: test/kueue/version
	@mkdir -p bin
	echo "build: Kueue"
	rm -rf bin/kueue-src bin/kueue-config
	cp -r "$$(go mod download -json sigs.k8s.io/kueue@$$(cat test/kueue/version) | sed -n 's/.*"Dir": "\(.*\)",/\1/p')" bin/kueue-src
	chmod -R u+w bin/kueue-src
	(cd bin/kueue-src && $(STATIC) -o ../kueue ./cmd/kueue)
	cp -r bin/kueue-src/config bin/kueue-config
	rm -rf bin/kueue-src

bin/helm: test/helm/main.go test/helm/go.mod
	@mkdir -p bin
	echo "build: Helm"
	cd test/helm && $(STATIC) -o ../../bin/helm .

bin/e2e.test: $(GO_FILES) $(wildcard test/e2e/*.go)
	@mkdir -p bin
	go test -c -o $@ ./test/e2e

bin/images/dra-driver-shared.tar: bin/cluster bin/dra-shared-plugin bin/dra-shared-hook bin/dra-shared-probe bin/dra-shared-controller deployments/image/contents.txt
	@bin/cluster image --contents deployments/image/contents.txt --tag registry.local/dra-driver-shared:$(VERSION) --out $@

# The binaries and the image for each architecture. The content list names bin/; its copy names bin/ARCH/.
define arch-rules
bin/$(1)/dra-%: $(GO_FILES)
	@mkdir -p bin/$(1)
	GOOS=linux GOARCH=$(1) $(STATIC) -o $$@ ./cmd/dra-$$*

bin/images/dra-driver-shared-$(1).tar: bin/cluster bin/$(1)/dra-shared-plugin bin/$(1)/dra-shared-hook bin/$(1)/dra-shared-probe bin/$(1)/dra-shared-controller deployments/image/contents.txt
	@sed 's,^bin/,bin/$(1)/,' deployments/image/contents.txt >bin/$(1)/contents.txt
	bin/cluster image --contents bin/$(1)/contents.txt --tag registry.local/dra-driver-shared:$(VERSION)-$(1) --arch $(1) --out $$@
endef
$(foreach arch,$(ARCHES),$(eval $(call arch-rules,$(arch))))

# The plugin of the crash tests, which exits at the failpoint that the test names.
bin/crash/dra-shared-plugin: $(GO_FILES)
	@mkdir -p bin/crash
	$(STATIC) -tags crash -o $@ ./cmd/dra-shared-plugin

bin/images/crash.tar: bin/cluster bin/crash/dra-shared-plugin bin/dra-shared-hook bin/dra-shared-probe bin/dra-shared-controller deployments/image/contents.txt
	@sed 's,bin/dra-shared-plugin,bin/crash/dra-shared-plugin,' deployments/image/contents.txt >bin/crash/contents.txt
	bin/cluster image --contents bin/crash/contents.txt --tag registry.local/dra-driver-shared:crash --out $@

bin/images/nettool.tar: bin/cluster bin/nettool test/nettool/image.txt
	@bin/cluster image --contents test/nettool/image.txt --tag registry.local/nettool:dev --out $@

bin/images/jobset.tar: bin/cluster bin/jobset test/jobset/image.txt
	@bin/cluster image --contents test/jobset/image.txt --tag registry.local/jobset:dev --out $@

bin/images/kueue.tar: bin/cluster bin/kueue test/kueue/image.txt
	@bin/cluster image --contents test/kueue/image.txt --tag registry.local/kueue:dev --out $@

# A shallow clone lacks the commit; the test says so when it skips itself.
previous-release: bin/cluster ## build the image of the previous release, from which test/e2e upgrades; later runs use a cache
	@test/e2e/previous.sh >/dev/null || [ $$? -eq 3 ]

cluster-binaries: bin/cluster | prerequisites ## build Kubernetes, containerd, and runc for the test cluster; later runs use a cache
	@bin/cluster build

kind-binaries: bin/kind bin/kind-demo bin/demo bin/cluster bin/helm $(IMAGES) ## build kind, the demo, and the images for a kind cluster

prerequisites-kind: ## check for what a kind cluster needs; install it where apt-get exists
	@test/env/prerequisites.sh kind

prerequisites-clang: | prerequisites ## check also for what compiles BPF programs
	@test/env/prerequisites.sh clang

prerequisites-dhcp: | prerequisites ## check also for the DHCP server that tests run
	@test/env/prerequisites.sh dhcp

prerequisites-lab: | prerequisites ## check also for what boots kernels in virtual machines
	@test/env/prerequisites.sh lab

prerequisites: ## check for the programs that the tests need; install them where apt-get exists
	@test/env/prerequisites.sh

##@ Conformance

.PHONY: conformance-peers conformance-peers-cluster conformance-report-cluster conformance-report conformance-image conformance-mutants

conformance-mutants: ## run all cases against the reference driver with each fault, and write conformance/mutants.md [FAULTS=PREP-01,PREP-03/spec] [15 min]
	@cd conformance && go test -run TestMutants -full -update $(if $(FAULTS),-faults '$(FAULTS)') -timeout 80m -parallel 6 .

PEERS := dra-example-driver dranet dra-driver-cpu

bin/peers/nri-runtime: $(wildcard reports/drivers/nri-runtime/*)
	@mkdir -p bin/peers
	cd reports/drivers/nri-runtime && $(STATIC) -o ../../../$@ .

bin/peers/%: reports/drivers/%/go.mod
	@mkdir -p bin/peers
	cd reports/drivers/$* && $(STATIC) -o ../../../$@ "$$(go list tool)"

conformance-peers: bin/dra-conformance bin/peers/nri-runtime $(PEERS:%=bin/peers/%) ## test releases of other DRA drivers, and write their reports [5 min each, 10 min to build]
	@for d in $(PEERS); do
	  v=$$(sed -n 's/^  version: //p' reports/drivers/$$d/conformance.yaml)
	  mkdir -p reports/1.37/$$d
	  sh reports/drivers/run.sh $$d --report reports/1.37/$$d/$$v.yaml | grep -aE '^(FAIL|warn|[0-9]+ passed)' || :
	done
	(cd conformance && go test -run TestCompare . -update)

conformance-peers-cluster: bin/helm cluster-binaries bin/dra-conformance bin/images/dra-conformance.tar $(PEERS:%=bin/peers/%) ## test the same releases on a cluster, and write their reports [CLUSTER=directory] [5 min each]
	@bin/cluster up --dir $(CLUSTER) --nodes 1 --gates default
	trap 'bin/cluster down --dir $(CLUSTER)' EXIT
	for d in $(PEERS); do
	  v=$$(sed -n 's/^  version: //p' reports/drivers/$$d/cluster.yaml)
	  sh reports/drivers/cluster.sh $$d $(CLUSTER) --report reports/1.37/$$d/$$v-cluster.yaml | grep -aE '^(FAIL|warn|[0-9]+ passed)' || :
	done
	(cd conformance && go test -run TestCompare . -update)

conformance-report: ## test the plugin, and write its report [2 min]
	@mkdir -p reports/1.37/dra-driver-shared
	CONFORMANCE_REPORT=$(CURDIR)/reports/1.37/dra-driver-shared/v0.0.0.yaml CONFORMANCE_VERSION=v0.0.0 go test -count 1 ./driver -run TestConformance
	(cd conformance && go test -run TestCompare . -update)

conformance-report-cluster: bin/dra-conformance bin/images/dra-conformance.tar ## test the plugin on the cluster of make cluster-up, and write its report [CLUSTER=directory] [4 min]
	@bin/cluster load --dir $(CLUSTER) bin/images/dra-conformance.tar
	$(CLUSTER)/kubectl label namespace default --overwrite resource.kubernetes.io/admin-access=true
	$(CLUSTER)/node n1 sh -c 'cd "$$1" && shift && exec bin/dra-conformance run "$$@"' sh $(CURDIR) \
	  --config reports/drivers/dra-driver-shared/cluster.yaml \
	  --kubeconfig $(abspath $(CLUSTER))/kubeconfig --report $(CURDIR)/reports/1.37/dra-driver-shared/v0.0.0-cluster.yaml \
	  | grep -aE '^(FAIL|warn|[0-9]+ passed)' || result=$$?
	(cd conformance && go test -run TestCompare . -update)
	exit $${result:-0}

conformance-image: bin/images/dra-conformance.tar ## build the image of the conformance suite as a docker archive, without a container engine

bin/images/dra-conformance.tar: bin/cluster bin/dra-conformance conformance/image.txt
	@bin/cluster image --contents conformance/image.txt --tag registry.local/dra-conformance:$(VERSION) --out $@

##@ About

help: ## print this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-zA-Z0-9_-]+:.*## / {printf "  %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: kind-demo kind-up kind-down kind-binaries prerequisites-kind test-kind demo demo-groups demo-jobset demo-kueue demo-addresses cluster-up cluster-down install reload test test-build test-unit test-packages test-classify test-rates test-crash \
  test-addresses test-fuzz test-race test-controlplane test-jobset test-lws test-kueue test-matrix lab lab-test lab-up lab-stories test-lab lab-build e2e e2e-long test-privileges test-runtimes test-kubelets bench bench-check bench-node profiles bench-controlplane bench-memory bench-addresses lint lint-words lint-lines lint-logs lint-headers fix-headers \
  generate generate-check chart-check chart-package build image image-archives image-docker dockerfile-check previous-release cluster-binaries \
  prerequisites prerequisites-clang prerequisites-dhcp prerequisites-lab help
