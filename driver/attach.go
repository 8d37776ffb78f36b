// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
)

// Attach implements attach.Handler: it makes one share real in one pod. The
// hook calls it once per container start; it is idempotent per sandbox.
func (d *Driver) Attach(ctx context.Context, r attach.Request, namespace, socket *os.File) (attach.Response, error) {
	uid, start := types.UID(r.ClaimUID), time.Now()
	ctx = klog.NewContext(
		ctx,
		klog.FromContext(ctx).WithValues("claimUID", uid, "share", r.Share, "pod", klog.KRef(r.Pod.Namespace, r.Pod.Name)),
	)
	err := d.withClaim(ctx, uid, func(ctx context.Context) error {
		return d.attach(ctx, r, Sandbox{Namespace: namespace, Socket: socket})
	})
	d.metrics.observe(operationAttach, start, err)
	d.failures.set(r.Share, r.Pod, err)
	d.status.enqueue(uid)
	return attach.Response{}, err
}

func (d *Driver) attach(ctx context.Context, r attach.Request, sandbox Sandbox) error {
	s, err := d.preparedShare(r)
	if err != nil {
		return err
	}
	if s.attacher == nil {
		return fmt.Errorf("share %s belongs to a kind of device that is not attached to pods", s.Name)
	}
	others, err := d.liveAttachments(ctx, s, r.ClaimUID, sandbox)
	if err != nil {
		return err
	}
	if isAttached(ctx, s, others, sandbox) {
		return nil
	}
	if err := s.attacher.ValidateConsumers(s.Share, otherPods(others, r.Pod.UID)); err != nil {
		return err
	}
	attached, err := s.attacher.Attach(ctx, s.Share, r, sandbox)
	if err != nil {
		return err
	}
	recorded := attach.Record{
		ClaimUID: r.ClaimUID, Share: s.Name, Kind: s.Kind, Device: s.Device, Class: s.Class,
		Pod: r.Pod, SandboxID: r.SandboxID, Namespace: attached.Namespace, Payload: attached.Payload,
	}
	// The metadata is written before the record: once the record exists, the
	// hook no longer calls the plugin for this sandbox.
	d.updateMetadata(ctx, types.UID(r.ClaimUID), s, recorded)
	if err := d.attachments.Write(recorded); err != nil {
		return errors.Join(fmt.Errorf("write attachment record: %w", err), s.attacher.Detach(ctx, recorded))
	}
	klog.FromContext(ctx).V(2).Info("Attached share", "device", s.Device)
	return nil
}

// preparedShare returns the share that the hook names. Only prepared shares can
// be attached.
func (d *Driver) preparedShare(r attach.Request) (share, error) {
	claim, err := d.preparedClaim(types.UID(r.ClaimUID))
	if err != nil {
		return share{}, err
	}
	if claim == nil {
		return share{}, fmt.Errorf("claim %s is not prepared on this node", r.ClaimUID)
	}
	s, ok := claim.Share(r.Share)
	if !ok {
		return share{}, fmt.Errorf("claim %s/%s has no share %s", claim.Namespace, claim.Name, r.Share)
	}
	return d.resolve(s), nil
}

// liveAttachments returns the attachments of a share. It first detaches those
// whose sandboxes have ended, because the event for that may not have arrived.
func (d *Driver) liveAttachments(
	ctx context.Context,
	s share,
	claimUID string,
	sandbox Sandbox,
) (live []attach.Record, err error) {
	for _, a := range d.attachmentsOf(ctx, types.UID(claimUID), s.Name) {
		if !hasEnded(ctx, s, a, sandbox) {
			live = append(live, a)
			continue
		}
		if err := d.detach(ctx, s, a); err != nil {
			return nil, err
		}
	}
	return live, nil
}

// hasEnded reports whether an attachment is in a sandbox other than the given
// one and no longer exists.
func hasEnded(ctx context.Context, s share, a attach.Record, sandbox Sandbox) bool {
	if same, err := inSandbox(a, sandbox); err != nil || same {
		return false
	}
	state, err := s.attacher.Read(ctx, s.Share, a)
	return err == nil && !state.Exists
}

// isAttached reports whether an earlier container of the sandbox has had the
// share attached.
func isAttached(ctx context.Context, s share, attachments []attach.Record, sandbox Sandbox) bool {
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

// inSandbox reports whether an attachment is in the sandbox, by the inode of
// the network namespace. A namespace that had the same inode earlier has
// another cookie, which is part of the record's file name.
func inSandbox(a attach.Record, sandbox Sandbox) (bool, error) {
	ns, err := attach.NamespaceOf(sandbox.Namespace, a.Namespace.Cookie)
	return ns.Inode == a.Namespace.Inode, err
}
