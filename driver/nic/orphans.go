package nic

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// Orphans implements driver.Attacher: classes, entries of the classifier and
// IFB devices. Links are never among them: one that nobody needs goes with its
// pod, and nothing that a pod can change proves that it is ours.
func (k *Kind) Orphans(_ context.Context, shares []record.Share, attached []attach.Record) (orphans []driver.Orphan, err error) {
	classes, classErr := k.orphanClasses(shares, attached)
	members, memberErr := k.orphanMembers(attached)
	ifbs, ifbErr := k.node.OrphanIFBs()
	orphans = append(classes, members...)
	for _, name := range ifbs {
		orphans = append(orphans, driver.Orphan{What: "IFB device " + name, Remove: func(context.Context) error { return k.node.RemoveIFB(name) }})
	}
	return orphans, errors.Join(classErr, memberErr, ifbErr)
}

func (k *Kind) orphanClasses(shares []record.Share, attached []attach.Record) (orphans []driver.Orphan, failed error) {
	for _, d := range k.present() {
		classes, err := k.node.Classes(d.nic.Index)
		if err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		for _, s := range shares {
			if s.Device == d.name {
				delete(classes, s.Class)
			}
		}
		for _, a := range attached {
			if a.Link.Parent == d.nic.Index {
				delete(classes, a.Class)
			}
		}
		for class := range classes {
			orphans = append(orphans, driver.Orphan{
				What:   fmt.Sprintf("class %x of NIC %s", class, d.nic.Name),
				Remove: func(context.Context) error { return k.node.RemoveClass(d.nic.Index, class) },
			})
		}
	}
	return orphans, failed
}

// orphanMembers are entries of the classifier for links that neither a record
// nor the kernel knows. A link that only the kernel knows belongs to a pod that
// runs, and whose record is lost.
func (k *Kind) orphanMembers(attached []attach.Record) (orphans []driver.Orphan, err error) {
	members, err := k.node.Members()
	if err != nil {
		return nil, err
	}
	known := map[netdev.LinkKey]bool{}
	for _, a := range attached {
		if mac, err := net.ParseMAC(a.Link.MAC); err == nil {
			known[netdev.NewLinkKey(a.Link.Parent, mac)] = true
		}
	}
	var unknown []classify.Member
	for _, m := range members {
		if !known[netdev.NewLinkKey(m.Parent, m.MAC)] {
			unknown = append(unknown, m)
		}
	}
	if len(unknown) == 0 {
		return nil, nil
	}
	links, err := k.node.Links()
	if err != nil {
		return nil, err
	}
	for _, m := range unknown {
		if links[netdev.NewLinkKey(m.Parent, m.MAC)] {
			continue
		}
		orphans = append(orphans, driver.Orphan{
			What:   fmt.Sprintf("classification of %s on link %d", m.MAC, m.Parent),
			Remove: func(context.Context) error { return k.node.RemoveMember(m) },
		})
	}
	return orphans, nil
}

// present are the NICs that are there.
func (k *Kind) present() (devices []*device) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, d := range k.devices {
		if !d.absent && d.network != nil {
			devices = append(devices, d)
		}
	}
	return devices
}
