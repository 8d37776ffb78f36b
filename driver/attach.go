// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// Attach implements attach.Handler: it sets up one share in one pod. The
// hook calls it once per container start; it is idempotent per sandbox.
func (d *Driver) Attach(ctx context.Context, r attach.Request, sockets attach.Sockets) (attach.Response, error) {
	uid, start := types.UID(r.ClaimUID), time.Now()
	ctx = WithAttachment(ctx, r.ClaimUID, r.Share, r.Pod)
	err := d.locks.withClaim(ctx, uid, func(ctx context.Context) error {
		return d.attach(ctx, r, Sandbox{Sockets: sockets})
	})
	if sockets.NeedsPacket(err) {
		return attach.Response{}, err // the hook asks again, with the socket
	}
	if errors.Is(err, errClaimBusy) {
		err = d.failures.withLast(r.Share, err)
	}
	d.metrics.observe(operationAttach, start, err)
	retry := errors.Is(err, ErrRetryAttach)
	if retry {
		klog.FromContext(ctx).V(2).Info("Share cannot be attached yet", "err", err)
		d.failures.set(r.Share, r.Pod, err)
		d.reporter.enqueue(types.UID(r.ClaimUID))
	} else {
		d.reportAttach(ctx, r, err)
	}
	return attach.Response{Retry: retry}, err
}

// WithAttachment returns a context with a logger that names an attachment's claim, share, and pod.
func WithAttachment(ctx context.Context, claimUID, share string, pod attach.Pod) context.Context {
	logger := klog.FromContext(ctx)
	return klog.NewContext(ctx, logger.WithValues("claimUID", claimUID, "share", share,
		"pod", klog.KRef(pod.Namespace, pod.Name)))
}

// Refused implements attach.Handler: it reports why the hook refuses a container of a pod with a share.
func (d *Driver) Refused(ctx context.Context, r attach.Request) {
	ctx = WithAttachment(ctx, r.ClaimUID, r.Share, r.Pod)
	if _, err := d.preparedShare(r); err != nil {
		klog.FromContext(ctx).Error(err, "Hook refused a container without a prepared share", "refusal", r.Refusal)
		return
	}
	d.reportAttach(ctx, r, errors.New(r.Refusal))
}

// reportAttach reports the outcome of an attempt to attach a share in the status of the
// claim and, if it failed, in the events of the pod: not every OCI runtime reports what
// a hook prints.
func (d *Driver) reportAttach(ctx context.Context, r attach.Request, err error) {
	if !errors.Is(err, errNotPrepared) { // the next unprepare forgets the failure
		d.failures.set(r.Share, r.Pod, err)
	}
	d.reporter.enqueue(types.UID(r.ClaimUID))
	if err == nil {
		return
	}
	d.options.Events.Eventf(podReference(r.Pod), nil, corev1.EventTypeWarning, v1alpha1.ReasonAttachFailed,
		v1alpha1.EventActionShare, "%s", claimstatus.Truncate(err.Error(), maxNote))
	klog.FromContext(ctx).Error(err, "Failed to attach share")
}

func (d *Driver) attach(ctx context.Context, r attach.Request, sandbox Sandbox) error {
	s, err := d.preparedShare(r)
	if err != nil {
		return err
	}
	if s.attacher == nil {
		return fmt.Errorf("share %s: devices of this kind are not attached to pods", s.Name)
	}
	others, err := d.detachEndedAndList(ctx, s, r, sandbox)
	if err != nil {
		return err
	}
	if worksInSandbox(ctx, s, others, sandbox) {
		return nil
	}
	if err := s.attacher.ValidateConsumers(s.Share, otherPods(others, r.Pod.UID)); err != nil {
		return err
	}
	reserved, err := d.reserve(ctx, s, r, &sandbox)
	if err != nil {
		return err
	}
	attached, err := s.attacher.Attach(ctx, s.Share, r, sandbox)
	if err != nil {
		if reserved != nil && !errors.Is(err, ErrRemains) {
			err = errors.Join(err, d.removeAttachment(s, *reserved))
		}
		return err
	}
	recorded := newAttachment(s, r, attached)
	// The metadata is written before the record: once the record exists, the
	// hook no longer calls the plugin for this sandbox.
	d.deviceMetadata.update(ctx, types.UID(r.ClaimUID), s, &pendingAttachment{recorded, attached})
	if err := d.records.attachments.Write(recorded); err != nil {
		return errors.Join(fmt.Errorf("write attachment record: %w", err), d.detach(ctx, s, recorded))
	}
	d.detachFormer(attached.Namespace)
	klog.FromContext(ctx).V(2).Info("Attached share", "device", s.Device)
	return nil
}

