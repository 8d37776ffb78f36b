# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Prints the tests that were skipped, each with its reason after a tab, from the output of `go test -v` and from the
# summaries of gotestsum. A test that skips itself gives the reason in its last message. In the output of
# `go test -v`, the messages come after a line with the name of the test, and the line SKIP of a subtest comes after the
# end of its parent. In a summary of gotestsum, they come after the line SKIP.
function skip(test) {
	if (!(test in skipped)) order[++n] = test
	skipped[test]
}

FNR == 1 { current = "" }
{ sub(/\r$/, "") }
/^=== SKIP: / {
	current = $3 " " $4
	skip(current)
	next
}
/^=== / {
	current = $2 ~ /^(RUN|NAME|CONT|PAUSE)$/ ? $3 : ""
	next
}
/^ *--- SKIP: / { skip($3) }
/^ +[A-Za-z0-9_]+\.go:[0-9]+: / && current != "" {
	sub(/^ +[A-Za-z0-9_]+\.go:[0-9]+: /, "")
	if ($0 !~ /^#/) reason[current] = $0 # not the heading of a part of a story
}
END {
	for (i = 1; i <= n; i++) print order[i] "\t" (order[i] in reason ? reason[order[i]] : "no reason")
}
