// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package rtnl

import (
	"errors"

	"github.com/vishvananda/netlink/nl"
)

// Pool is several sockets in one network namespace. The kernel executes the requests of one socket one after the other.
// Use a Pool if the kernel waits after a request, such as the deletion of a link, so that other requests do not wait as
// well.
type Pool struct {
	conns []*Conn
	idle  chan *Conn
}

// OpenPool opens size sockets in the caller's network namespace.
func OpenPool(size int) (*Pool, error) {
	p := &Pool{idle: make(chan *Conn, size)}
	for range size {
		c, err := Open()
		if err != nil {
			return nil, errors.Join(err, p.Close())
		}
		p.conns = append(p.conns, c)
		p.idle <- c
	}
	return p, nil
}

// Do waits for a socket without a request in progress, and calls Conn.Do on it.
func (p *Pool) Do(requests ...*nl.NetlinkRequest) error {
	c := <-p.idle
	defer func() { p.idle <- c }()
	return c.Do(requests...)
}

// Counts returns the sum of the sockets' Counts.
func (p *Pool) Counts() (sum Counts) {
	for _, c := range p.conns {
		sum = sum.Add(c.Counts())
	}
	return sum
}

// Close closes the sockets.
func (p *Pool) Close() (err error) {
	for _, c := range p.conns {
		err = errors.Join(err, c.Close())
	}
	return err
}
