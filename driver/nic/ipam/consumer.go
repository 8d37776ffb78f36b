// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"context"
	"fmt"
	"strings"

	"go4.org/netipx"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
)

// Most blocks serve any pod. A block of one address may serve one consumer only:
//
//   - A pod of a StatefulSet that keeps its address. When the pod no longer exists, the node returns the block by
//     removing its own name from it. Only then can another node take the block, by writing its name. So no two nodes
//     have the block, and no other pod gets the address.
//   - The pods of a namespace, if the pool has a limit for each namespace. The blocks are the
//     count: a node that creates a block over the limit deletes it before using it.

// consumerKind is the kind of consumer that a block serves.
type consumerKind int

// Values of consumerKind.
const (
	anyPod consumerKind = iota
	// podsOfNamespace are the pods of one namespace, in a pool with a limit for each.
	podsOfNamespace
	// keepingPod is the pod of a StatefulSet that keeps the address for one of its links.
	keepingPod
)

// consumer is the pod, or the set of pods, that a block serves.
type consumer struct {
	kind      consumerKind
	namespace string // empty for any pod
	// pod and link are empty unless a pod keeps the address.
	pod, link string
}

// poolConsumer is a consumer of one pool.
type poolConsumer struct {
	pool string
	consumer
}

func consumerOf(b *network.AddressBlock) consumer {
	switch {
	case b.Spec.Pod != "":
		return consumer{keepingPod, b.Spec.Namespace, b.Spec.Pod, b.Spec.Interface}
	case b.Spec.Namespace != "":
		return consumer{kind: podsOfNamespace, namespace: b.Spec.Namespace}
	default:
		return consumer{kind: anyPod}
	}
}

// namespaceIn returns the consumer of a request that does not keep an address.
func (r Request) namespaceIn(pool *addresspool.Pool) consumer {
	if pool.NamespaceLimit == 0 {
		return consumer{kind: anyPod}
	}
	return consumer{kind: podsOfNamespace, namespace: r.PodNamespace}
}

// consumerIn returns the consumer of a request in one of its Pools.
func (r Request) consumerIn(pool *addresspool.Pool) (consumer, error) {
	if !r.Keep {
		return r.namespaceIn(pool), nil
	}
	if _, isPod := addresspool.StatefulSetOf(r.Pod); !isPod {
		return consumer{}, fmt.Errorf("keepAddresses: Forbidden: pod %s does not have the name of a pod of a "+
			"StatefulSet, such as web-0: use a StatefulSet, or remove keepAddresses", r.Pod)
	}
	return consumer{keepingPod, r.PodNamespace, r.Pod, r.Interface}, nil
}

// keptBlock returns the block that a pod keeps, or nil. It prefers a block that this node has
// or can take.
func keptBlock(i item, node string, blocks []network.AddressBlock) (kept *network.AddressBlock) {
	if i.consumer.kind != keepingPod {
		return nil
	}
	for n := range blocks {
		b := &blocks[n]
		if b.Spec.Pool != i.pool.Name || consumerOf(b) != i.consumer {
			continue
		}
		if kept == nil || b.Spec.Node == node || b.Spec.Node == "" && kept.Spec.Node != node {
			kept = b
		}
	}
	return kept
}

// takeKept takes the block that a pod keeps, unless this or another node has it. blocks are all of the network's
// blocks.
func (a *Allocator) takeKept(
	ctx context.Context, i item, kept *network.AddressBlock, blocks []network.AddressBlock,
) error {
	switch kept.Spec.Node {
	case "":
		if err := a.takeReturned(ctx, kept, blocks); !isOutdated(err) {
			return err
		}
		return nil // the caller looks again
	case a.options.Node:
		return fmt.Errorf("AddressPool %s: %w: another link of pod %s/%s on this node has %s: is the previous pod "+
			"still terminating? a pod with several links needs an interfaceName for each", i.pool.Name, errKeptInUse,
			kept.Spec.Namespace, kept.Spec.Pod, addressOf(kept))
	}
	return fmt.Errorf("AddressPool %s: %w: node %s has %s for pod %s/%s: does the previous pod still run there? "+
		"if the machine no longer runs, delete its Node, and wait for controller.addressQuarantine",
		i.pool.Name, errKeptInUse, kept.Spec.Node, addressOf(kept), kept.Spec.Namespace, kept.Spec.Pod)
}

