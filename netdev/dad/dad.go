// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package dad detects duplicate addresses: it probes the network of a NIC for other hosts with an
// address that a link has or is about to get (RFC 5227 for IPv4, RFC 4862 section 5.4 for IPv6).
//
// It sends the probes from the NIC, in the node's namespace, so it can probe before the link exists. The probes do not
// contain a sender address, so hosts on the network do not learn a wrong MAC address from them. frames.go builds and
// parses the frames, socket.go sends and receives them.
package dad

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
)

// NIC is the NIC on the probed network.
type NIC struct {
	Index int // interface index
	MAC   net.HardwareAddr
}

// Target is an address that a link has or is about to get.
type Target struct {
	Address netip.Addr
	// MAC is the link's MAC address. The link's own answers do not count.
	MAC net.HardwareAddr
}

// probes is the number of probes that Detect sends for each address, because a frame may get lost.
const probes = 2

// Detect returns the MAC addresses of other hosts that have an address of a target. It
// returns after wait, or as soon as each address has an answer. It needs CAP_NET_RAW.
func Detect(ctx context.Context, nic NIC, targets []Target, wait time.Duration) (
	found map[netip.Addr]net.HardwareAddr, err error,
) {
	// The sockets belong to the namespace of the thread that opens them.
	var queries []*query
	for _, f := range []family{ipv4, ipv6} {
		q := newQuery(f, nic, targets)
		if len(q.targets) == 0 {
			continue
		}
		if q.socket, err = f.open(nic); err != nil {
			return nil, fmt.Errorf("detect duplicate addresses: %w", err)
		}
		defer q.socket.Close()
		queries = append(queries, q)
	}
	var group errgroup.Group
	for _, q := range queries {
		group.Go(func() error { return q.run(ctx, wait) })
	}
	if err := group.Wait(); err != nil {
		return nil, fmt.Errorf("detect duplicate addresses: %w", err)
	}
	found = map[netip.Addr]net.HardwareAddr{}
	for _, q := range queries {
		maps.Copy(found, q.found)
	}
	return found, nil
}

// query probes the addresses of one family.
type query struct {
	family  family
	nic     NIC
	targets map[netip.Addr]Target
	socket  *os.File
	found   map[netip.Addr]net.HardwareAddr
}

// newQuery returns a query for the targets of a family.
func newQuery(f family, nic NIC, targets []Target) *query {
	q := &query{family: f, nic: nic, targets: map[netip.Addr]Target{}, found: map[netip.Addr]net.HardwareAddr{}}
	for _, t := range targets {
		if address := t.Address.Unmap(); address.Is4() == f.is4 {
			q.targets[address] = t
		}
	}
	return q
}

// run probes each address, and collects the answers.
func (q *query) run(ctx context.Context, wait time.Duration) error {
	start := time.Now()
	for i := range probes {
		for address := range q.targets {
			if _, known := q.found[address]; known {
				continue
			}
			if _, err := q.socket.Write(q.family.probe(q.nic.MAC, address)); err != nil {
				return fmt.Errorf("probe address %s: %w", address, err)
			}
		}
		if err := q.collect(ctx, start.Add(wait*time.Duration(i+1)/probes)); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// collect receives answers until a time, until ctx ends, or until all have arrived.
func (q *query) collect(ctx context.Context, until time.Time) error {
	if err := q.socket.SetReadDeadline(until); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = q.socket.SetReadDeadline(time.Unix(1, 0)) })()
	frame := make([]byte, maxFrame)
	for len(q.found) < len(q.targets) {
		n, err := q.socket.Read(frame)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		q.add(frame[:n])
	}
	return nil
}

// add adds the sender of a frame to found if it claims a probed address.
func (q *query) add(frame []byte) {
	address, mac, ok := q.family.parse(frame)
	target, asked := q.targets[address]
	if ok && asked && !bytes.Equal(mac, target.MAC) && !bytes.Equal(mac, q.nic.MAC) {
		q.found[address] = mac
	}
}
