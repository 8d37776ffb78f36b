package driver

import (
	"context"
	"encoding/json"
	"os"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// Kind is one sort of device that can be shared. The driver keeps the records
// and calls a Kind for what only it knows.
type Kind interface {
	// Name of the kind, as records and log lines have it.
	Name() string
	// Refresh looks at the node and makes devices ready to be shared, or
	// ready again. shares are all that are recorded of the kind: their
	// devices stay in Devices, whatever became of them.
	Refresh(ctx context.Context, shares []record.Share) (Refreshed, error)
	// Leave gives all devices back as they were, and forgets what outlives the
	// process. The caller knows that nobody needs it.
	Leave(ctx context.Context) error
	// Ready tells why shares cannot be attached at present, nil if they can.
	Ready() error
	// Devices returns what to publish, as of the last Refresh.
	Devices() []resourceapi.Device
	// Health returns the state of the devices, as of the last Refresh.
	Health() []Health
	// Has tells whether a device is, or was, of this kind.
	Has(device string) bool
	// Configure returns a share's parameters: the opaque configurations
	// that apply to it, a class's before a claim's, decoded, merged,
	// defaulted and validated. What it returns is kept as long as the share is,
	// whatever becomes of the configuration.
	Configure(share record.Share, configurations [][]byte) (json.RawMessage, error)
	// Admit refuses a share that the device has no room for beside the
	// others on it.
	Admit(share record.Share, others []record.Share) error
	// Together refuses shares of one claim that exclude each other.
	Together(shares []record.Share) error
	// Edits are what a container with the share finds, beside a link.
	Edits(share record.Share) (cdi.Edits, error)
}

// Watcher is a Kind whose devices come and go by themselves.
type Watcher interface {
	Kind
	// Watch calls changed when a Refresh may find something else, until ctx
	// ends. After an error devices are looked at again from time to time only.
	Watch(ctx context.Context, changed func()) error
}

// Spanning is a Kind whose devices several nodes have. They are in pools of
// their own, which the controller publishes; all that Devices returns is for
// those that ask about a share.
type Spanning interface {
	Kind
	// Spans tells whether a pool is of this kind.
	Spans(pool string) bool
}

// Reporter is a Kind that has something to say about shares that are not
// attached to pods.
type Reporter interface {
	Kind
	// Conditions of a prepared share. Ready is one of them.
	Conditions(share record.Share) []metav1.Condition
}

// Meter is a Kind whose devices count what goes through them.
type Meter interface {
	Traffic() []Traffic
}

// Traffic is what went through a device.
type Traffic struct {
	Device                 string
	SentBits, ReceivedBits uint64
}

// Refreshed is what a Refresh found.
type Refreshed struct {
	// Changed: what shares have on a device may be gone, or not as it should
	// be any more.
	Changed bool
	// Again: when to look again although nothing is announced; 0: never.
	Again time.Duration
}

// Health of a device.
type Health struct {
	Device  string
	Healthy bool
	Message string // why not
}

// Attacher is a Kind whose shares become part of a pod when it starts.
type Attacher interface {
	Kind
	// Attaches tells whether a share of the kind is attached at all: one with
	// admin access is there to look.
	Attaches(share record.Share) bool
	// Attach makes a share real in a pod's network namespace. After an error
	// nothing is left behind.
	Attach(ctx context.Context, share record.Share, r attach.Request, pod PodNamespace) (attach.Record, error)
	// Restore puts back what Attach made on the node, if it is not as it
	// should be. It reports whether the pod is there; as long as it is, an
	// error never means that anything may be taken away.
	Restore(ctx context.Context, share record.Share, r attach.Record) (there bool, err error)
	// Detach undoes an Attach, also when the pod is gone.
	Detach(ctx context.Context, r attach.Record) error
	// Release undoes what all attachments of a share had in common.
	Release(ctx context.Context, share record.Share) error
	// Read asks the kernel what has become of an attachment.
	Read(ctx context.Context, share record.Share, r attach.Record) (State, error)
	// Orphans returns what the kernel has of this kind that none of the shares
	// and attachments needs.
	Orphans(ctx context.Context, shares []record.Share, attached []attach.Record) ([]Orphan, error)
	// Serves refuses a further pod for a share that cannot serve several.
	// others are the pods that have it, as namespace/name.
	Serves(share record.Share, others []string) error
}

// Orphan is something of ours that nothing needs.
type Orphan struct {
	// What it is, for the log: two that are alike are the same.
	What   string
	Remove func(context.Context) error
}

// PodNamespace is a pod's network namespace as it came from the hook: the
// namespace, and a NETLINK_ROUTE socket that was opened in it.
type PodNamespace struct {
	File, Socket *os.File
}

// State is an attachment as the kernel has it.
type State struct {
	Attached  bool   // the link exists, is up, and its device works
	Reason    string // CamelCase, why not
	Message   string // why not
	Interface string
	MAC       string
	MTU       int // bytes
	Addresses []string
	Routes    []Route
	// Enforced tells whether what was granted is what the kernel enforces.
	Enforced Enforcement
}

// Route as reported.
type Route struct {
	Destination string
	Gateway     string
}

// Enforcement is a condition about a grant.
type Enforcement struct {
	Holds   bool
	Reason  string // CamelCase, for the condition
	Message string
	// SendFloor and the others are rates in bits per second, read back; 0: none.
	SendFloor, SendCeil, ReceiveFloor, ReceiveCeil uint64
}
