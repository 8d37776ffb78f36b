#!/bin/bash
# Runs the stories on two clusters at a time, because they mostly wait. The tests
# in `first` take as long as all others together. bin/e2e.test must exist.
#
# usage: run.sh [REGEXP]: with REGEXP, only the stories whose names match, one
# after the other.
set -uo pipefail
cd "$(dirname "$0")/../.."
export E2E=1
stories() { (cd test/e2e && exec ../../bin/e2e.test -test.v -test.parallel 1 -test.timeout 30m "$@"); }
if [ $# -gt 0 ]; then
	stories -test.run "/$1"
	exit
fi
first='^(TestOneNode|TestModes|TestNoConsumableCapacity|TestAccelerators)$'
others=$(mktemp)
set -m # gives the background job a process group of its own, which can be signaled
stories -test.skip "$first" >"$others" 2>&1 &
trap 'rm -f "$others"' EXIT
trap 'kill -INT -- -$!; wait; exit 130' INT TERM
stories -test.run "$first"
one=$?
wait $!
rest=$?
cat "$others"
[ $one -eq 0 ] && [ $rest -eq 0 ]
