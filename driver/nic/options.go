// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"errors"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

// Options configures a Kind. Every field is required unless its comment names a default.
type Options struct {
	// Node manages the NICs of the node. The caller closes it.
	Node *netdev.Node
	// Inventory lists the node's NICs.
	Inventory *netdev.Inventory
	// Config is the configuration of the plugin.
	Config *config.DriverConfig
	// StateFile is the path of the NIC state file, which passes what the kind knows about NICs on to the next plugin.
	// It must be on a filesystem that a reboot clears. Default: the next plugin does not know it.
	StateFile string
	// AddressPools are the options of the allocator that assigns addresses from AddressPools. The kind sets OnLost,
	// because it blocks links that have lost their addresses. Default: the kind refuses claims that name a pool.
	AddressPools *ipam.Options
	// OpenSockets opens sockets in the network namespace of an attachment; see attach.Opener. Default: the kind
	// refuses claims that lease addresses, because it could not renew them.
	OpenSockets func(ctx context.Context, r attach.Record) (attach.Sockets, error)
	// Failpoints wraps operations that change the NIC state file or DHCP servers. Node and AddressPools have their
	// own. Default: none.
	Failpoints failpoint.Injector
}

// validate returns an error if a Kind cannot be built from the options.
func (o Options) validate() error {
	switch {
	case o.Node == nil:
		return errors.New("options of the NIC kind: Node is required")
	case o.Inventory == nil:
		return errors.New("options of the NIC kind: Inventory is required")
	case o.Config == nil:
		return errors.New("options of the NIC kind: Config is required")
	case o.AddressPools != nil && o.AddressPools.API == nil:
		return errors.New("options of the NIC kind: AddressPools.API is required")
	case o.AddressPools != nil && o.AddressPools.OnLost != nil:
		return errors.New("options of the NIC kind: AddressPools.OnLost must not be set: the kind sets it")
	default:
		return nil
	}
}

// New builds the kind. It does not access the node: CheckTakeover and Refresh are the first to do so.
func New(o Options) (*Kind, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	k := &Kind{
		node: o.Node, inventory: o.Inventory, config: o.Config, openSockets: o.OpenSockets, failpoints: o.Failpoints,
		stateFile:  stateFile{path: o.StateFile, failpoints: o.Failpoints},
		duplicates: newDuplicates(), lost: newLostAddresses(), hidden: newHiddenLinks(), failedNICs: map[int]string{},
	}
	if o.AddressPools != nil {
		pools := *o.AddressPools
		pools.OnLost = k.setLost
		k.addresses = ipam.New(pools)
	}
	return k, nil
}
