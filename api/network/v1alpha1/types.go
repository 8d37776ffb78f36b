// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Identification of the kinds in this package.
const (
	GroupName = "network.dra-shared.dev"
	Version   = "v1alpha1"
	// PoolResource and BlockResource are the resources in URLs.
	PoolResource  = "addresspools"
	BlockResource = "addressblocks"
)

// GroupVersion identifies the API in this package.
var GroupVersion = schema.GroupVersion{Group: GroupName, Version: Version}

// AddressPool is a set of addresses of one IP family for pods' links on a network in the DriverConfig. Each link that
// uses the pool gets its own address. A network with IPv4 and IPv6 has a pool for each.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=drapool
// +kubebuilder:metadata:annotations="helm.sh/resource-policy=keep"
// +kubebuilder:printcolumn:name="Network",type=string,JSONPath=`.spec.network`
// +kubebuilder:printcolumn:name="Subnet",type=string,JSONPath=`.spec.subnet`
// +kubebuilder:printcolumn:name="Default",type=boolean,JSONPath=`.spec.default`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Addresses",type=string,JSONPath=`.status.addresses`
// +kubebuilder:printcolumn:name="Assigned",type=string,JSONPath=`.status.assigned`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.conditions[?(@.status=="False")].message`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type AddressPool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec describes the addresses and who can use them.
	// +required
	Spec AddressPoolSpec `json:"spec"`

	// status is the observed use of the pool.
	// +optional
	Status AddressPoolStatus `json:"status,omitempty"`
}

