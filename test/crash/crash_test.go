package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
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
	e := newTestEnv(t)
	steps := e.steps(1)
	t.Logf("%d steps: %s", len(steps), strings.Join(steps, ", "))
	for _, at := range steps {
		for _, before := range []bool{true, false} {
			died := e.life(1, func(c *pluginConfig) { c.Kill, c.Before = at, before })
			if !died && !ofTheirOwn(at) {
				t.Errorf("the plugin did not come to %s a second time", at)
			}
			if t.Failed() {
				t.Fatalf("at %s, before it %t", at, before)
			}
		}
	}
	t.Logf("killed at %d moments", 2*len(steps))
}

// One plugin after the other dies, each at the next step, while many claims take
// their way together: every step of each claim is some plugin's last, with the
// others in every state there is.
func TestPluginsThatDieOneAfterTheOther(t *testing.T) {
	const shares = 50
	e := newTestEnv(t)
	way := func(claims []*resourceapi.ResourceClaim) []func(context.Context) error {
		stays := e.pods(len(claims))
		prepared, attached, unprepared := 0, 0, 0
		return []func(context.Context) error{
			func(ctx context.Context) error { // one call for each, as the kubelet makes one for each pod
				for ; prepared < len(claims); prepared++ {
					if err := e.prepare(ctx, claims[prepared]); err != nil {
						return err
					}
				}
				return nil
			},
			func(ctx context.Context) error {
				for _, s := range stays[:attached] {
					if link, err := s.link(); err != nil || link == 0 {
						t.Fatalf("pod %s has lost its link: %v", s.name, err)
					}
				}
				for ; attached < len(claims); attached++ {
					if err := stays[attached].hook(ctx, e.dir, claims[attached], 50*time.Millisecond); err != nil {
						return err
					}
				}
				return nil
			},
			func(ctx context.Context) error {
				for ; unprepared < len(claims); unprepared++ {
					if err := e.unprepare(ctx, claims[unprepared]); err != nil {
						return err
					}
				}
				return nil
			},
		}
	}
	var steps [][]string
	for _, f := range way([]*resourceapi.ResourceClaim{e.claim("recorded")}) {
		steps = append(steps, e.stepsOf(f))
	}
	var claims []*resourceapi.ResourceClaim
	for i := range shares {
		claims = append(claims, e.claim(fmt.Sprintf("c%d", i)))
	}
	for i, f := range way(claims) {
		e.dying(steps[i], f)
	}
	e.kill()
	e.start(nil)
	e.eventually(e.nothingLeft)
	e.wantDeaths(slices.Concat(steps...), shares)
}

// stepsOf returns the steps that a plugin takes when f is called, without those
// that it takes when they come: TestAPluginThatDiesAtAnyStep has them.
func (e *testEnv) stepsOf(f func(context.Context) error) []string {
	e.t.Helper()
	file := e.path("steps")
	e.kill()
	e.start(func(c *pluginConfig) { c.Steps = file })
	if err := os.Truncate(file, 0); err != nil {
		e.t.Fatal(err)
	}
	if err := f(e.t.Context()); err != nil {
		e.t.Fatal(err)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		e.t.Fatal(err)
	}
	return slices.DeleteFunc(strings.Split(strings.TrimSpace(string(raw)), "\n"), ofTheirOwn)
}

// ofTheirOwn are steps that a plugin takes when they come, so that their number
// differs from life to life: reports are put together.
func ofTheirOwn(step string) bool {
	return strings.Contains(step, "PATCH") || strings.Contains(step, "orphan")
}

// dying repeats f, each time with a plugin that dies at the next of the steps,
// before it or after it, until f succeeds. What is done already takes no steps
// again, so that it is one claim after the other that dies its way through.
func (e *testEnv) dying(steps []string, f func(context.Context) error) {
	e.t.Helper()
	for i := 0; ; i++ {
		at, before := steps[i/2%len(steps)], i%2 == 0
		e.kill()
		e.start(func(c *pluginConfig) { c.Kill, c.Before, c.Deaths = at, before, e.path("deaths") })
		done := false
		e.eventually(func() error { // an error of a plugin that lives is tried again, as the kubelet does
			ctx, cancel := context.WithTimeout(e.t.Context(), patience)
			defer cancel()
			err := f(ctx)
			if done = err == nil; !e.running() {
				return nil
			}
			return err
		})
		if done {
			return
		}
	}
}

// wantDeaths checks that plugins died before and after each step as often as
// there are claims.
func (e *testEnv) wantDeaths(steps []string, shares int) {
	e.t.Helper()
	raw, err := os.ReadFile(e.path("deaths"))
	if err != nil {
		e.t.Fatal(err)
	}
	died := map[string]int{}
	for line := range strings.Lines(string(raw)) {
		died[strings.TrimSpace(line)]++
	}
	for _, step := range steps {
		name, _, _ := strings.Cut(step, "#")
		for _, when := range []string{"before ", "after "} {
			if n := died[when+name]; n < shares {
				e.t.Errorf("%d plugins died %s%s, want %d", n, when, name, shares)
			}
		}
	}
	e.t.Logf("%d plugins died: %v", strings.Count(string(raw), "\n"), died)
}

