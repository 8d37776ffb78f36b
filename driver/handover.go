package driver

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/driver/lock"
)

// succession orders the plugins that run at once during a rolling update. All
// serve who calls them; only the newest does what nobody called for: keep the
// node as it should be, collect, report again. They may be configured
// differently, and would undo each other's work for ever.
//
// A plugin holds a lock named after the moment it started. One that has died
// holds none.
type succession struct {
	locks lock.Dir
	own   string
	leave func()
}

const pluginLocks = "plugin-"

func enter(locks lock.Dir, instance string) (*succession, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil { // no clock is set back that this reads
		return nil, err
	}
	s := &succession{locks: locks, own: fmt.Sprintf("%s%020d-%s", pluginLocks, now.Nano(), instance)}
	var err error
	s.leave, err = locks.Named(s.own)
	return s, err
}

// others returns the other plugins that live, older or newer ones, and removes
// what is left of those that do not.
func (s *succession) others(newer bool) (names []string) {
	paths, _ := filepath.Glob(filepath.Join(string(s.locks), pluginLocks+"*")) // the pattern is well-formed
	for _, path := range paths {
		name := filepath.Base(path)
		if name == s.own || (name > s.own) != newer {
			continue
		}
		if release, ok, err := s.locks.TryNamed(name); ok {
			s.locks.Remove(name)
			release()
		} else if err == nil {
			names = append(names, name)
		}
	}
	return names
}

// isNewest tells whether what nobody called for is this plugin's to do.
func (s *succession) isNewest() bool { return len(s.others(true)) == 0 }

// askPredecessors is how often a plugin looks whether the last one has ended.
const askPredecessors = 250 * time.Millisecond

// succeed calls do once the plugins that ran before have ended: what they did
// to the last may not be what this one wants.
func (s *succession) succeed(ctx context.Context, do func()) {
	if len(s.others(false)) == 0 {
		return
	}
	tick := time.NewTicker(askPredecessors)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if len(s.others(false)) == 0 {
			klog.FromContext(ctx).Info("The last plugin has ended")
			do()
			return
		}
	}
}
