// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint/failpointtest"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

const (
	// defaultAttaches is the number of attachments unless ADDRESS_ATTACHES is set.
	defaultAttaches = 200
	// faultyAddresses is the number of addresses in the pool, and podsOfNode the largest number of pods on a node.
	// So three nodes use up to 27 addresses, and withhold or wait for some of the others.
	faultyAddresses = 32
	podsOfNode      = 9
	// One in faultyOperations operations of a plugin fails, and a plugin is killed at one of its first
	// longestLife operations.
	faultyOperations = 300
	longestLife      = 3000
	// refusedRequests is how many requests the API server answers for each that it refuses.
	refusedRequests = 200
)

// Pods with addresses of a pool come and go on three nodes, while operations fail with and without their effect, the
// API server refuses requests, plugins are killed at random operations, replaced, and cut off from the API server,
// nodes reboot or are lost and return, and attachment records become unreadable. Links and records are real. No two
// links ever have the same address, except a lost node's links, which are blocked when the node returns. At the end,
// when all pods are gone, every address can be assigned.
//
// ADDRESS_ATTACHES=10000 sets the number of attachments, ADDRESS_SEED the seed of the faults, and
// ADDRESS_REPORT=FILE writes what happened to a file.
func TestAddresses_randomFaults(t *testing.T) {
	w := newAddressWorld(t)
	var group sync.WaitGroup
	group.Go(w.reportShort)
	var nodes sync.WaitGroup
	for _, n := range w.nodes {
		nodes.Go(n.run)
	}
	nodes.Wait()
	if !t.Failed() {
		w.stopFaults()
		w.checkRecords()
		w.checkEveryAddressIsFree()
	}
	close(w.end)
	group.Wait()
	w.report()
}

// addressWorld is the state that the nodes share.
type addressWorld struct {
	*testing.T
	seed  uint64
	want  int64 // attachments
	nodes []*faultyNode
	pool  *network.AddressPool
	end   chan struct{} // closed when the pool is no longer maintained
	calm  atomic.Bool   // nothing fails

	attached atomic.Int64
	events   sync.Map // counts (*atomic.Int64) by what happened

	mu      sync.Mutex
	holders map[string]*addressPod // the last pod with a link seen with each address
}

// faultyNode is a node, with what the kubelet knows of its pods.
type faultyNode struct {
	*testEnv
	w      *addressWorld
	random *rand.Rand
	cutOff atomic.Bool // its requests do not reach the API server
	pods   []*addressPod
	boots  int
	number int // of pods created
}

// addressPod is a pod with a claim that may be prepared.
type addressPod struct {
	claim    *resourceapi.ResourceClaim
	sandbox  *sandbox
	prepared bool
	attempts int
	address  string // of the link, or ""
	attached bool   // a container has started
	damaged  bool   // the attachment record is unreadable
	// lost means that the node was lost while the pod ran: other nodes may have its address.
	lost bool
}

func newAddressWorld(t *testing.T) *addressWorld {
	w := &addressWorld{T: t, want: defaultAttaches, seed: rand.Uint64(), end: make(chan struct{}),
		holders: map[string]*addressPod{}}
	var err, seedErr error
	if value := os.Getenv("ADDRESS_ATTACHES"); value != "" {
		w.want, err = strconv.ParseInt(value, 10, 64)
	}
	if value := os.Getenv("ADDRESS_SEED"); value != "" {
		w.seed, seedErr = strconv.ParseUint(value, 10, 64)
	}
	if err := errors.Join(err, seedErr); err != nil {
		t.Fatalf("environment variable ADDRESS_ATTACHES or ADDRESS_SEED: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the faults had ADDRESS_SEED=%d", w.seed)
		}
	})
	api := newAPI(t, "n1", "n2", "n3")
	w.pool = &network.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: "small", UID: "small"},
		Spec: network.AddressPoolSpec{Network: "storage", Default: true, Subnet: "10.20.0.0/16",
			Ranges: []string{fmt.Sprintf("10.20.9.1-10.20.9.%d", faultyAddresses)}, BlockSize: ptr.To(int32(4))},
	}
	if err := api.AddPool(w.pool); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		e := newNode(t, api, fmt.Sprintf("n%d", i+1), fmt.Sprintf("nic%d", i))
		n := &faultyNode{testEnv: e, w: w, random: rand.New(rand.NewPCG(w.seed, uint64(i)))}
		if i == 0 {
			n.way = n.strongest()
		} else {
			n.way = w.nodes[0].way
		}
		n.boot()
		w.nodes = append(w.nodes, n)
	}
	api.Refuse(w.refuse)
	return w
}

