// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package measure has what tests and benchmarks share to measure rates, latencies, and processor time.
package measure

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

const (
	// maxAttempts is how often a test measures. Pods that have too little processor time
	// send and receive less than they may.
	maxAttempts = 4
	// stolenLimit is the share of the processors' time above which an attempt does not count,
	// because the host of this virtual machine used the time for others: the kernel then
	// releases frames late, and no limit is reached.
	stolenLimit = 0.03
	// stolenTimeout limits for how long attempts do not count.
	stolenTimeout = 3 * time.Minute
)

// Attempts counts attempts to reach a rate. The zero value is ready to use. Use it only for rates below a grant: a rate
// above the grant is immediately an error.
type Attempts struct {
	counted int
	start   time.Time
	before  processorTime // at the start of the last attempt
}

// Next reports whether another attempt may follow.
func (a *Attempts) Next() bool {
	now := readProcessorTime()
	switch {
	case a.start.IsZero():
		a.start = time.Now()
	case time.Since(a.start) > stolenTimeout || now.stolenSince(a.before) <= stolenLimit:
		a.counted++
	}
	a.before = now
	return a.counted < maxAttempts
}

// processorTime is the time of all processors since the start of the machine, in ticks.
type processorTime struct{ total, idle, stolen float64 }

// BusyTime returns how long the machine's processors have worked since its start.
func BusyTime() time.Duration {
	const ticksPerSecond = 100 // USER_HZ; see proc_stat(5)
	p := readProcessorTime()
	return time.Duration((p.total - p.idle - p.stolen) / ticksPerSecond * float64(time.Second))
}

// ProcessTime returns the processor time that a process has used.
func ProcessTime(pid int) (time.Duration, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// Fields 14 and 15 of proc_pid_stat(5), in units of 1/100 s. The name, field 2, may contain spaces.
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	user, userErr := strconv.Atoi(fields[11])
	system, systemErr := strconv.Atoi(fields[12])
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(userErr, systemErr)
}

// stolenSince returns the share of the time since before that the host did not give to this
// machine.
func (p processorTime) stolenSince(before processorTime) float64 {
	return (p.stolen - before.stolen) / max(p.total-before.total, 1)
}

// readProcessorTime reads /proc/stat; see proc_stat(5).
func readProcessorTime() (p processorTime) {
	raw, err := os.ReadFile("/proc/stat")
	if err != nil {
		return p // all attempts count
	}
	return parseProcessorTime(string(raw))
}

func parseProcessorTime(stat string) (p processorTime) {
	line, _, _ := strings.Cut(stat, "\n")
	const idle, ioWait, stolen = 4, 5, 8 // user nice system idle iowait irq softirq steal guest guest_nice
	for i, field := range strings.Fields(line) {
		ticks, err := strconv.ParseFloat(field, 64)
		if err != nil || i > stolen {
			continue // the name of the line, and guest times, which user and nice include
		}
		p.total += ticks
		switch i {
		case idle, ioWait:
			p.idle += ticks
		case stolen:
			p.stolen = ticks
		}
	}
	return p
}
