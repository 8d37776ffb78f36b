// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// shareState is the state of a share in the kernel and in its pods.
type shareState struct {
	share
	// attachments are the pods that the share is attached to.
	attachments []PodState
	// pending means that the share is being attached to a pod, or detached from an ended one.
	pending bool
	// failed are the reasons why attaching the share to pods failed.
	failed []string
	// unreferenced are the pods that use the claim although none of their containers references it: the plugin never
	// attaches the share to them.
	unreferenced []attach.Pod
	// hookNotRun are the pods with a running container that references the claim although the share is not attached:
	// their runtime does not run the hook.
	hookNotRun []podWithoutHook
	// conditions are the complete status of a share that is not attached.
	conditions []metav1.Condition
}

// observer reads the state of claims' shares from the kernel and the API server. It also forgets failures and
// detachments that no longer matter, which only the API server's answers show.
type observer struct {
	client       kubernetes.Interface
	nodeName     string
	kinds        kinds
	records      *nodeRecords
	apiClaims    claimReader
	failures     *failures
	detachments  *detachments
	degradations *degradations
}

func (d *Driver) newObserver() *observer {
	return &observer{
		client:       d.options.Client,
		nodeName:     d.options.NodeName,
		kinds:        d.kinds,
		records:      d.records,
		apiClaims:    d.apiClaims,
		failures:     &d.failures,
		detachments:  &d.detachments,
		degradations: d.degradations,
	}
}

// observe reads the state of a claim's shares from the kernel. From the API server, it reads information that the
// kernel lacks: which pods no longer exist, and which pods the shares will never be attached to.
func (o *observer) observe(ctx context.Context, claim *record.Claim) ([]shareState, error) {
	shares := o.kinds.resolveAll(claim.Shares)
	attachments := o.records.attachmentsOfClaim(ctx, claim.UID)
	var states []shareState
	for _, s := range shares {
		state := shareState{share: s}
		if s.attacher == nil {
			reporter, ok := s.kind.(ConditionReporter)
			if !ok || s.AdminAccess {
				continue
			}
			state.conditions = reporter.Conditions(s.Share)
		} else if err := state.readAttachments(ctx, attachments); err != nil {
			return nil, err
		}
		states = append(states, state)
	}
	if o.needsPods(shares, states) {
		if err := o.observePods(ctx, claim, shares, states); err != nil {
			return nil, err
		}
	}
	for i := range states {
		states[i].failed = o.failures.messages(states[i].Name)
	}
	return states, nil
}

// readAttachments reads the state of the share's attachments among all. It omits those being attached or detached,
// which would briefly be reported as missing.
func (s *shareState) readAttachments(ctx context.Context, all []attach.Record) error {
	for _, a := range all {
		if a.Share != s.Name {
			continue
		}
		state, err := s.attacher.Read(ctx, s.Share, a)
		if err != nil {
			return err
		}
		if state.Pending {
			s.pending = true
			continue
		}
		s.attachments = append(s.attachments, PodState{Pod: a.Pod, State: state})
	}
	return nil
}

// needsPods reports whether the status depends on the pods: attaching failed,
// or a share that should be attached is not.
func (o *observer) needsPods(shares []share, states []shareState) bool {
	if len(o.failures.pods(shares)) > 0 {
		return true
	}
	for _, s := range states {
		if s.attacher != nil && len(s.attachments) == 0 {
			return true
		}
	}
	return false
}

// isFullyAttached reports whether each share that is attachable is attached to at least one pod,
// and no attempt to attach failed.
func (o *observer) isFullyAttached(claim *record.Claim) bool {
	shares := o.kinds.resolveAll(claim.Shares)
	if len(o.failures.pods(shares)) > 0 {
		return false
	}
	attached, err := o.records.attachments.OfClaim(string(claim.UID))
	return err == nil && !slices.ContainsFunc(shares, func(s share) bool {
		return s.attacher != nil && !slices.ContainsFunc(attached, func(r attach.Record) bool { return r.Share == s.Name })
	})
}