// refuse returns the error that the API server answers a request with.
func (w *addressWorld) refuse(r *http.Request) error {
	for _, n := range w.nodes {
		if n.cutOff.Load() && r.UserAgent() == userAgent(n.node) {
			return errInjected // breaks the connection
		}
	}
	isSliceRead := r.Method == http.MethodGet && strings.Contains(r.URL.Path, "resourceslices") // a start waits for it
	if w.calm.Load() || isSliceRead || rand.N(refusedRequests) > 0 {
		return nil
	}
	w.count("requests that the API server refused")
	faults := []error{errInjected, apierrors.NewInternalError(errInjected), apierrors.NewServiceUnavailable("injected"),
		apierrors.NewTooManyRequests("injected", 0)}
	return faults[rand.N(len(faults))]
}

// count counts an event for the report.
func (w *addressWorld) count(event string) {
	counter, _ := w.events.LoadOrStore(event, &atomic.Int64{})
	counter.(*atomic.Int64).Add(1) //nolint:forcetypeassert // of the line above
}

// reportShort does what the controller does: it reports whether the pool has another block.
func (w *addressWorld) reportShort() {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	current := metav1.ConditionUnknown
	for {
		select {
		case <-w.end:
			return
		case <-tick.C:
		}
		free := int64(faultyAddresses)
		for _, b := range w.nodes[0].api.Blocks() {
			set, _ := addresspool.ParseRanges(b.Spec.Ranges) // the plugins write valid ones
			free -= addresspool.Count(set).Int64()
		}
		status := metav1.ConditionFalse
		if free < int64(*w.pool.Spec.BlockSize) {
			status = metav1.ConditionTrue
		}
		if status == current {
			continue
		}
		current = status
		pool := w.pool.DeepCopy()
		pool.Status.Conditions = []metav1.Condition{{Type: network.ConditionShort, Status: status}}
		if err := w.nodes[0].api.UpdatePool(pool); err != nil {
			w.Error(err)
			return
		}
	}
}

// use records that the link of a pod has an address, and fails the test if another link has it. A link that
// was seen earlier may be gone: the plugin removes it after an attachment that failed.
func (w *addressWorld) use(address string, pod *addressPod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if other := w.holders[address]; other != nil && other != pod {
		if held, err := other.sandbox.address(); err == nil && held == address {
			w.Errorf("pod %s has address %s, which pod %s has (its node was lost: %t, attached: %t)", pod.claim.Name,
				address, other.claim.Name, other.lost, other.attached)
		}
	}
	w.holders[address] = pod
}

// release records that a link is about to lose its address.
func (w *addressWorld) release(pod *addressPod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.holders[pod.address] == pod {
		delete(w.holders, pod.address)
	}
}

// run lets things happen on the node until all nodes together have attached as many pods as wanted.
func (n *faultyNode) run() {
	for n.w.attached.Load() < n.w.want && !n.w.Failed() {
		n.ensurePlugin()
		n.act()
	}
}

// ensurePlugin starts a plugin if the last one was killed.
func (n *faultyNode) ensurePlugin() {
	if n.plugin != nil && n.running() {
		return
	}
	if n.plugin != nil {
		n.w.count("plugins that were killed at an operation")
	}
	n.startFaulty()
}

// startFaulty starts a plugin with failing operations, and kills it at some time.
func (n *faultyNode) startFaulty() {
	n.start(func(c *pluginConfig) {
		c.Pools, c.AddressWait, c.BootIDFile = true, 300*time.Millisecond, n.path("boot-id")
		c.OrphanGrace = 2 * time.Second // garbage collection would need most of the processor time
		if n.w.calm.Load() {
			return
		}
		c.Faults = faultyOperations
		c.Kill = failpointtest.Point{N: 1 + n.random.IntN(longestLife), After: n.random.IntN(2) == 0}
	})
}

