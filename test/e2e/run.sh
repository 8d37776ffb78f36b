#!/bin/bash
# Tells the stories on two clusters at a time: most of what they do is wait. Those
# of the first half take as long as all others together.
#
# run.sh [REGEXP]: only those whose names match, one after the other.
set -uo pipefail
cd "$(dirname "$0")/../.."
export E2E=1
stories() { go test -v -count=1 -parallel 1 -timeout 30m ./test/e2e "$@"; }
if [ $# -gt 0 ]; then
	stories -run "/$1"
	exit
fi
first='^(TestOneNode|TestModes|TestNoConsumableCapacity|TestAccelerators)$'
others=$(mktemp)
set -m # a job has its own process group, which a signal can be sent to
stories -skip "$first" >"$others" 2>&1 &
trap 'rm -f "$others"' EXIT
trap 'kill -INT -- -$!; wait; exit 130' INT TERM
stories -run "$first"
one=$?
wait $!
rest=$?
cat "$others"
[ $one -eq 0 ] && [ $rest -eq 0 ]