// addressOf returns the address of a kept block for a message.
func addressOf(kept *network.AddressBlock) string {
	first, _, _ := strings.Cut(kept.Spec.Ranges[0], "-")
	return first
}

// takeReturned takes a kept block that no node has. If another block has the address, it deletes the
// kept one: its node may have been lost before it could compare the blocks (see create).
func (a *Allocator) takeReturned(
	ctx context.Context, kept *network.AddressBlock, blocks []network.AddressBlock,
) error {
	taken, err := a.adopt(ctx, kept)
	if err != nil {
		return err
	}
	if !overlaps(kept, blocks) {
		return a.add(ctx, taken)
	}
	_, err = a.write(ctx, taken, &netipx.IPSet{})
	return err
}

// adopt takes a kept block that no node has. The caller must have the block lock.
func (a *Allocator) adopt(ctx context.Context, kept *network.AddressBlock) (*block, error) {
	object := kept.DeepCopy()
	object.Spec.Node = a.options.Node
	delete(object.Annotations, network.NodeLostAnnotation)
	taken, err := a.options.API.UpdateBlock(ctx, object)
	if err != nil {
		if !isOutdated(err) {
			a.blocksStale.Store(true)
		}
		return nil, fmt.Errorf("take AddressBlock %s: %w", object.Name, err)
	}
	klog.FromContext(ctx).V(2).Info("Acquired kept address", "addressPool", kept.Spec.Pool,
		"block", kept.Name, "pod", klog.KRef(kept.Spec.Namespace, kept.Spec.Pod), "ranges", kept.Spec.Ranges)
	return newBlock(taken), nil
}

// isOutdated reports whether the API server refused a change because the block has changed since it was read.
func isOutdated(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }

// returnKept returns the block of a pod that no longer exists. The caller must have the block lock.
func (a *Allocator) returnKept(ctx context.Context, b *block) error {
	object := b.object.DeepCopy()
	object.Spec.Node, object.ResourceVersion = "", b.version
	if _, err := a.options.API.UpdateBlock(ctx, object); err != nil && !apierrors.IsNotFound(err) {
		a.blocksStale.Store(true)
		return fmt.Errorf("return AddressBlock %s: %w", object.Name, err)
	}
	klog.FromContext(ctx).V(2).Info("Returned kept address", "addressPool", object.Spec.Pool,
		"block", object.Name, "pod", klog.KRef(object.Spec.Namespace, object.Spec.Pod))
	return nil
}

// checkLimit returns an error if an item's namespace has as many addresses as the pool permits.
func (i item) checkLimit(blocks []network.AddressBlock) error {
	limit := i.pool.NamespaceLimit
	if limit == 0 || countIn(i, blocks) < limit {
		return nil
	}
	return fmt.Errorf("AddressPool %s: %w: spec.namespaceLimit is %d, and namespace %s has %d%s: delete pods, or "+
		"raise the limit", i.pool.Name, errLimit, limit, i.consumer.namespace, countIn(i, blocks),
		describeNodes(blocks, func(b *network.AddressBlock) bool { return i.counts(b) }))
}

// exceedsLimit reports whether an item's block exceeds its namespace's limit.
func (i item) exceedsLimit(blocks []network.AddressBlock) bool {
	return i.pool.NamespaceLimit > 0 && countIn(i, blocks) > i.pool.NamespaceLimit
}

// counts reports whether a block counts toward the limit of an item's namespace.
func (i item) counts(b *network.AddressBlock) bool {
	return b.Spec.Pool == i.pool.Name && i.consumer.kind != anyPod && b.Spec.Namespace == i.consumer.namespace
}

// countIn returns how many addresses count toward the limit of an item's namespace.
func countIn(i item, blocks []network.AddressBlock) (n int) {
	for b := range blocks {
		if i.counts(&blocks[b]) {
			n += count(&blocks[b])
		}
	}
	return n
}

// count returns the number of addresses of a block.
func count(b *network.AddressBlock) int {
	return int(addresspool.Count(addressesOf(b)).Int64())
}