// act lets one thing happen.
func (n *faultyNode) act() {
	if n.cutOff.Load() && n.random.IntN(6) == 0 {
		n.cutOff.Store(false)
	}
	switch action := n.random.IntN(2000); {
	case action < 1420:
		n.createOrAttach()
	case action < 1950:
		if len(n.pods) > 0 {
			n.remove(n.random.IntN(len(n.pods)))
		}
	case action < 1956:
		n.w.count("plugins that were killed at any time")
		n.kill()
	case action < 1961:
		n.w.count("plugins that were replaced")
		n.cutOff.Store(false) // otherwise the new one would wait for the old one's devices
		old := n.plugin
		n.startFaulty()
		_ = old.cmd.Process.Kill()
		<-old.exited
	case action < 1980:
		n.w.count("times that a node was cut off")
		n.cutOff.Store(true)
	case action < 1983:
		n.reboot()
	case action < 1989:
		n.lose()
	default:
		n.damage()
	}
}

// createOrAttach attaches a pod that does not have a link yet, or creates one.
func (n *faultyNode) createOrAttach() {
	waiting := slices.IndexFunc(n.pods, func(p *addressPod) bool { return p.address == "" })
	switch {
	case waiting >= 0 && n.pods[waiting].attempts > 5:
		n.remove(waiting)
	case waiting >= 0:
		n.attach(n.pods[waiting])
	case len(n.pods) < podsOfNode && !n.cutOff.Load():
		n.number++
		p := &addressPod{claim: newClaimOn(n.node, n.nic, fmt.Sprintf("%s-%d", n.node, n.number))}
		var err error
		if p.sandbox, err = newSandbox(n.path("bundle-"+p.claim.Name), p.claim.Name); err != nil {
			n.w.Error(err)
			return
		}
		n.addClaim(p.claim)
		n.pods = append(n.pods, p)
		n.attach(p)
	}
}

// attach lets the kubelet prepare the claim of a pod, or start a container of a pod with a prepared claim. Both may
// fail.
func (n *faultyNode) attach(p *addressPod) {
	if !p.prepared && n.cutOff.Load() {
		return // the plugin would only wait for the claim
	}
	p.attempts++
	ctx, cancel := context.WithTimeout(n.w.Context(), 10*time.Second)
	defer cancel()
	if !p.prepared {
		p.prepared = n.prepare(ctx, p.claim) == nil
		return // the node may be cut off before the container starts
	}
	err := p.sandbox.hook(ctx, n.dir, p.claim, 100*time.Millisecond)
	address, addressErr := p.sandbox.address()
	if addressErr == nil && address != "" { // a plugin that was killed may have left a link
		p.address = address
		if !p.lost || err == nil { // otherwise the link may be older than the loss, and the plugin blocks it
			n.w.use(address, p)
		}
	}
	switch {
	case err != nil:
		n.w.count("attempts to attach a pod that failed")
	case p.address == "":
		n.w.Errorf("pod %s was attached, and has no address: %v", p.claim.Name, addressErr)
	default:
		p.attached = true
		n.w.attached.Add(1)
	}
}

// remove lets the kubelet stop a pod.
func (n *faultyNode) remove(index int) {
	p := n.pods[index]
	n.pods = slices.Delete(n.pods, index, index+1)
	n.stop(p)
	n.unprepareUntilDone(p)
}

// stop ends the sandbox of a pod, and with it the link.
func (n *faultyNode) stop(p *addressPod) {
	n.w.release(p)
	p.sandbox.end()
}

// unprepareUntilDone lets the kubelet unprepare the claim of a pod that has ended, and deletes it.
func (n *faultyNode) unprepareUntilDone(p *addressPod) {
	n.eventually("claim "+p.claim.Name+" is unprepared", func() error {
		n.ensurePlugin()
		ctx, cancel := context.WithTimeout(n.w.Context(), 10*time.Second)
		defer cancel()
		return n.unprepare(ctx, p.claim)
	})
	n.deleteClaim(p.claim.Name)
}

