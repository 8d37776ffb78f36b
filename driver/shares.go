// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"iter"

	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// share is a recorded share with the kind of its device.
type share struct {
	record.Share
	kind Kind // nil if the plugin no longer has the kind
	// attacher is nil if the share is not attached to pods.
	attacher Attacher
}

// withKind connects a share to its kind.
func withKind(s record.Share, kind Kind) share {
	resolved := share{Share: s, kind: kind}
	if attacher, ok := kind.(Attacher); ok && attacher.Attaches(s) {
		resolved.attacher = attacher
	}
	return resolved
}

// deviceAttributes returns the published attributes of the share's device.
func (s share) deviceAttributes() attribute.Map {
	if s.kind == nil {
		return nil
	}
	for _, device := range s.kind.Devices() {
		if device.Name == s.Device {
			return device.Attributes
		}
	}
	return nil
}

// kinds are the device kinds of the plugin.
type kinds struct {
	all []Kind
	// node is the name of the node, and of its pool of devices.
	node string
}

// resolve connects a recorded share to the kind that it was recorded with.
func (ks kinds) resolve(s record.Share) share {
	for _, k := range ks.all {
		if k.Name() == s.Kind {
			return withKind(s, k)
		}
	}
	return share{Share: s}
}

// kindsOf returns the kinds that implement the optional interface T, each as itself and as T.
func kindsOf[T any](ks kinds) iter.Seq2[Kind, T] {
	return func(yield func(Kind, T) bool) {
		for _, k := range ks.all {
			if implementation, ok := k.(T); ok && !yield(k, implementation) {
				return
			}
		}
	}
}

func (ks kinds) resolveAll(recorded []record.Share) []share {
	shares := make([]share, len(recorded))
	for i, s := range recorded {
		shares[i] = ks.resolve(s)
	}
	return shares
}

// find returns the kind of an allocated device. The node's devices are in the pool with the node's name; other
// pools belong to kinds that span nodes.
func (ks kinds) find(pool, device string) (Kind, error) {
	poolKnown := pool == ks.node
	for _, k := range ks.all {
		inPool := pool == ks.node
		if spanning, ok := k.(MultiNode); ok {
			inPool = spanning.HasPool(pool)
		}
		poolKnown = poolKnown || inPool
		if inPool && k.Has(device) {
			return k, nil
		}
	}
	if !poolKnown {
		return nil, fmt.Errorf("the device is in pool %s, but this node publishes pool %s: "+
			"does another driver use the same driver name?", pool, ks.node)
	}
	return nil, fmt.Errorf(
		"this node has no device %s: was it removed from the node, or from the driver's configuration?",
		device,
	)
}

// sharesOf returns the recorded shares of one kind.
func sharesOf(claims []*record.Claim, kind string) (shares []record.Share) {
	for _, c := range claims {
		shares = append(shares, c.SharesOf(kind)...)
	}
	return shares
}
