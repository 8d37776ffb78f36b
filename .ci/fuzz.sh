#!/usr/bin/env bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs each fuzz target of the main module for a number of inputs. The targets of
# a package are built once. Coverage of the libraries guides the inputs, too, such as that of the
# JSON decoder. Those of controlplane use libraries that take minutes to compile with counters, and
# decode nothing with them: there, only the packages of this module have counters.
#
# usage: fuzz.sh INPUTS
set -euo pipefail
cd "$(dirname "$0")/.."
inputs=$1
root=$PWD
mkdir -p bin/fuzz
for dir in $(git grep -l '^func Fuzz' -- '*_test.go' | xargs -n 1 dirname | sort -u); do
	binary=$root/bin/fuzz/${dir//\//-}.test
	counters=(-fuzz .)
	[[ $dir != controlplane/* ]] || counters=("-gcflags=$(go list -m)/...=-d=libfuzzer")
	go test -vet=off -c "${counters[@]}" -o "$binary" "./$dir"
	# shellcheck disable=SC2013 # a target is one word
	for target in $(grep -ho '^func Fuzz[A-Za-z0-9_]*' "$dir"/*_test.go | sed 's/^func //'); do
		echo "fuzz: $dir $target"
		cache=$(go env GOCACHE)/fuzz/$(go list "./$dir")
		(cd "$dir" && "$binary" -test.run '^$' -test.fuzz "^$target\$" -test.fuzztime "${inputs}x" \
			-test.fuzzcachedir "$cache") >bin/fuzz/log 2>&1 || { cat bin/fuzz/log; exit 1; }
	done
done