// boot gives the node another boot ID.
func (n *faultyNode) boot() {
	n.boots++
	if err := os.WriteFile(n.path("boot-id"), []byte(fmt.Sprint(n.boots)), 0o600); err != nil {
		n.w.Fatal(err)
	}
}

// reboot ends all pods of the node while no plugin runs. The records stay, as if they were not on a tmpfs.
func (n *faultyNode) reboot() {
	n.w.count("reboots")
	n.kill()
	pods := n.pods
	n.pods = nil
	for _, p := range pods {
		n.stop(p)
	}
	n.boot()
	for _, p := range pods {
		n.unprepareUntilDone(p)
	}
}

// lose cuts the node off, and returns its addresses to the pool or gives them to another node. Its pods run on. When
// the plugin starts, it finds out what the node has lost.
func (n *faultyNode) lose() {
	n.w.count("nodes that were lost and returned")
	n.kill()
	for _, p := range n.pods {
		p.lost = true
		n.w.release(p) // another node may get it
	}
	n.cutOff.Store(false)
	if n.random.IntN(2) == 0 {
		n.api.DeleteBlocksOf(n.node)
		n.awaitOthers()
		return
	}
	other := "next to " + n.node
	n.api.MoveBlocks(n.node, other)
	for _, p := range n.pods {
		if !p.attached || p.damaged || !n.w.isIn(p.address, other) {
			// No container has started, the plugin does not know the address, or no node had the address, because
			// this one was lost before: then it takes the address again.
			continue
		}
		n.eventually("the link of pod "+p.claim.Name+" is blocked", func() error {
			n.ensurePlugin()
			return n.reported(n.w.Context(), p.claim, v1alpha1.ReasonAddressLost)
		})
		n.w.count("links of lost nodes that were blocked")
	}
	n.api.DeleteBlocksOf(other)
}

// isIn reports whether a block of the node contains the address of a link.
func (w *addressWorld) isIn(address, node string) bool {
	prefix, err := netip.ParsePrefix(address)
	if err != nil {
		w.Errorf("address of a link: %v", err)
	}
	return slices.ContainsFunc(w.nodes[0].api.Blocks(), func(b network.AddressBlock) bool {
		set, _ := addresspool.ParseRanges(b.Spec.Ranges) // the plugins write valid ones
		return b.Spec.Node == node && set.Contains(prefix.Addr())
	})
}

// awaitOthers waits until other nodes have attached some pods, or none of them does.
func (n *faultyNode) awaitOthers() {
	until := n.w.attached.Load() + 5
	_ = eventually.Poll(n.w.Context(), time.Second, func() error {
		if n.w.attached.Load() < until {
			return errors.New("the other nodes have attached fewer pods")
		}
		return nil
	})
}

// damage makes the record of an attached pod unreadable.
func (n *faultyNode) damage() {
	var candidates []*addressPod
	for _, p := range n.pods {
		if p.address != "" && !p.lost {
			candidates = append(candidates, p)
		}
	}
	if len(candidates) == 0 {
		return
	}
	p := candidates[n.random.IntN(len(candidates))]
	for _, path := range n.glob("run/attached", string(p.claim.UID)+"_*.json") {
		temporary := n.path("damaged")
		if err := errors.Join(os.WriteFile(temporary, []byte("garbage"), 0o600), os.Rename(temporary, path)); err != nil {
			n.w.Error(err)
			return
		}
		n.w.count("attachment records that became unreadable")
		p.damaged = true
	}
}

// stopFaults makes all nodes work.
func (w *addressWorld) stopFaults() {
	w.calm.Store(true)
	for _, n := range w.nodes {
		n.cutOff.Store(false)
		n.kill()
		n.startFaulty()
	}
}

