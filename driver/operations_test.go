// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// operations counts operations that change state outside the process, such as writes of files.
type operations struct {
	mu     sync.Mutex
	counts map[string]int
}

func (o *operations) count(name string, operation func() error) error {
	o.mu.Lock()
	o.counts[name]++
	o.mu.Unlock()
	return operation()
}

// during returns the operations while do runs.
func (o *operations) during(do func()) map[string]int {
	o.mu.Lock()
	o.counts = map[string]int{}
	o.mu.Unlock()
	do()
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.counts)
}

func TestDriver_operations_doNotDependOnShareCount(t *testing.T) {
	o := &operations{counts: map[string]int{}}
	p := newPlugin(t)
	p.stop()
	p.options.Failpoints = o.count
	p.start()
	crowd, filled := p.sandbox("crowd"), 0
	first := map[string]map[string]int{}
	for _, shares := range []int{10, 120} {
		var others []*resourceapi.ResourceClaim
		for ; filled < shares; filled++ {
			c := p.claim(fmt.Sprintf("crowd%d", filled), "1M", fmt.Sprintf(`"interfaceName": "net%d"`, 100+filled))
			if err := crowd.hook(c, p.mustPrepare(c)[0]); err != nil {
				t.Fatal(err)
			}
			others = append(others, c)
		}
		for _, c := range others {
			p.awaitReason(c, v1alpha1.ReasonAttached)
		}
		c, pod := p.claim(fmt.Sprintf("measured%d", shares), "1M", ""), p.sandbox("measured")
		p.client.ClearActions()
		var share string
		for _, step := range []struct {
			name string
			do   func()
		}{
			{"prepare", func() { share = p.mustPrepare(c)[0] }},
			{"attach", func() {
				if err := pod.hook(c, share); err != nil {
					t.Fatal(err)
				}
				p.awaitReason(c, v1alpha1.ReasonAttached)
			}},
			{"unprepare", func() { p.unprepare(c) }},
		} {
			got := o.during(step.do)
			if first[step.name] == nil {
				first[step.name] = got
				t.Logf("%s: %v", step.name, got)
			}
			if !maps.Equal(got, first[step.name]) {
				t.Errorf("%s next to %d shares: %v, next to 10 shares %v", step.name, shares, got, first[step.name])
			}
			for name := range got {
				if strings.HasPrefix(name, "sync ") {
					t.Errorf("%s next to %d shares waits for the disk (%s)", step.name, shares, name)
				}
			}
		}
		const most = 2 // that the share is prepared, and that it is attached
		if writes := p.statusWrites(); writes > most {
			t.Errorf("the start of a pod next to %d shares caused %d writes of claims, want at most %d", shares, writes, most)
		}
	}
}
