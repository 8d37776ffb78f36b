// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"testing"

	"github.com/dra-shared/dra-driver-shared/test/lab/node"
)

func TestSELinux(t *testing.T) {
	for _, c := range []struct {
		arguments []string
		want      bool
	}{
		{[]string{"lockdown=confidentiality", "security=selinux"}, true},
		{[]string{"security=selinux enforcing=1"}, true}, // one value of --append can have several arguments
		{[]string{"security=apparmor", "enforcing=1"}, false},
		{nil, false},
	} {
		if got := node.SELinux(c.arguments); got != c.want {
			t.Errorf("SELinux(%q): got %t, want %t", c.arguments, got, c.want)
		}
	}
}
