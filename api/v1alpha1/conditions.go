// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// Types of conditions. They appear in status.devices[].conditions of a ResourceClaim.
const (
	// ConditionReady reports whether the pods can use the share: each pod that
	// started has its link, or the device works.
	ConditionReady = "Ready"
	// ConditionBandwidthEnforced reports whether the kernel enforces the share's granted bandwidth.
	ConditionBandwidthEnforced = "BandwidthEnforced"
	// ConditionIdentityEnforced reports whether the kernel drops the share's frames that do not carry its links'
	// addresses.
	ConditionIdentityEnforced = "IdentityEnforced"
	// ConditionMemoryEnforced reports whether the kernel enforces an accelerator's granted memory.
	ConditionMemoryEnforced = "MemoryEnforced"
	// ConditionHeld reports whether the object named in the annotation scheduling.dra-shared.dev/reserved-for keeps the
	// claim allocated.
	ConditionHeld = "Held"
)

// Reasons of the condition Ready. It can also have IdentityEnforced's reason LinkBlocked.
const (
	// ReasonAttached (True) means that every pod that started has its link.
	ReasonAttached = "Attached"
	// ReasonPrepared means that the share is prepared. For a NIC (False), no container
	// that references the claim has started yet; for other devices (True), containers
	// find the device.
	ReasonPrepared = "Prepared"
	// ReasonNotReferenced (False) means that a pod does not get a link because none of its containers references the
	// claim in resources.claims.
	ReasonNotReferenced = "NotReferenced"
	// ReasonAttachFailed (False) means that the last container to start failed because its link could not be attached.
	ReasonAttachFailed = "AttachFailed"
	// ReasonLinkChanged (False) means that a link differs from what was attached,
	// for example because it is down in the pod.
	ReasonLinkChanged = "LinkChanged"
	// ReasonLinkGone (False) means that a link no longer exists in its pod.
	ReasonLinkGone = "LinkGone"
	// ReasonDuplicateAddress (False) means that another host on the network has a link's address. The message contains
	// the host's MAC address.
	ReasonDuplicateAddress = "DuplicateAddress"
	// ReasonAddressLost (False) means that a link uses an address that the node no longer owns because its AddressBlock
	// was deleted. Another node may use the address. With enforcement Shape and identity Enforce, the link is blocked.
	ReasonAddressLost = "AddressLost"
	// ReasonLeaseExpired (False) means that a link has lost its address because its lease has ended and no DHCP server
	// leases another one. The link stays in the pod.
	ReasonLeaseExpired = "LeaseExpired"
	// ReasonLinkDown (False) means that the NIC has no carrier, or regained it
	// only seconds ago.
	ReasonLinkDown = "LinkDown"
	// ReasonDeviceGone (False) means that the device is missing from the node or
	// from the driver's configuration.
	ReasonDeviceGone = "DeviceGone"
	// ReasonDeviceChanged (False) means that a device node of the accelerator no longer exists or now belongs to
	// another device. The claim's containers still get the old device node: delete the claim's pods.
	ReasonDeviceChanged = "DeviceChanged"
	// ReasonDeviceUnusable (False) means that the device is configured and on the node,
	// but the plugin cannot share it. The message states the cause and the remedy.
	ReasonDeviceUnusable = "DeviceUnusable"
	// ReasonHookNotRun (False) means that nothing is attached to a running container that references the claim because
	// its runtime did not run the hook.
	ReasonHookNotRun = "HookNotRun"
	// ReasonNotRunning (False) means that no pod that uses a share of a fabric is running yet.
	ReasonNotRunning = "NotRunning"
)

