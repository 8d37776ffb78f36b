// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package shape

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Queue is the kernel's name for the kind of queue that shares' frames wait in.
type Queue string

const (
	// FairQueue divides the rate of a share fairly between its flows: a flow that sends
	// little does not wait behind a flow that sends as fast as it can.
	FairQueue Queue = "fq_codel"
	// FIFO is the queue of kernels without FairQueue: all flows wait behind each other.
	FIFO Queue = "bfifo"
)

const (
	// fairQueueMajor is the difference between the major numbers of a class's FairQueue and of
	// its FIFO. The kernel does not change the kind of a queue; a queue with another number
	// replaces it. Major numbers of FIFOs are less than Major.
	fairQueueMajor = 0x1000
	// fairQueueFlows is how many flows a FairQueue distinguishes. Each costs the kernel about
	// 100 bytes, in two queues of each share; its default of 1,024 flows would be 600 MB for
	// 3,000 shares.
	fairQueueFlows = 64
	// fairQueueTarget is the kernel's default for how long frames may wait on average, in µs.
	fairQueueTarget = 5000
)

// Queue returns the kind of the queues of shares. It is FIFO until Setup has found out which queues
// the kernel supports.
func (h *HTB) Queue() Queue {
	if q := h.queue.Load(); q != nil {
		return *q
	}
	return FIFO
}

// tryQueue finds out whether the kernel has FairQueue, unless it did before. It tries the
// queue of frames to drop, and puts its FIFO back.
func (h *HTB) tryQueue(ifb int, t Trees) error {
	if h.queue.Load() != nil {
		return nil
	}
	c := class{major: t.Major(), minor: classDrop, queue: 1, fair: true}
	result := FairQueue
	err := h.failpoints.Do("try fair queue", func() error { return h.conn.Do(c.queueRequest(ifb, FairQueue)) })
	switch {
	case errors.Is(err, unix.ENOENT): // the kernel does not know the kind
		result = FIFO
	case err != nil:
		return fmt.Errorf("try queue %s on link %d: %w", FairQueue, ifb, err)
	default:
		err = h.failpoints.Do("remove fair queue", func() error { return h.conn.Do(c.queueRequest(ifb, FIFO)) })
		if err != nil {
			return err
		}
	}
	h.queue.Store(&result)
	return nil
}

// queueRequest creates the queue of a class, or changes its parameters. It fails with EEXIST if a
// fair queue exists although c.exists is false.
func (c class) queueRequest(dev int, q Queue) *nl.NetlinkRequest {
	if !c.fair {
		q = FIFO
	}
	major, options := c.minor, nl.NewRtAttr(nl.TCA_OPTIONS, nl.Uint32Attr(c.queue))
	if q == FairQueue {
		major, options = c.minor+fairQueueMajor, c.fairQueueOptions()
	}
	flags := unix.NLM_F_CREATE | unix.NLM_F_REPLACE
	if q == FairQueue && !c.exists {
		flags |= unix.NLM_F_EXCL // otherwise the kernel refuses the number of flows, without a specific error
	}
	r := nl.NewNetlinkRequest(unix.RTM_NEWQDISC, flags)
	r.AddData(&nl.TcMsg{
		Family: nl.FAMILY_ALL, Ifindex: int32(dev),
		Handle: netlink.MakeHandle(major, 0), Parent: c.handle(),
	})
	r.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated(string(q))))
	r.AddData(options)
	return r
}

// fairQueueOptions limit a FairQueue to the bytes of the FIFO, which it counts with the kernel's
// overhead for each packet.
func (c class) fairQueueOptions() *nl.RtAttr {
	const overhead = 2 // as a factor
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	if !c.exists {
		options.AddRtAttr(nl.TCA_FQ_CODEL_FLOWS, nl.Uint32Attr(fairQueueFlows))
	}
	options.AddRtAttr(nl.TCA_FQ_CODEL_MEMORY_LIMIT, nl.Uint32Attr(uint32(min(uint64(c.queue)*overhead, 1<<31))))
	options.AddRtAttr(nl.TCA_FQ_CODEL_TARGET, nl.Uint32Attr(c.target()))
	options.AddRtAttr(nl.TCA_FQ_CODEL_ECN, nl.Uint32Attr(1))
	return options
}

// target returns the time that frames may wait on average, in µs: the default, or the time
// that two full Ethernet frames take if that is longer.
func (c class) target() uint32 {
	const frames = 2 * 1514 * bitsPerByte * 1e6
	return uint32(max(fairQueueTarget, frames/max(c.ceil, bitsPerByte)))
}
