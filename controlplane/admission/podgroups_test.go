// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"strings"
	"testing"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

func TestPodGroups_validate(t *testing.T) {
	const job = "batch/jobs/train"
	for _, tc := range []struct {
		name              string
		mode              mode.Mode
		release, workload string
		want              string
	}{
		{"no annotations", mode.Native, "", "", ""},
		{"on deletion", mode.Native, "OnDeletion", "", ""},
		{"on completion", mode.Bridge, "OnCompletion", job, ""},
		{"after a time", mode.Bridge, "Unused=1h", "", ""},
		{"after a time or when suspended", mode.Bridge, "Unused=1h,OnSuspension", job, ""},
		{"unknown element", mode.Bridge, "Always", "",
			`metadata.annotations[scheduling.dra-shared.dev/release]: Invalid value: "Always": "Always" is unknown`},
		{"on completion in native mode", mode.Native, "OnCompletion", job,
			"in native mode, Kubernetes reserves the claims for its own PodGroup"},
		{"after a time in native mode", mode.Native, "Unused=1h", "",
			"in native mode, Kubernetes reserves the claims for its own PodGroup"},
		{"no workload", mode.Bridge, "OnSuspension", "",
			"metadata.annotations[scheduling.dra-shared.dev/workload]: Required value: OnSuspension needs the object"},
		{"invalid workload", mode.Bridge, "OnSuspension", "jobs/train",
			"metadata.annotations[scheduling.dra-shared.dev/workload]: Invalid value"},
		{"workload without effect", mode.Bridge, "Unused=1h", job, "has an effect only with OnCompletion or OnSuspension"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			annotations := map[string]string{}
			if tc.release != "" {
				annotations[scheduling.ReleaseAnnotation] = tc.release
			}
			if tc.workload != "" {
				annotations[scheduling.WorkloadAnnotation] = tc.workload
			}
			err := (&PodGroups{Mode: tc.mode}).validate(annotations).ToAggregate()
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got error %v, want %q", err, tc.want)
			}
		})
	}
}
