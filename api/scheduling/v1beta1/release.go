// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1beta1

import (
	"fmt"
	"strings"
	"time"
)

// Elements of ReleaseAnnotation.
const (
	// ReleaseOnDeletion releases the claims when their holder is deleted, and never before. It cannot be combined with
	// other elements.
	ReleaseOnDeletion = "OnDeletion"
	// ReleaseOnCompletion also releases the claims when the workload is complete or has failed, and no pod uses them.
	ReleaseOnCompletion = "OnCompletion"
	// ReleaseOnSuspension also releases the claims when the workload is suspended or has no replicas, and no pod uses
	// them.
	ReleaseOnSuspension = "OnSuspension"
	// ReleaseUnused, followed by = and a duration such as 10m, also releases the claims when no pod has used them
	// for that time.
	ReleaseUnused = "Unused"
)

// minReleaseUnused is the shortest time until unused claims can be released: replacing a pod takes some seconds.
const minReleaseUnused = time.Second

// Release states when claims are released before their holder is deleted. The zero value is
// ReleaseOnDeletion.
type Release struct {
	OnCompletion bool
	OnSuspension bool
	// Unused is how long the claims must be without pods to be released; 0 if they are not.
	Unused time.Duration
}

// IsOnDeletion reports whether the claims are never released before their holder is deleted.
func (r Release) IsOnDeletion() bool { return r == Release{} }

// DependsOnWorkload reports whether the state of a workload determines when the claims are released.
func (r Release) DependsOnWorkload() bool { return r.OnCompletion || r.OnSuspension }

// Describe returns the conditions, one of which must be met when no pod uses the claims, such as "train is complete
// or suspended, or 10m0s have passed". It returns "" for ReleaseOnDeletion. workload names the workload.
func (r Release) Describe(workload string) string {
	var states, conditions []string
	if r.OnCompletion {
		states = append(states, "complete")
	}
	if r.OnSuspension {
		states = append(states, "suspended")
	}
	if len(states) > 0 {
		conditions = append(conditions, workload+" is "+strings.Join(states, " or "))
	}
	if r.Unused > 0 {
		conditions = append(conditions, r.Unused.String()+" have passed")
	}
	return strings.Join(conditions, ", or ")
}

// ParseRelease parses the value of ReleaseAnnotation: elements separated by commas. Errors state what the value
// should be.
func ParseRelease(value string) (Release, error) {
	var release Release
	seen := map[string]bool{}
	for element := range strings.SplitSeq(value, ",") {
		name, argument, hasArgument := strings.Cut(strings.TrimSpace(element), "=")
		if seen[name] {
			return Release{}, fmt.Errorf("contains %s twice: remove one of them", name)
		}
		seen[name] = true
		switch {
		case name == ReleaseOnDeletion && !hasArgument:
		case name == ReleaseOnCompletion && !hasArgument:
			release.OnCompletion = true
		case name == ReleaseOnSuspension && !hasArgument:
			release.OnSuspension = true
		case name == ReleaseUnused:
			unused, err := time.ParseDuration(argument)
			if err != nil || unused < minReleaseUnused {
				return Release{}, fmt.Errorf("%s must have a duration of at least %s, such as %s=10m",
					ReleaseUnused, minReleaseUnused, ReleaseUnused)
			}
			release.Unused = unused
		default:
			return Release{}, fmt.Errorf("%q is unknown: use %s, or a list of %s, %s, and %s=<duration>, separated by commas",
				strings.TrimSpace(element), ReleaseOnDeletion, ReleaseOnCompletion, ReleaseOnSuspension, ReleaseUnused)
		}
	}
	if seen[ReleaseOnDeletion] && len(seen) > 1 {
		return Release{}, fmt.Errorf("%s cannot be combined with other elements: remove it or them", ReleaseOnDeletion)
	}
	return release, nil
}