// checkRecords checks that no address is in the records of two links, unless one of them belongs to a lost node, and
// is blocked.
func (w *addressWorld) checkRecords() {
	type holder struct {
		*faultyNode
		*addressPod
	}
	holders := map[netip.Addr]holder{}
	for _, lost := range []bool{false, true} {
		for _, n := range w.nodes {
			for p, addresses := range n.recorded() {
				for _, address := range addresses {
					other, taken := holders[address]
					switch {
					case p.lost != lost:
					case !taken:
						holders[address] = holder{n, p}
					case !lost:
						w.Errorf("address %s is in the records of pods %s and %s", address, other.claim.Name, p.claim.Name)
					default:
						n.eventually(fmt.Sprintf("the link of pod %s or %s with address %s is blocked", p.claim.Name,
							other.claim.Name, address), func() error {
							err := n.reported(w.Context(), p.claim, v1alpha1.ReasonAddressLost)
							if err != nil && other.lost {
								err = other.reported(w.Context(), other.claim, v1alpha1.ReasonAddressLost)
							}
							return err
						})
					}
				}
			}
		}
	}
}

// recorded returns the addresses in the attachment records of the pods.
func (n *faultyNode) recorded() map[*addressPod][]netip.Addr {
	records, err := attach.OpenRecords(n.path("run"), attach.AnyBoot, nil).List()
	if err != nil {
		n.w.Error(err)
	}
	recorded := map[*addressPod][]netip.Addr{}
	for _, r := range records {
		i := slices.IndexFunc(n.pods, func(p *addressPod) bool { return string(p.claim.UID) == r.ClaimUID })
		if i < 0 {
			n.w.Errorf("node %s has an attachment record of claim %s, whose pod is gone", n.node, r.ClaimUID)
			continue
		}
		link, err := r.Link()
		if err != nil {
			n.w.Error(err)
		}
		for _, text := range link.Addresses {
			recorded[n.pods[i]] = append(recorded[n.pods[i]], netip.MustParsePrefix(text).Addr())
		}
	}
	return recorded
}

// checkEveryAddressIsFree ends all pods, and assigns all addresses of the pool on one node.
func (w *addressWorld) checkEveryAddressIsFree() {
	for _, n := range w.nodes {
		for len(n.pods) > 0 {
			n.remove(0)
		}
		n.kill()
		n.startFaulty() // it no longer withholds addresses of records that are gone
		n.eventually("node "+n.node+" has no state of claims", n.nothingLeft)
	}
	n, assigned := w.nodes[0], map[string]bool{}
	for i := range faultyAddresses {
		claim := newClaimOn(n.node, n.nic, fmt.Sprintf("last-%d", i))
		n.addClaim(claim)
		pod := n.sandbox(claim.Name)
		err := eventually.Poll(w.Context(), timeout, func() error {
			ctx, cancel := context.WithTimeout(w.Context(), 10*time.Second)
			defer cancel()
			return errors.Join(n.prepare(ctx, claim), pod.hook(ctx, n.dir, claim, time.Second))
		})
		address, addressErr := pod.address()
		if err = errors.Join(err, addressErr); err != nil {
			w.Fatalf("%d of %d addresses can be assigned: %v\n%s", i, faultyAddresses, err, n.logTail())
		}
		assigned[address] = true
	}
	if len(assigned) != faultyAddresses {
		w.Errorf("%d pods have %d addresses", faultyAddresses, len(assigned))
	}
}

// report logs what happened, and writes it to the file ADDRESS_REPORT.
func (w *addressWorld) report() {
	lines := []string{fmt.Sprintf("%6d attachments of pods to %d nodes, with a pool of %d addresses",
		w.attached.Load(), len(w.nodes), faultyAddresses)}
	w.events.Range(func(event, counter any) bool {
		n := counter.(*atomic.Int64).Load() //nolint:forcetypeassert // see count
		lines = append(lines, fmt.Sprintf("%6d %s", n, event))
		return true
	})
	slices.Sort(lines[1:])
	slices.Reverse(lines[1:])
	text := strings.Join(lines, "\n") + "\n"
	w.Log("\n" + text)
	if file := os.Getenv("ADDRESS_REPORT"); file != "" && !w.Failed() {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			w.Error(err)
		}
	}
}