// Reasons of the condition BandwidthEnforced. It can also have Ready's reasons DeviceGone, DeviceUnusable, LinkDown,
// and LinkGone.
const (
	// ReasonNetnsCookie (True) means that the kernel enforces the grant and identifies the sender by the sending
	// socket's network namespace and the source address.
	ReasonNetnsCookie = "NetnsCookie"
	// ReasonMAC (False) means that the kernel enforces the grant, but identifies
	// the sender by the source address alone, which a pod with CAP_NET_RAW can
	// forge.
	ReasonMAC = "MAC"
	// ReasonAdminAccess (True) means that the request has admin access, so its link does not have a grant to enforce.
	ReasonAdminAccess = "AdminAccess"
	// ReasonEnforcementNone (False) means that the network's configuration turns enforcement off.
	ReasonEnforcementNone = "EnforcementNone"
	// ReasonLinkTooSlow (False) means that the NIC is slower than when the grants were allocated, so the kernel
	// guarantees less than the grant.
	ReasonLinkTooSlow = "LinkTooSlow"
	// ReasonNotClassified (False) means that the link's frames do not select the share's class.
	ReasonNotClassified = "NotClassified"
	// ReasonFramesMissed (False) means that the NIC sends or receives frames that do
	// not reach the driver's program, for example because another program takes
	// them first.
	ReasonFramesMissed = "FramesMissed"
	// ReasonRateDiffers (False) means that the rates in the kernel differ from
	// the grant.
	ReasonRateDiffers = "RateDiffers"
)

// Reasons of the condition IdentityEnforced. It can also have the reasons DeviceGone,
// DeviceUnusable, LinkDown, LinkGone, and EnforcementNone.
const (
	// ReasonIdentityEnforced (True) means that the kernel drops such frames.
	ReasonIdentityEnforced = "Enforced"
	// ReasonIdentityAudited (False) means that the kernel only counts such frames because the network has identity
	// Audit.
	ReasonIdentityAudited = "Audited"
	// ReasonIdentityOff (False) means that the network's configuration turns the check off.
	ReasonIdentityOff = "Off"
	// ReasonAttachedEarlier (False) means that an earlier release attached the link. Its frames are only counted until
	// its pod is recreated.
	ReasonAttachedEarlier = "AttachedEarlier"
	// ReasonIdentityUnsupported (False) means that the kernel does not load the
	// program that checks frames.
	ReasonIdentityUnsupported = "Unsupported"
	// ReasonLinkBlocked (False) means that the pod changed its link in a way that would let it receive other pods'
	// frames or delay their broadcasts. The link is blocked until that is reverted.
	ReasonLinkBlocked = "LinkBlocked"
)

// Reasons of the condition MemoryEnforced.
const (
	// ReasonContainerLimited (True) means that the cgroup controller dmem limits
	// each container to the granted memory.
	ReasonContainerLimited = "ContainerLimited"
	// ReasonMemoryNotEnforced (False) means that nothing on the node limits the
	// memory that the containers use.
	ReasonMemoryNotEnforced = "MemoryNotEnforced"
)

// Reasons of the condition Held.
const (
	// ReasonHolderFound (True) means that the holder exists and keeps the claim
	// allocated.
	ReasonHolderFound = "HolderFound"
	// ReasonHolderMissing (False) means that the holder does not exist in the claim's namespace.
	ReasonHolderMissing = "HolderMissing"
	// ReasonHolderUnknown (False) means that the cluster does not serve the holder's API group and resource.
	ReasonHolderUnknown = "HolderUnknown"
	// ReasonHolderForbidden (False) means that the controller is not permitted to
	// get, list, and watch the holder's resource.
	ReasonHolderForbidden = "HolderForbidden"
	// ReasonHolderInvalid (False) means that the annotation's value is not <API group>/<resource>/<name>.
	ReasonHolderInvalid = "HolderInvalid"
	// ReasonNoRoom (False) means that the holder cannot be added to the claim's status.reservedFor because the list is
	// full.
	ReasonNoRoom = "NoRoom"
)