// steps records what a plugin does in one life of so many shares.
func (e *testEnv) steps(shares int) []string {
	e.t.Helper()
	file := filepath.Join(e.dir, "steps")
	e.life(shares, func(c *pluginConfig) { c.Steps = file })
	raw, err := os.ReadFile(file)
	if err != nil {
		e.t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(raw)), "\n")
}

// life starts a plugin, takes so many claims through prepare, attach, report,
// detach and unprepare, whatever the plugin does meanwhile, and checks what is
// asked of it. It tells whether the plugin died on the way.
func (e *testEnv) life(shares int, change func(*pluginConfig)) (died bool) {
	e.t.Helper()
	e.kill()
	e.asNew()
	e.start(change)
	first := e.process
	var claims []*resourceapi.ResourceClaim
	for i := range shares {
		claims = append(claims, e.add(onFabric(newClaim(fmt.Sprintf("c%d-%d", i, e.instance)))))
	}
	e.surviving(func(ctx context.Context) error { return e.prepare(ctx, claims...) })
	// Some claims have a second pod, which goes earlier.
	stays := e.pods(len(claims))
	var goes []*sandbox
	for i := 0; i < len(claims); i += 10 {
		goes = append(goes, e.sandbox("goes-"+claims[i].Name))
	}
	links := e.attachAll(claims, goes, stays)
	for _, c := range claims {
		e.surviving(func(ctx context.Context) error { return e.reported(ctx, c, driver.ReasonAttached) })
	}
	for _, s := range goes {
		s.end()
	}
	e.surviving(func(context.Context) error { return e.attachedPods(shares) })
	// Again, as after a restart of the kubelet: nothing changes.
	e.surviving(func(ctx context.Context) error { return e.prepare(ctx, claims...) })
	for i, s := range stays {
		if now, err := s.link(); err != nil || now != links[i] {
			e.t.Errorf("pod %s had link %d, and has %d now: %v", s.name, links[i], now, err)
		}
	}
	e.surviving(func(ctx context.Context) error { return e.classified(stays) })
	e.surviving(func(ctx context.Context) error { return e.unprepare(ctx, claims...) })
	for _, s := range stays {
		if now, err := s.link(); err != nil || now != 0 {
			e.t.Errorf("pod %s has link %d after unprepare, %v", s.name, now, err)
		}
	}
	e.surviving(func(context.Context) error { return e.nothingLeft() })
	for _, c := range claims {
		if err := e.api.Client.ResourceV1().ResourceClaims(namespace).Delete(e.t.Context(), c.Name, metav1.DeleteOptions{}); err != nil {
			e.t.Error(err)
		}
	}
	return e.process != first
}

// asNew takes away what plugins leave for the next: the hook, and queues and
// programs of the NIC.
func (e *testEnv) asNew() {
	e.t.Helper()
	if err := errors.Join(os.RemoveAll(filepath.Join(e.dir, "hook")), os.MkdirAll(filepath.Join(e.dir, "hook"), 0o700)); err != nil {
		e.t.Fatal(err)
	}
	node, err := netdev.NewNode(netdev.Options{BPFFS: e.bpffs})
	if err != nil {
		e.t.Fatal(err)
	}
	defer node.Close()
	if _, err := node.Unmanage("nic0", nstest.FindNIC(e.t, "nic0").Index); err != nil {
		e.t.Fatal(err)
	}
}

// pods returns so many sandboxes. They serve one life after the other.
func (e *testEnv) pods(n int) []*sandbox {
	for len(e.stay) < n {
		e.stay = append(e.stay, e.sandbox("stays-"+strconv.Itoa(len(e.stay))))
	}
	return e.stay[:n]
}

// attachAll runs the hooks of all pods, as often as the kubelet would, and
// returns the links of those that stay.
func (e *testEnv) attachAll(claims []*resourceapi.ResourceClaim, goes, stays []*sandbox) (links []int) {
	e.t.Helper()
	for i, c := range claims {
		pods := []*sandbox{stays[i]}
		if i%10 == 0 {
			pods = append(pods, goes[i/10])
		}
		for _, s := range pods {
			e.surviving(func(ctx context.Context) error { return s.hook(ctx, e.dir, c, 200*time.Millisecond) })
		}
		index, err := stays[i].link()
		if err != nil || index == 0 {
			e.t.Fatalf("pod %s started without its link: %v", stays[i].name, err)
		}
		links = append(links, index)
	}
	return links
}

func (e *testEnv) attachedPods(want int) error {
	paths, err := filepath.Glob(filepath.Join(e.dir, "run/attached/*.json"))
	if err == nil && len(paths) != want {
		err = fmt.Errorf("%d pods are attached, want %d", len(paths), want)
	}
	return err
}

// classified tells whether each pod that runs is known to the classifier, and
// nobody else.
func (e *testEnv) classified(pods []*sandbox) error {
	left, err := e.leftInKernel()
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
