// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// Attacher is a Kind with shares that become part of a pod when it starts.
type Attacher interface {
	// Attaches reports whether the share is attached to pods. A share with admin access, for
	// example, may serve observation only.
	Attaches(share record.Share) bool
	// ValidateConsumers refuses another pod for a share that cannot serve
	// several. others are the pods that use the share, as namespace/name.
	ValidateConsumers(share record.Share, others []string) error
	// Attach sets up a share in a sandbox. If it fails, it has removed everything that it created,
	// unless the error wraps ErrRemains. If the error wraps ErrRetryAttach, the hook tries again
	// for some time.
	Attach(ctx context.Context, share record.Share, request attach.Request, sandbox Sandbox) (Attached, error)
	// Restore repairs what has changed in the node state that Attach set up. It reports whether the attachment's
	// sandbox exists; if so, the driver keeps the attachment, even if Restore fails.
	Restore(ctx context.Context, share record.Share, r attach.Record) (exists bool, err error)
	// Detach undoes Attach, even if the sandbox has ended.
	Detach(ctx context.Context, r attach.Record) error
	// Release removes the node state common to all of a share's attachments, after they have been detached.
	Release(ctx context.Context, share record.Share) error
	// Read returns the state of an attachment in the kernel. It may change the state first: a Protector blocks or
	// unblocks the attachment, as Protect does.
	Read(ctx context.Context, share record.Share, r attach.Record) (State, error)
	// StatusData returns the contents of status.devices[].data for one share's attachments; there is at least one.
	// failed is the number of pods that the share could not be attached to.
	StatusData(attachments []PodState, failed int) any
	// Orphans returns this kind's kernel objects that no share or attachment needs.
	Orphans(ctx context.Context, shares []record.Share, attachments []attach.Record) ([]Orphan, error)
}

// Protector is an Attacher that protects the node and other pods from a pod that changed its attachment.
type Protector interface {
	// Protect blocks or unblocks an attachment, depending on its state. The driver calls it before
	// it reads the state of an attachment that may have changed, without the claim's lock, and
	// without waiting for earlier reports of the claim's status.
	Protect(r attach.Record) error
}

// ErrRetryAttach is wrapped by an Attach error if the driver is about to repair its cause. A pod with restart policy
// Never would otherwise fail.
var ErrRetryAttach = errors.New("trying again")

// ErrRemains is wrapped by an Attach error if a part of the attachment may still exist and use the reservation. The
// next attempt to attach, or the end of the pod, removes it.
var ErrRemains = errors.New("the reservation is kept until the share is attached or the pod ends")

// Comparer is an Attacher that compares all its attachments with the kernel in one pass. After a restart, and when
// events were lost, the driver then restores only the altered ones.
type Comparer interface {
	// Altered returns the attachments that Restore may have to change or that were in a sandbox that has ended.
	Altered(ctx context.Context, attachments []Attachment) ([]Attachment, error)
}

// Attachment is the record of an attachment together with its share.
type Attachment struct {
	Share  record.Share
	Record attach.Record
}

// Sandbox is a pod's network namespace, and the sockets in it, as the hook passed them. The Attacher must not keep
// these files. If it needs a socket that is missing, it returns attach.ErrPacketNeeded.
type Sandbox struct {
	attach.Sockets
	// Reserved is the payload of a Reserver, or nil.
	Reserved json.RawMessage
}

// Attached is the result of Attacher.Attach.
type Attached struct {
	// Namespace identifies the sandbox in later events.
	Namespace attach.Namespace
	// Payload is recorded and given back to the kind in attach.Record.
	Payload json.RawMessage
	// NetworkData and Attributes equal the fields of the State that Read would return now. The driver writes them to
	// the device metadata without reading the kernel again.
	NetworkData *resourceapi.NetworkDeviceData
	Attributes  attribute.Map
}

// State is the state of an attachment in the kernel.
type State struct {
	// Exists reports whether the attachment is in the sandbox, working or not. It is also true if the attachment may be
	// there because an attempt to attach it has not finished.
	Exists bool
	// Pending reports whether Reserver.Reserve has written the record and Attach has not succeeded, or whether
	// the sandbox has ended and Detach follows. Such an attachment has no status.
	Pending bool
	// Ready reports whether the attachment exists and works.
	Ready bool
	// Reason (CamelCase) and Message explain why it does not.
	Reason, Message string
	// NetworkData describes the attachment in the claim's status and in the
	// device metadata; nil if it does not exist.
	NetworkData *resourceapi.NetworkDeviceData
	// Attributes are added to the device metadata.
	Attributes attribute.Map
	// Conditions are reported in addition to Ready.
	Conditions []metav1.Condition
	// Data is opaque to the driver; the kind reads it in StatusData.
	Data any
}

// PodState is the state of an attachment with its pod.
type PodState struct {
	Pod attach.Pod
	State
}

// Orphan is an object of the driver that no claim and no pod needs.
type Orphan struct {
	// Description names the object. Two orphans with the same description are
	// the same object.
	Description string
	Remove      func(context.Context) error
	// grace is how long the object must have been an orphan, if longer than Options.OrphanGrace.
	grace time.Duration
}