// AddressPoolSpec describes the addresses of a pool and who can use them. Links keep
// their addresses when the pool changes, so the set of addresses can only grow: to
// remove addresses, create another pool, and delete this one when it is unused.
//
// +kubebuilder:validation:XValidation:rule="self.network == oldSelf.network && self.subnet == oldSelf.subnet",message="network and subnet are immutable because links keep their addresses: create another AddressPool"
// +kubebuilder:validation:XValidation:rule="has(self.gateway) == has(oldSelf.gateway) && (!has(self.gateway) || self.gateway == oldSelf.gateway)",message="gateway is immutable because links keep their routes through it, and because the pool excludes it: create another AddressPool"
// +kubebuilder:validation:XValidation:rule="!has(self.ranges) || has(oldSelf.ranges) && oldSelf.ranges.all(r, r in self.ranges || !(isCIDR(r) ? cidr(r).masked() == cidr(r) && cidr(self.subnet).containsCIDR(r) : r.matches('^[^-]+(-[^-]+)?$') && r.split('-').all(a, isIP(a) && cidr(self.subnet).containsIP(a))))",message="valid ranges can only be added because links keep their addresses: create another AddressPool, and delete this one when it is unused"
// +kubebuilder:validation:XValidation:rule="!has(self.exclude) || has(oldSelf.exclude) && self.exclude.all(r, r in oldSelf.exclude)",message="exclude can only lose entries because links keep their addresses: create another AddressPool, and delete this one when it is unused"
type AddressPoolSpec struct {
	// network is the name of the network in the DriverConfig. The field is immutable.
	// +required
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Network string `json:"network"`

	// default makes the pool serve the claims on the network that do not set addresses or addressPools, and do not
	// lease an address from a DHCP server. If several default pools of one IP family serve a claim's node and
	// namespace, a pool that lists namespaces takes precedence over one for all, then the oldest does.
	// +optional
	Default bool `json:"default,omitempty"`

	// subnet is the network of the addresses, such as 10.20.0.0/16 or fd00:20::/64. The
	// links get its prefix length. The field is immutable.
	// +required
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && string(cidr(self).masked()) == self",message="must be a network without bits beyond its prefix length, such as 10.20.0.0/16 or fd00:20::/64"
	Subnet string `json:"subnet"`

	// ranges lists the addresses of the pool: networks such as 10.20.1.0/24, single addresses, or ranges such as
	// 10.20.1.10-10.20.1.99, at most 32, all in subnet. The default is the whole subnet. An IPv4 subnet's network
	// address and broadcast address are never assigned. Valid entries cannot be removed.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=96
	Ranges []string `json:"ranges,omitempty"`

	// exclude lists addresses that are never assigned, in the format of ranges, at most
	// 64. Entries cannot be added.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=96
	Exclude []string `json:"exclude,omitempty"`

	// reserved lists addresses that the pool assigns only to claims that name them in addresses, in the format of
	// ranges, at most 64. Links with such an address keep it when the list changes.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=96
	Reserved []string `json:"reserved,omitempty"`

	// gateway is an address in subnet that is never assigned, and the next hop of routes that do not name one. The
	// field is immutable.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="must be an IP address, such as 10.20.0.1"
	Gateway string `json:"gateway,omitempty"`

	// routes lists networks that links with an address from the pool reach through the gateway, at most 32. A claim's
	// route to the same destination replaces it. A change affects links that are created later.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=64
	// +kubebuilder:validation:items:XValidation:rule="isCIDR(self) && string(cidr(self).masked()) == self",message="must be a network without bits beyond its prefix length, such as 10.30.0.0/16"
	Routes []string `json:"routes,omitempty"`

	// nameservers lists the network's DNS servers, at most 3. None may be an address that the pool may assign to a pod.
	// The driver reports them in the claim's status and in containers' device metadata; it does not change the pod's
	// DNS configuration. A change affects links that are created later.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=3
	// +kubebuilder:validation:items:MaxLength=64
	// +kubebuilder:validation:items:XValidation:rule="isIP(self)",message="must be an IP address, such as 10.20.0.2"
	Nameservers []string `json:"nameservers,omitempty"`

	// namespaces lists the namespaces where pods can get addresses from the pool, at most 256. The default is all
	// namespaces.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=63
	Namespaces []string `json:"namespaces,omitempty"`

	// namespaceLimit is how many addresses one namespace's pods can have, at least 1. Nodes then take single addresses
	// from the pool, which costs two writes for each pod. The limit does not count addresses that were assigned before
	// it was set. By default, there is no limit.
	// +optional
	// +kubebuilder:validation:Minimum=1
	NamespaceLimit *int32 `json:"namespaceLimit,omitempty"`

	// nodeSelector lists labels that a node must have so that its pods can get addresses from the pool, such as a
	// subnet's zone, at most 8. The default is all nodes. Links keep their addresses when a node's labels change.
	// +optional
	// +kubebuilder:validation:MaxProperties=8
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`

	// blockSize is the number of addresses that a node takes from the pool at a time, a
	// power of two. By default, a node takes a sixteenth of the free addresses, rounded down
	// to a power of two, from 1 to 64: 32 from an unused /22, 8 from an unused /24. Nodes take
	// less when the pool runs short.
	// +optional
	// +kubebuilder:validation:Enum=1;2;4;8;16;32;64;128;256;512;1024
	BlockSize *int32 `json:"blockSize,omitempty"`
}

// AddressPoolStatus is the observed use of a pool.
type AddressPoolStatus struct {
	// addresses is the number of addresses in the pool as a decimal number.
	// +optional
	Addresses string `json:"addresses,omitempty"`

	// assigned is the number of addresses in blocks. A node has some more than its pods use.
	// +optional
	Assigned int64 `json:"assigned"`

	// kept is the number of assigned addresses that are kept for StatefulSet pods.
	// +optional
	Kept int64 `json:"kept"`

	// blocks is the pool's number of AddressBlocks.
	// +optional
	Blocks int64 `json:"blocks"`

	// conditions holds the conditions Ready and Short.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// AddressPoolList is a list of AddressPools.
//
// +kubebuilder:object:root=true
type AddressPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	// items lists the AddressPools.
	Items []AddressPool `json:"items"`
}

// AddressBlock is a part of a pool that one node assigns to its pods. Its name is <network>-<4 or 6>-<first address
// in hexadecimal>. The node's plugin writes its spec. When the node is lost, the controller deletes the block or, if
// a pod keeps the address, empties node.
//
// A block with a pod is the address that this StatefulSet pod keeps. A node has the block only as long as the pod
// runs there; the controller deletes it when the StatefulSet no longer exists.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,shortName=drablock
// +kubebuilder:metadata:annotations="helm.sh/resource-policy=keep"
// +kubebuilder:selectablefield:JSONPath=`.spec.node`
// +kubebuilder:selectablefield:JSONPath=`.spec.network`
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.spec.pool`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.node`
// +kubebuilder:printcolumn:name="Ranges",type=string,JSONPath=`.spec.ranges`
// +kubebuilder:printcolumn:name="Namespace",type=string,JSONPath=`.spec.namespace`
// +kubebuilder:printcolumn:name="Pod",type=string,JSONPath=`.spec.pod`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type AddressBlock struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec describes the block's addresses and the node that assigns them.
	// +required
	Spec AddressBlockSpec `json:"spec"`
}

// AddressBlockSpec describes a block's addresses and the node that assigns them.
//
// +kubebuilder:validation:XValidation:rule="self.network == oldSelf.network && self.pool == oldSelf.pool",message="network and pool are immutable"
// +kubebuilder:validation:XValidation:rule="has(self.__namespace__) == has(oldSelf.__namespace__) && has(self.pod) == has(oldSelf.pod) && has(self.interface) == has(oldSelf.interface)",message="namespace, pod, and interface are immutable"
// +kubebuilder:validation:XValidation:rule="self.node == oldSelf.node || size(self.node) == 0 || size(oldSelf.node) == 0",message="a node must return the block before another one takes it"
// +kubebuilder:validation:XValidation:rule="size(self.node) > 0 || has(self.pod)",message="must name the node, or a pod that keeps the address"
// +kubebuilder:validation:XValidation:rule="has(self.__namespace__) || !has(self.pod) && !has(self.interface)",message="must name the namespace of the pod"
type AddressBlockSpec struct {
	// network is the network of the pool. The field is immutable.
	// +required
	// +kubebuilder:validation:MaxLength=63
	Network string `json:"network"`

	// pool is the name of the AddressPool. The field is immutable.
	// +required
	// +kubebuilder:validation:MaxLength=253
	Pool string `json:"pool"`

	// node is the name of the node that assigns the addresses. It is empty if the block has a pod that is not on any
	// node.
	// +required
	// +kubebuilder:validation:MaxLength=253
	Node string `json:"node"`

	// namespace is the namespace where pods get the addresses, in blocks with a pod and in blocks from a pool with a
	// namespaceLimit. The field is immutable.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable"
	Namespace string `json:"namespace,omitempty"`

	// pod is the name of the StatefulSet pod that keeps the address. The field is immutable.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable"
	Pod string `json:"pod,omitempty"`

	// interface is the interfaceName of the claim that the pod keeps the address for, if the claim sets one. The field
	// is immutable.
	// +optional
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="is immutable"
	Interface string `json:"interface,omitempty"`

	// ranges lists the addresses, each entry as FIRST-LAST, in ascending order. The node
	// returns addresses to the pool by removing them.
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:MaxLength=96
	// +kubebuilder:validation:items:XValidation:rule="self.matches('^[^-]+-[^-]+$') && isIP(self.split('-')[0]) && isIP(self.split('-')[1])",message="must be FIRST-LAST, such as 10.20.1.0-10.20.1.15"
	Ranges []string `json:"ranges"`
}

// AddressBlockList is a list of AddressBlocks.
//
// +kubebuilder:object:root=true
type AddressBlockList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	// items lists the AddressBlocks.
	Items []AddressBlock `json:"items"`
}

// AddToScheme registers this package's kinds with a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &AddressPool{}, &AddressPoolList{}, &AddressBlock{}, &AddressBlockList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
