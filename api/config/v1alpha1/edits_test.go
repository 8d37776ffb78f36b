// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestEdits_Expand(t *testing.T) {
	e := Edits{
		Environment: map[string]string{"A": "0=${memory.Mi}M $${x}"},
		DeviceNodes: []string{"/dev/${device}"},
		Mounts:      []Mount{{HostPath: "/run/${share}", ContainerPath: "/c", Writable: true}},
	}
	got, err := e.Expand(map[string]string{"memory.Mi": "512", "device": "d", "share": "s"})
	want := Edits{
		Environment: map[string]string{"A": "0=512M ${x}"},
		DeviceNodes: []string{"/dev/d"},
		Mounts:      []Mount{{HostPath: "/run/s", ContainerPath: "/c", Writable: true}},
	}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("error %v (-want +got):\n%s", err, diff)
	}
	_, err = e.Expand(map[string]string{"memory.Mi": "512", "share": "s"})
	if err == nil || !strings.Contains(err.Error(), "device") {
		t.Errorf("variable without a value: %v", err)
	}
}