// detachFormer detaches shares from the namespaces that current replaces. The events for their end may have been
// missed.
func (d *Driver) detachFormer(current attach.Namespace) {
	d.endedSandboxes.add(func(r *attach.Record) bool { return current.Replaces(r.Namespace) })
}

// newAttachment returns the record of an attachment.
func newAttachment(s share, r attach.Request, attached Attached) attach.Record {
	recorded, _ := json.Marshal(s.Share) // cannot fail: its parameters are valid JSON
	return attach.Record{
		ClaimUID: r.ClaimUID, Share: s.Name, Kind: s.Kind, Device: s.Device, Number: s.Number, RecordedShare: recorded,
		Pod: r.Pod, SandboxID: r.SandboxID, Namespace: attached.Namespace, Payload: attached.Payload,
	}
}

// reserve reserves and records the resources of the attachment, and adds them to the sandbox. It
// returns the record, or nil if the attachment needs nothing.
func (d *Driver) reserve(
	ctx context.Context, s share, r attach.Request, sandbox *Sandbox,
) (recorded *attach.Record, err error) {
	reserver, ok := s.attacher.(Reserver)
	if !ok {
		return nil, nil
	}
	err = reserver.Reserve(ctx, s.Share, r, *sandbox, d.records, func(reserved Attached) error {
		record := newAttachment(s, r, reserved)
		if err := d.records.attachments.Write(record); err != nil {
			return fmt.Errorf("write attachment record: %w", err)
		}
		recorded, sandbox.Reserved = &record, reserved.Payload
		return nil
	})
	return recorded, err // the callback has set recorded
}

// errNotPrepared means that a claim has no record, or that its record does not permit attaching it.
var errNotPrepared = errors.New("the claim is not prepared on this node")

// preparedShare returns the share that the hook names. Only prepared shares can
// be attached.
func (d *Driver) preparedShare(r attach.Request) (share, error) {
	claim, err := d.records.preparedClaim(types.UID(r.ClaimUID))
	if err != nil {
		return share{}, err
	}
	if claim == nil {
		return share{}, fmt.Errorf("claim %s: %w", r.ClaimUID, errNotPrepared)
	}
	s, ok := claim.Share(r.Share)
	if !ok {
		return share{}, fmt.Errorf("claim %s/%s has no share %s", claim.Namespace, claim.Name, r.Share)
	}
	return d.kinds.resolve(s), nil
}

// detachEndedAndList detaches a share's attachments in sandboxes that have ended, because the event may not have
// arrived, and returns the others.
func (d *Driver) detachEndedAndList(
	ctx context.Context,
	s share,
	r attach.Request,
	sandbox Sandbox,
) (live []attach.Record, err error) {
	for _, a := range d.records.attachmentsOf(ctx, types.UID(r.ClaimUID), s.Name) {
		if !isInEndedSandbox(ctx, s, a, r.Pod, sandbox) {
			live = append(live, a)
			continue
		}
		if err := d.detach(ctx, s, a); err != nil {
			return nil, err
		}
	}
	return live, nil
}

// isInEndedSandbox reports whether an attachment is in a sandbox other than the pod's given one, and either belongs
// to the same pod or no longer exists: the kernel may not have removed all of the old sandbox yet.
func isInEndedSandbox(ctx context.Context, s share, a attach.Record, pod attach.Pod, sandbox Sandbox) bool {
	if same, err := inSandbox(a, sandbox); err != nil || same {
		return false
	}
	if a.Pod.UID == pod.UID {
		return true
	}
	state, err := s.attacher.Read(ctx, s.Share, a)
	return err == nil && !state.Exists
}

// worksInSandbox reports whether the share is already attached to the sandbox, for an earlier
// container, and the attachment is ready.
func worksInSandbox(ctx context.Context, s share, attachments []attach.Record, sandbox Sandbox) bool {
	for _, a := range attachments {
		if same, err := inSandbox(a, sandbox); err != nil || !same {
			continue
		}
		if state, err := s.attacher.Read(ctx, s.Share, a); err == nil && state.Ready {
			return true
		}
	}
	return false
}

func otherPods(attachments []attach.Record, podUID string) (others []string) {
	for _, a := range attachments {
		if a.Pod.UID != podUID {
			others = append(others, a.Pod.Namespace+"/"+a.Pod.Name)
		}
	}
	return others
}

// inSandbox reports whether an attachment is in the sandbox.
func inSandbox(a attach.Record, sandbox Sandbox) (bool, error) {
	namespace, err := sandbox.Identify()
	return namespace.Same(a.Namespace), err
}
