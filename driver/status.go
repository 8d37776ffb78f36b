package driver

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// Conditions of a share in its claim's status.
const (
	// ConditionReady: the pods that started have their links, or the device
	// that containers are to find is there.
	ConditionReady = "Ready"
	// ConditionBandwidthEnforced: the kernel holds the share to its grant.
	ConditionBandwidthEnforced = "BandwidthEnforced"
	// ConditionMemoryEnforced: the same, of an accelerator's memory.
	ConditionMemoryEnforced = "MemoryEnforced"
)

// Reasons of ConditionReady. Kinds have further ones.
const (
	ReasonAttached      = "Attached"      // True
	ReasonPrepared      = "Prepared"      // no container that names the claim has started yet
	ReasonNotReferenced = "NotReferenced" // and none will: no container names it
	ReasonAttachFailed  = "AttachFailed"  // the last container to start was refused
	ReasonLinkChanged   = "LinkChanged"   // a link is not as it was attached
)

// What a row may hold, by the API's validation and with room to spare.
const (
	maxMessage   = 1024
	maxListed    = 8 // pods that a summary names
	maxPodIPs    = 4 // addresses of each
	maxAddresses = 16
)

// statusRow is the status of one share: pure.
func statusRow(driver string, share shareState) (resourceapi.AllocatedDeviceStatus, error) {
	links, failed := share.links, share.failed
	row := resourceapi.AllocatedDeviceStatus{Driver: driver, Pool: share.Pool, Device: share.Device}
	if share.ShareID != "" {
		row.ShareID = ptr.To(string(share.ShareID))
	}
	if share.conditions != nil {
		row.Conditions = share.conditions
		return row, nil
	}
	row.Conditions = []metav1.Condition{readyCondition(share)}
	if len(links) > 0 {
		row.Conditions = append(row.Conditions, enforcedCondition(links))
	}
	var err error
	switch len(links) {
	case 0:
	case 1:
		row.NetworkData = networkData(links[0].State)
		row.Data, err = rawExtension(linkData(links[0].State))
	default:
		row.Data, err = rawExtension(summarize(links, failed))
	}
	return row, err
}

func readyCondition(share shareState) metav1.Condition {
	links, failed := share.links, share.failed
	slices.Sort(failed)
	c := metav1.Condition{Type: ConditionReady, Status: metav1.ConditionFalse}
	changed := slices.IndexFunc(links, func(l linkState) bool { return !l.Attached })
	switch {
	case len(failed) > 0:
		c.Reason, c.Message = ReasonAttachFailed, strings.Join(failed, "; ")
	case changed >= 0:
		l := links[changed]
		c.Reason, c.Message = l.Reason, fmt.Sprintf("pod %s/%s: %s", l.pod.Namespace, l.pod.Name, l.Message)
	case len(share.unreferenced) > 0:
		pod := share.unreferenced[0]
		c.Reason = ReasonNotReferenced
		c.Message = fmt.Sprintf("pod %s/%s has the claim, and none of its containers names it in resources.claims: its link is never made; name it there, and create the pod anew", pod.Namespace, pod.Name)
	case len(links) == 0:
		c.Reason, c.Message = ReasonPrepared, "no container that names this claim in resources.claims has started on the node yet"
	default:
		c.Status, c.Reason = metav1.ConditionTrue, ReasonAttached
		c.Message = fmt.Sprintf("attached to %d pod(s)", len(links))
	}
	c.Message = truncate(c.Message, maxMessage)
	return c
}

// enforcedCondition is that of the link that is worst off.
func enforcedCondition(links []linkState) metav1.Condition {
	worst := links[0].Enforced
	for _, l := range links {
		if !l.Enforced.Holds {
			worst = l.Enforced
			break
		}
	}
	c := metav1.Condition{Type: ConditionBandwidthEnforced, Status: metav1.ConditionFalse, Reason: worst.Reason, Message: truncate(worst.Message, maxMessage)}
	if worst.Holds {
		c.Status = metav1.ConditionTrue
	}
	return c
}

