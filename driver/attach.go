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
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// Attach implements attach.Handler: it makes one share real in one pod. It is
// called once per container start and idempotent per sandbox.
func (d *Driver) Attach(ctx context.Context, r attach.Request, namespace, socket *os.File) (response attach.Response, err error) {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("pod", klog.KRef(r.Pod.Namespace, r.Pod.Name), "share", r.Share))
	uid, start := types.UID(r.ClaimUID), time.Now()
	err = d.withClaim(ctx, uid, func(ctx context.Context) error {
		attached, err := d.attach(ctx, r, PodNamespace{File: namespace, Socket: socket})
		response.Interface = attached.Link.Name
		return err
	})
	d.metrics.observe(operationAttach, start, err)
	d.failures.note(r.Share, r.Pod, err)
	d.status.enqueue(uid)
	return response, err
}

func (d *Driver) attach(ctx context.Context, r attach.Request, pod PodNamespace) (attach.Record, error) {
	share, err := d.preparedShare(r)
	if err != nil {
		return attach.Record{}, err
	}
	attacher := d.attacherOf(share)
	if attacher == nil {
		return attach.Record{}, fmt.Errorf("share %s is not of a kind that is attached", share.Name)
	}
	others, err := d.sharers(ctx, attacher, share, r, pod)
	if err != nil {
		return attach.Record{}, err
	}
	for _, o := range others {
		if same, err := sameNamespace(o, pod); err != nil || !same {
			continue
		}
		if state, err := attacher.Read(ctx, share, o); err == nil && state.Attached {
			return o, nil // an earlier container of the sandbox
		}
	}
	if err := attacher.Serves(share, otherPods(others, r.Pod.UID)); err != nil {
		return attach.Record{}, err
	}
	attached, err := attacher.Attach(ctx, share, r, pod)
	if err != nil {
		return attached, err
	}
	attached.Kind, attached.Device = share.Kind, share.Device
	d.updateMetadata(ctx, types.UID(r.ClaimUID), share, attached) // before the record: with that, the hook is content
	if err := d.attachments.Write(attached); err != nil {
		return attached, errors.Join(fmt.Errorf("write attach record: %w", err), attacher.Detach(ctx, attached))
	}
	klog.FromContext(ctx).Info("Attached", "interface", attached.Link.Name, "device", share.Device)
	return attached, nil
}

// preparedShare finds what the hook asks for among what is prepared: nothing
// else can be attached.
func (d *Driver) preparedShare(r attach.Request) (record.Share, error) {
	claim, err := d.claims.Get(types.UID(r.ClaimUID))
	if err != nil {
		return record.Share{}, err
	}
	if claim == nil || claim.Phase != record.Prepared {
		return record.Share{}, fmt.Errorf("claim %s is not prepared on this node", r.ClaimUID)
	}
	share, ok := claim.Share(r.Share)
	if !ok {
		return record.Share{}, fmt.Errorf("claim %s/%s has no share %s", claim.Namespace, claim.Name, r.Share)
	}
	return share, nil
}

// sharers returns the attachments of a share, without those whose sandbox is
// gone: an event that tells so may be on its way.
func (d *Driver) sharers(ctx context.Context, attacher Attacher, share record.Share, r attach.Request, pod PodNamespace) ([]attach.Record, error) {
	all, err := d.attachments.OfClaim(r.ClaimUID)
	if err != nil { // what it told of is found in the pod by its address
		klog.FromContext(ctx).Error(err, "Some attach records are unreadable")
	}
	var live []attach.Record
	for _, a := range all {
		if a.Share != share.Name {
			continue
		}
		if same, err := sameNamespace(a, pod); err == nil && !same {
			if state, err := attacher.Read(ctx, share, a); err == nil && !state.Attached && state.Interface == "" {
				if err := d.forget(ctx, attacher, a); err != nil {
					return nil, err
				}
				continue
			}
		}
		live = append(live, a)
	}
	return live, nil
}

func otherPods(records []attach.Record, podUID string) (others []string) {
	for _, r := range records {
		if r.Pod.UID != podUID {
			others = append(others, r.Pod.Namespace+"/"+r.Pod.Name)
		}
	}
	return others
}

// sameNamespace compares by inode; the cookie in the record's file name tells
// namespaces apart that had the same inode one after the other.
func sameNamespace(r attach.Record, pod PodNamespace) (bool, error) {
	ns, err := attach.NamespaceOf(pod.File, r.Namespace.Cookie)
	return ns.Inode == r.Namespace.Inode, err
}