// Reasons of events. When a condition becomes False, the plugin emits a Warning event on the share's pods, except for
// the reason Prepared, and the controller emits a Warning event on the claim if the condition is Held. Such an event
// has the condition's reason. The plugin emits AttachFailed for each failed attempt. Other events have their own
// reasons.
const (
	// EventReasonRecovered (Normal) means that a condition of one of the pod's shares became True again after a Warning
	// event other than AttachFailed.
	EventReasonRecovered = "SharedDeviceRecovered"
	// EventReasonDeviceUnusable (Warning, on the node) means that the plugin cannot share a configured device.
	EventReasonDeviceUnusable = ReasonDeviceUnusable
	// EventReasonDeviceUsable (Normal, on the node) means that the plugin can share the device
	// again.
	EventReasonDeviceUsable = "DeviceUsable"
	// EventReasonLinksHidden (Warning, on the node) means that a NIC accepts MAC addresses that no link visible to the
	// node has. Either pods have hidden links from the node, and could receive other pods' frames, or programs with
	// CAP_NET_RAW have added addresses to their pods' links. All of the NIC's pods see random source MAC addresses
	// until EventReasonLinksVisible.
	EventReasonLinksHidden = "LinksHidden"
	// EventReasonLinksVisible (Normal, on the node) means that a NIC's pods see source MAC addresses again.
	EventReasonLinksVisible = "LinksVisible"
	// EventReasonLinksRefused (Warning, on the node) means that a shared NIC carries the frames of links on the node
	// with another MAC address than the NIC's, such as a bridge for virtual machines on one of its VLANs. The identity
	// checks drop these frames.
	EventReasonLinksRefused = "LinksRefused"
	// EventReasonLinksAllowed (Normal, on the node) means that EventReasonLinksRefused no longer applies.
	EventReasonLinksAllowed = "LinksAllowed"
	// EventReasonLeasesNotRenewed (Warning, on the node) means that pods' links lease their addresses from a DHCP
	// server, and the plugin cannot renew the leases because plugin.dhcp was set to false. The links lose their
	// addresses when the leases end.
	EventReasonLeasesNotRenewed = "LeasesNotRenewed"
	// EventReasonLeasesRenewed (Normal, on the node) means that EventReasonLeasesNotRenewed no longer applies.
	EventReasonLeasesRenewed = "LeasesRenewed"
	// EventReasonFeaturesDisabled (Warning, on the node) means that the API server dropped fields of the ResourceSlices
	// because the cluster's feature gates are off.
	EventReasonFeaturesDisabled = DegradedFeaturesDisabled
	// EventReasonFeaturesEnabled (Normal, on the node) means that the API server stores all
	// fields of the ResourceSlices after it dropped some.
	EventReasonFeaturesEnabled = "FeaturesEnabled"
	// EventReasonSlicesRefused (Warning, on the node) means that the API server refuses the plugin's ResourceSlices,
	// for example because RBAC or an admission policy denies them.
	EventReasonSlicesRefused = DegradedSlicesRefused
	// EventReasonSlicesStored (Normal, on the node) means that the API server stores the ResourceSlices after refusing
	// them.
	EventReasonSlicesStored = "SlicesStored"
	// EventReasonHandoverRefused (Warning, on the node) means that a new plugin does not take over because it cannot
	// serve all devices that the running one serves.
	EventReasonHandoverRefused = "HandoverRefused"
	// EventReasonHandoverCompleted (Normal, on the node) means that the new plugin has taken over
	// after EventReasonHandoverRefused.
	EventReasonHandoverCompleted = "HandoverCompleted"
	// EventReasonHookMissing (Warning, on the node) means that the hook is missing or cannot run, so containers with
	// shares do not start.
	EventReasonHookMissing = "HookMissing"
	// EventReasonHookInstalled (Normal, on the node) means that the hook is installed and can run after
	// EventReasonHookMissing.
	EventReasonHookInstalled = "HookInstalled"
	// EventReasonMetricsNotServed (Warning, on the node) means that the plugin cannot serve its metrics, for example
	// because another program uses the port. It still serves claims.
	EventReasonMetricsNotServed = "MetricsNotServed"
	// EventReasonMetricsServed (Normal, on the node) means that the plugin serves its metrics
	// after EventReasonMetricsNotServed.
	EventReasonMetricsServed = "MetricsServed"
)

// Actions of events.
const (
	// EventActionShare is the action of events about a share.
	EventActionShare = "Share"
	// EventActionServe is the action of events about a plugin and its devices.
	EventActionServe = "Serve"
	// EventActionHold is the action of events about a claim's holder.
	EventActionHold = "Hold"
)
