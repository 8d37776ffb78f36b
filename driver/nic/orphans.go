// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"errors"
	"fmt"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// Orphans implements driver.Attacher. It finds classes, entries of the classifier, and IFB devices. It never returns
// a link: an unneeded link ends with its pod, and a pod can change every property that the plugin could recognize it
// by.
func (k *Kind) Orphans(_ context.Context, shares []record.Share, attachments []attach.Record) ([]driver.Orphan, error) {
	attached, err := k.attachmentsOf(attachments)
	if err != nil {
		return nil, err // an attachment that is not understood may need any object
	}
	classes, classErr := k.orphanedClasses(shares, attached)
	members, memberErr := k.orphanedMembers(attached)
	orphans := append(classes, members...)
	ifbs, ifbErr := k.node.OrphanIFBs()
	for _, name := range ifbs {
		orphans = append(orphans, driver.Orphan{
			Description: "IFB device " + name,
			Remove:      func(context.Context) error { return k.node.RemoveIFB(name) },
		})
	}
	return orphans, errors.Join(classErr, memberErr, ifbErr)
}

func (k *Kind) attachmentsOf(records []attach.Record) (attachments []netdev.Attachment, err error) {
	for _, r := range records {
		if r.Kind != Name && r.Kind != "" { // early records have no kind
			continue
		}
		a, err := k.attachment(r)
		if err != nil {
			return nil, err
		}
		attachments = append(attachments, a)
	}
	return attachments, nil
}

// orphanedClasses finds classes that neither a share nor an attachment uses.
func (k *Kind) orphanedClasses(
	shares []record.Share,
	attachments []netdev.Attachment,
) (orphans []driver.Orphan, failed error) {
	for _, d := range k.sharedDevices() {
		classes, err := k.node.Classes(d.nic.Index)
		if err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		for _, s := range shares {
			if s.Device == d.name {
				delete(classes, s.Number)
			}
		}
		for _, a := range attachments {
			if a.Parent == d.nic.Index {
				delete(classes, a.Minor)
			}
		}
		for class := range classes {
			orphans = append(orphans, driver.Orphan{
				Description: fmt.Sprintf("class %x of NIC %s", class, d.nic.Name),
				Remove:      func(context.Context) error { return k.node.RemoveClass(d.nic.Index, class) },
			})
		}
	}
	return orphans, failed
}

// orphanedMembers finds classifier entries for links that are neither in a record nor in the kernel. A link that is
// only in the kernel belongs to a running pod with a lost record.
func (k *Kind) orphanedMembers(attachments []netdev.Attachment) (orphans []driver.Orphan, err error) {
	members, err := k.node.Members()
	if err != nil {
		return nil, err
	}
	unrecorded := withoutRecord(members, attachments)
	if len(unrecorded) == 0 {
		return nil, nil
	}
	links, err := k.node.Links()
	if err != nil {
		return nil, err
	}
	for _, m := range unrecorded {
		if links[netdev.NewLinkKey(m.Parent, m.MAC)] {
			continue
		}
		orphans = append(orphans, driver.Orphan{
			Description: fmt.Sprintf("classification of %s on link %d", m.MAC, m.Parent),
			Remove:      func(context.Context) error { return k.node.RemoveMember(m) },
		})
	}
	return orphans, nil
}

// withoutRecord returns the members with links that are not in any attachment record.
func withoutRecord(members []classify.Member, attachments []netdev.Attachment) (unrecorded []classify.Member) {
	recorded := map[netdev.LinkKey]bool{}
	for _, a := range attachments {
		recorded[netdev.NewLinkKey(a.Parent, a.MAC)] = true
	}
	for _, m := range members {
		if !recorded[netdev.NewLinkKey(m.Parent, m.MAC)] {
			unrecorded = append(unrecorded, m)
		}
	}
	return unrecorded
}
