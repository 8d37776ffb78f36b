package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
)

// narrator is the testing.T of stories. Of one that went well it shows the
// headings; those that failed are shown again when all are told, for nobody
// finds them in between.
type narrator struct {
	*testing.T
	failures *failures
}

type failures struct {
	sync.Mutex
	text strings.Builder
}

func narrate(t *testing.T) narrator {
	t.Helper()
	n := narrator{T: t, failures: &failures{}}
	t.Cleanup(func() {
		if text := n.failures.text.String(); text != "" {
			t.Log("what failed, once more:\n" + text)
		}
	})
	return n
}

// Run implements testscript.T.
func (n narrator) Run(name string, f func(testscript.T)) {
	n.T.Run(name, func(t *testing.T) { f(narrator{T: t, failures: n.failures}) })
}

// Verbose implements testscript.T: headings do.
func (n narrator) Verbose() bool { return false }

// Log implements testscript.T, which calls it at the end of a story.
func (n narrator) Log(args ...any) {
	n.Helper()
	n.T.Log(args...)
	if !n.Failed() {
		return
	}
	n.failures.Lock()
	defer n.failures.Unlock()
	fmt.Fprintf(&n.failures.text, "%s:\n%s\n", n.Name(), tail(fmt.Sprint(args...), 60))
}

// tail returns the last lines of a text, each cut where it gets unreadable.
func tail(text string, lines int) string {
	all := strings.Split(strings.TrimSpace(text), "\n")
	all = all[max(0, len(all)-lines):]
	for i, line := range all {
		all[i] = line[:min(len(line), 300)]
	}
	return strings.Join(all, "\n")
}

// state is what one asks for first where a story failed.
func state(ctx context.Context, b *clusterclient.Cluster, namespace string) string {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var s strings.Builder
	for _, q := range []struct {
		lines int
		args  string
	}{
		{15, "get pods,resourceclaims,podgroups.scheduling.dra-shared.dev -n " + namespace},
		{5, "get pods -n dra-shared-system"},
		{15, "get events --sort-by=.metadata.creationTimestamp -n " + namespace},
		{10, "get events --sort-by=.metadata.creationTimestamp -n dra-shared-system"},
		{15, "logs daemonset/dra-shared-plugin -n dra-shared-system"},
	} {
		out, err := b.Kubectl(ctx, strings.Fields(q.args)...)
		if err != nil {
			out += err.Error()
		}
		fmt.Fprintf(&s, "> kubectl %s\n%s\n", q.args, tail(out, q.lines))
	}
	return s.String()
}
