// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/utils/clock"

	"github.com/dra-shared/dra-driver-shared/controlplane/admission"
)

// renewDeadline is how long the leading replica tries to renew its lease, the default of
// controller-runtime.
const renewDeadline = 10 * time.Second

// newLeadingReplica returns the lock of leader election. Its identity contains the address that the leading replica
// serves webhooks at.
func newLeadingReplica(restConfig *rest.Config, o Options, p peerAuth) (*admission.LeadingReplica, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("leader election: %w", err)
	}
	identity := host + "_" + string(uuid.NewUUID())
	if o.Webhook.Port != 0 && o.Webhook.PodIP != "" {
		identity = admission.ReplicaIdentity(identity, net.JoinHostPort(o.Webhook.PodIP, strconv.Itoa(o.Webhook.Port)))
	}
	lock, err := resourcelock.NewFromKubeconfig(resourcelock.LeasesResourceLock, o.Namespace, o.DriverName,
		resourcelock.ResourceLockConfig{Identity: identity},
		rest.AddUserAgent(restConfig, "leader-election"), renewDeadline)
	if err != nil {
		return nil, fmt.Errorf("leader election: %w", err)
	}
	return &admission.LeadingReplica{Interface: lock, HTTP: p.client(), Clock: clock.RealClock{}}, nil
}