func truncate(text string, length int) string {
	if len(text) <= length {
		return text
	}
	return strings.ToValidUTF8(text[:length-len("...")], "") + "..."
}

func networkData(s State) *resourceapi.NetworkDeviceData {
	return &resourceapi.NetworkDeviceData{
		InterfaceName:   s.Interface,
		HardwareAddress: s.MAC,
		IPs:             s.Addresses[:min(len(s.Addresses), maxAddresses)],
	}
}

// The data of a share with one link: a CNI result (CNI specification 1.1.0,
// "ADD Success"), and what the kernel enforces.
type (
	cniResult struct {
		CNIVersion string         `json:"cniVersion"`
		Interfaces []cniInterface `json:"interfaces"`
		IPs        []cniIP        `json:"ips,omitempty"`
		Routes     []cniRoute     `json:"routes,omitempty"`
		Bandwidth  *bandwidth     `json:"bandwidth,omitempty"`
	}
	cniInterface struct {
		Name string `json:"name"`
		MAC  string `json:"mac"`
		MTU  int    `json:"mtu"`
	}
	cniIP struct {
		Address   string `json:"address"`
		Interface int    `json:"interface"`
	}
	cniRoute struct {
		Destination string `json:"dst"`
		Gateway     string `json:"gw,omitempty"`
	}
	// bandwidth in bits per second, read back from the kernel's classes.
	bandwidth struct {
		Send    rates `json:"send"`
		Receive rates `json:"receive"`
	}
	rates struct {
		Guaranteed uint64 `json:"guaranteed"`
		Ceiling    uint64 `json:"ceiling"`
	}
)

const cniVersion = "1.1.0"

func linkData(s State) cniResult {
	result := cniResult{CNIVersion: cniVersion, Interfaces: []cniInterface{{Name: s.Interface, MAC: s.MAC, MTU: s.MTU}}, Bandwidth: bandwidthOf(s)}
	for _, a := range s.Addresses[:min(len(s.Addresses), maxAddresses)] {
		result.IPs = append(result.IPs, cniIP{Address: a})
	}
	for _, r := range s.Routes {
		result.Routes = append(result.Routes, cniRoute(r))
	}
	return result
}

func bandwidthOf(s State) *bandwidth {
	e := s.Enforced
	if e.SendCeil == 0 && e.ReceiveCeil == 0 {
		return nil
	}
	return &bandwidth{Send: rates{e.SendFloor, e.SendCeil}, Receive: rates{e.ReceiveFloor, e.ReceiveCeil}}
}

// summary is the data of a share with several links.
type summary struct {
	Version   string        `json:"version"`
	Pods      int           `json:"pods"`
	Attached  int           `json:"attached"`
	Failed    int           `json:"failed"`
	First     []podLinkData `json:"first"`
	Truncated bool          `json:"truncated"`
	Bandwidth *bandwidth    `json:"bandwidth,omitempty"`
}

type podLinkData struct {
	Pod       string   `json:"pod"`
	Interface string   `json:"interface"`
	MAC       string   `json:"mac"`
	IPs       []string `json:"ips,omitempty"`
}

const summaryVersion = "v1alpha1"

func summarize(links []linkState, failed []string) summary {
	slices.SortFunc(links, func(a, b linkState) int { return strings.Compare(a.pod.Name+a.pod.UID, b.pod.Name+b.pod.UID) })
	s := summary{Version: summaryVersion, Pods: len(links) + len(failed), Failed: len(failed), Bandwidth: bandwidthOf(links[0].State), Truncated: len(links) > maxListed}
	for i, l := range links {
		if l.Attached {
			s.Attached++
		}
		if i < maxListed {
			s.First = append(s.First, podLinkData{Pod: l.pod.Namespace + "/" + l.pod.Name, Interface: l.Interface, MAC: l.MAC, IPs: l.Addresses[:min(len(l.Addresses), maxPodIPs)]})
		}
	}
	return s
}
