# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Prints the Dockerfile of the image for the toolchain line of go.mod and a content list:
# awk -f dockerfile.awk go.mod contents.txt
FILENAME ~ /go\.mod$/ {
	if ($1 == "toolchain") go = substr($2, 3)
	next
}
FNR == 1 {
	print "# Code generated from go.mod and contents.txt by make generate. DO NOT EDIT."
	print "#"
	print "# Builds the image from source, the BPF programs included. The build stage runs on the"
	print "# architecture of the machine and cross-compiles for the image's. BuildKit is required,"
	print "# and the root of the repository is the context:"
	print "#   docker build --file deployments/image/Dockerfile --platform linux/arm64 ."
	print "#"
	print "# BUILDER is an image with Go. Other packages that the build needs are installed if they"
	print "# are missing; a builder image that has them needs no package manager."
	print "ARG BUILDER=golang:" go "-bookworm"
	print "FROM --platform=$BUILDPLATFORM ${BUILDER} AS build"
	print "RUN command -v make && command -v clang && command -v llvm-strip && test -e /usr/include/bpf/bpf_helpers.h || \\"
	print "    { apt-get update && apt-get install --yes --no-install-recommends make clang llvm libbpf-dev; }"
	print "WORKDIR /src"
	print "COPY . ."
	print "ARG TARGETARCH"
	print "RUN --mount=type=cache,target=/root/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \\"
	print "    export GOMODCACHE=/root/go/pkg/mod GOCACHE=/root/.cache/go-build && \\"
	print "    go generate ./netdev/... && GOOS=linux GOARCH=$TARGETARCH make build"
	print ""
	print "FROM scratch"
}
{ sub(/#.*/, "") }
NF == 2 {
	print "COPY --from=build /src/" $1 " " $2
	if (!entry) entry = $2
}
END {
	print "ENV PATH=/bin"
	print "ENTRYPOINT [\"" entry "\"]"
}
