#!/bin/sh
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Replaces a section of a Markdown file by the text of standard input, whose first line is
# the section's heading (## ...). A section that does not exist is added before that
# about Linux kernels, which ends the file.
#
# usage: section.sh FILE <TEXT
set -eu
awk '
	BEGIN { getline heading < "/dev/stdin"; text = heading "\n"
		while ((getline line < "/dev/stdin") > 0) text = text line "\n" }
	/^## / { skip = ($0 == heading)
		if (skip || (!done && $0 == "## Linux kernels")) { if (!done) printf "%s\n", text; done = 1 } }
	!skip { print; blank = ($0 == "") }
	END { if (!done) printf "%s%s", blank ? "" : "\n", text }
' "$1" | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}' >"$1.new"
mv "$1.new" "$1"
