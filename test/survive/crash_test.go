package survive

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// Every step of the way of a claim is a moment at which the plugin may die:
// just before it, or when it is done and nobody has been told. Which steps
// there are is not written here: the first life of a share is recorded.
func TestAPluginThatDiesAtAnyStep(t *testing.T) {
	for _, tc := range []struct {
		shares, every int
	}{
		{shares: 1, every: 1},
		{shares: 50, every: 211}, // CRASH_EVERY=1 takes all of them: more than an hour
	} {
		if n, err := strconv.Atoi(os.Getenv("CRASH_EVERY")); err == nil && tc.shares > 1 {
			tc.every = n
		}
		t.Run(fmt.Sprintf("%d shares", tc.shares), func(t *testing.T) {
			w := newWorld(t)
			steps := w.steps(tc.shares)
			t.Logf("%d steps: %s", len(steps), strings.Join(steps[:min(len(steps), 40)], ", "))
			tried := 0
			for i := 0; i < 2*len(steps); i += tc.every {
				at, before := steps[i/2], i%2 == 0
				when := map[bool]string{true: "before", false: "after"}[before]
				if !w.life(tc.shares, func(c *pluginConfig) { c.Kill, c.Before = at, before }) {
					t.Logf("the plugin did not come to %s a second time", at)
				}
				tried++
				if t.Failed() {
					t.Fatalf("%s %s", when, at)
				}
			}
			t.Logf("killed at %d moments of %d", tried, 2*len(steps))
		})
	}
}

// steps records what a plugin does in one life of so many shares.
func (w *world) steps(shares int) []string {
	w.t.Helper()
	file := filepath.Join(w.dir, "steps")
	w.life(shares, func(c *pluginConfig) { c.Steps = file })
	raw, err := os.ReadFile(file)
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(raw)), "\n")
}

// life starts a plugin, takes so many claims through prepare, attach, report,
// detach and unprepare, whatever the plugin does meanwhile, and checks what is
// asked of it. It tells whether the plugin died on the way.
func (w *world) life(shares int, change func(*pluginConfig)) (died bool) {
	w.t.Helper()
	w.kill()
	w.asNew()
	w.start(change)
	first := w.process
	var claims []*resourceapi.ResourceClaim
	for i := range shares {
		claims = append(claims, w.claim(fmt.Sprintf("c%d-%d", i, w.instance)))
	}
	w.surviving(func(ctx context.Context) error { return w.prepare(ctx, claims...) })
	// Some claims have a second pod, which goes earlier.
	stays := w.pods(len(claims))
	var goes []*sandbox
	for i := 0; i < len(claims); i += 10 {
		goes = append(goes, w.sandbox("goes-"+claims[i].Name))
	}
	links := w.attachAll(claims, goes, stays)
	for _, c := range claims {
		w.surviving(func(ctx context.Context) error { return w.reported(ctx, c, driver.ReasonAttached) })
	}
	for _, s := range goes {
		s.end()
	}
	w.surviving(func(context.Context) error { return w.attachedPods(shares) })
	// Again, as after a restart of the kubelet: nothing changes.
	w.surviving(func(ctx context.Context) error { return w.prepare(ctx, claims...) })
	for i, s := range stays {
		if now, err := s.link(); err != nil || now != links[i] {
			w.t.Errorf("pod %s had link %d, and has %d now: %v", s.name, links[i], now, err)
		}
	}
	w.surviving(func(ctx context.Context) error { return w.classified(stays) })
	w.surviving(func(ctx context.Context) error { return w.unprepare(ctx, claims...) })
	for _, s := range stays {
		if now, err := s.link(); err != nil || now != 0 {
			w.t.Errorf("pod %s has link %d after unprepare, %v", s.name, now, err)
		}
	}
	w.surviving(func(context.Context) error { return w.nothingLeft() })
	for _, c := range claims {
		if err := w.api.Client.ResourceV1().ResourceClaims(namespace).Delete(w.t.Context(), c.Name, metav1.DeleteOptions{}); err != nil {
			w.t.Error(err)
		}
	}
	return w.process != first
}

// asNew takes away what plugins leave for the next: the hook, and queues and
// programs of the NIC.
func (w *world) asNew() {
	w.t.Helper()
	if err := errors.Join(os.RemoveAll(filepath.Join(w.dir, "hook")), os.MkdirAll(filepath.Join(w.dir, "hook"), 0o700)); err != nil {
		w.t.Fatal(err)
	}
	node, err := netdev.NewNode(netdev.Options{BPFFS: w.bpffs})
	if err != nil {
		w.t.Fatal(err)
	}
	defer node.Close()
	if _, err := node.Leave("nic0", nstest.Find(w.t, "nic0").Index); err != nil {
		w.t.Fatal(err)
	}
}

// pods returns so many sandboxes. They serve one life after the other.
func (w *world) pods(n int) []*sandbox {
	for len(w.stay) < n {
		w.stay = append(w.stay, w.sandbox("stays-"+strconv.Itoa(len(w.stay))))
	}
	return w.stay[:n]
}

// attachAll runs the hooks of all pods, as often as the kubelet would, and
// returns the links of those that stay.
func (w *world) attachAll(claims []*resourceapi.ResourceClaim, goes, stays []*sandbox) (links []int) {
	w.t.Helper()
	for i, c := range claims {
		pods := []*sandbox{stays[i]}
		if i%10 == 0 {
			pods = append(pods, goes[i/10])
		}
		for _, s := range pods {
			w.surviving(func(ctx context.Context) error { return s.hook(ctx, w.dir, c, 200*time.Millisecond) })
		}
		index, err := stays[i].link()
		if err != nil || index == 0 {
			w.t.Fatalf("pod %s started without its link: %v", stays[i].name, err)
		}
		links = append(links, index)
	}
	return links
}

func (w *world) attachedPods(want int) error {
	paths, err := filepath.Glob(filepath.Join(w.dir, "run/attached/*.json"))
	if err == nil && len(paths) != want {
		err = fmt.Errorf("%d pods are attached, want %d", len(paths), want)
	}
	return err
}

// classified tells whether each pod that runs is known to the classifier, and
// nobody else.
func (w *world) classified(pods []*sandbox) error {
	left, err := w.leftInKernel()
	if err != nil {
		return err
	}
	count := map[string]int{}
	for _, l := range left {
		count[strings.Fields(l)[0]]++
	}
	if count["class"] != 2*len(pods) || count["classification"] != len(pods) {
		return errors.New("for " + strconv.Itoa(len(pods)) + " pods there are " + strings.Join(left, ", "))
	}
	return nil
}
