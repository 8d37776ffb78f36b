// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package reference is a small DRA driver for devices that exist in its memory only. It meets every requirement that
// the suite tests, unless it is given a fault: the ID of one requirement that it then does not meet, or ID/NAME for
// another way not to meet it. The suite's own tests run it with each fault. All state is in files, so two instances can
// run side by side.
package reference

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
)

// Name is the default name of the driver.
const Name = "reference.conformance.example"

// Options describe an instance of the driver.
type Options struct {
	// Name, Node, and PodUID are the names of the driver, the node, and the instance.
	Name, Node, PodUID string
	Client             kubernetes.Interface
	// Directories. A file removed-DEVICE in StateDir takes a device away.
	PluginDir, RegistryDir, CDIDir, StateDir string
	// Fault is the ID of a requirement that the driver does not meet, or ID/NAME; empty for none.
	Fault string
	// NoHealth disables reporting of health.
	NoHealth bool
}

// Driver is an instance of the driver.
type Driver struct {
	Options
	nonce string // differs between processes

	crashed bool // the last instance did not end cleanly

	mu       sync.Mutex
	attempts map[string]int  // prepare calls by claim UID, until unprepare
	finished map[string]bool // claims that were unprepared
	busy     map[string]bool // claims with a canceled call
	own      map[string]bool // claims that this process prepared
	infos    int             // GetInfo calls
	streams  int             // open streams of health
	sent     int             // messages of health
	calls    int             // prepare calls under way
	watchers []chan struct{} // open streams of health, for a fault
	gone     map[string]bool // devices that were removed once, for faults
	locks    sync.Map        // mutexes of claims, for a fault
	prepares sync.Mutex      // of all calls of prepare, for a fault

	made      map[string]bool    // claims with a record from this process
	preparing map[string]bool    // claims that are being prepared
	ended     map[string]*record // claims that were unprepared, for a fault
	kept      [][]byte           // memory that a fault does not free
	files     []*os.File         // files that a fault does not close
}

// New builds an instance.
func New(o Options) *Driver {
	return &Driver{
		Options: o, nonce: fmt.Sprint(os.Getpid(), "-", time.Now().UnixNano()),
		attempts: map[string]int{}, finished: map[string]bool{}, busy: map[string]bool{}, own: map[string]bool{},
		gone: map[string]bool{}, made: map[string]bool{}, preparing: map[string]bool{}, ended: map[string]*record{},
	}
}

// fault reports whether the driver has the fault.
func (d *Driver) fault(id string) bool { return d.Fault == id }

// crash ends the process if the driver has the fault ID/crash.
func (d *Driver) crash(id string) {
	if d.fault(id + "/crash") {
		panic("the driver has the fault " + d.Fault)
	}
}

// Run runs the instance until the context ends.
func (d *Driver) Run(ctx context.Context) error {
	if err := os.MkdirAll(d.claimsDir(), 0o700); err != nil {
		return err
	}
	if d.fault("UPG-01") {
		unlock, err := d.lock(ctx, "instance.lock")
		if err != nil {
			return err
		}
		defer unlock()
	}
	if err := errors.Join(d.recover(), d.writeCommon(), d.spoilStart()); err != nil {
		return err
	}
	stop, err := d.serve()
	if err != nil {
		return err
	}
	d.collect(ctx)
	var wait sync.WaitGroup
	wait.Go(func() { d.publish(ctx) })
	<-ctx.Done()
	wait.Wait()
	stop()
	if d.fault("UPG-03/slices") {
		for _, s := range d.desired() {
			_ = d.Client.ResourceV1().ResourceSlices().Delete(context.Background(), s.Name, metav1.DeleteOptions{})
		}
	}
	return d.end()
}

// recover handles what earlier instances left behind.
func (d *Driver) recover() error {
	marker := filepath.Join(d.PluginDir, "running")
	_, err := os.Stat(marker)
	if err == nil && d.fault("UNPR-08") {
		d.forget()
	}
	d.crashed = err == nil
	if d.fault("UPG-02") {
		for _, r := range d.records() {
			d.own[r.UID] = true
		}
	}
	if d.fault("PREP-04/spec") {
		for _, r := range d.records() {
			if err := d.writeSpec(r); err != nil {
				return err
			}
		}
	}
	return os.WriteFile(marker, nil, 0o600)
}

// spoilStart applies faults of the start.
func (d *Driver) spoilStart() error {
	switch d.Fault {
	case "UPG-01/specs":
		for _, r := range d.records() {
			_ = os.Remove(d.specPath(r.UID))
		}
	case "UPG-04/state":
		others, err := filepath.Glob(filepath.Join(d.RegistryDir, d.Name+"-*.sock"))
		if err != nil || len(others) == 0 || slices.Contains(others, d.registrationSocket()) {
			return err
		}
		d.forget()
	}
	return nil
}

// end is called at a clean exit.
func (d *Driver) end() error {
	if d.fault("UNPR-07") {
		d.forget()
	}
	if d.fault("UPG-05") {
		for _, r := range d.records() {
			_ = os.Remove(d.specPath(r.UID))
		}
	}
	if d.fault("REG-12/call") {
		d.mu.Lock()
		for uid := range d.preparing {
			_ = os.WriteFile(d.recordPath(uid), nil, 0o600)
		}
		d.mu.Unlock()
	}
	err := os.Remove(filepath.Join(d.PluginDir, "running"))
	if errors.Is(err, os.ErrNotExist) {
		return nil // another instance has ended too
	}
	return err
}

// forget drops all records.
func (d *Driver) forget() {
	for _, r := range d.records() {
		_ = os.Remove(d.recordPath(r.UID))
	}
}

// collect unprepares claims that were deleted while no instance ran.
func (d *Driver) collect(ctx context.Context) {
	for _, r := range d.records() {
		claim, err := d.Client.ResourceV1().ResourceClaims(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
		replaced := err == nil && string(claim.UID) != r.UID && !d.fault("UNPR-12/uid")
		if apierrors.IsNotFound(err) || replaced || err != nil && d.fault("CDI-08/unreachable") {
			_ = d.remove(r) // the next start tries again
		}
	}
}

// record is the driver's record of a prepared claim.
type record struct {
	UID, Namespace, Name string
	Devices              []prepared
	// Zombie marks a claim that was unprepared without a release of its devices.
	Zombie bool
	// PodClaim is what the pod calls the claim, if it was made from a template.
	PodClaim string
	// Others reports whether other drivers have devices of the claim.
	Others bool
	// Pods is the number of pods that the claim was prepared for.
	Pods int
}

// prepared is one device of a claim.
type prepared struct {
	Request, Pool, Device, Share string
	Admin                        bool
	IDs                          []string
	Value                        string // what containers get
}

func (d *Driver) claimsDir() string { return filepath.Join(d.PluginDir, "claims") }

func (d *Driver) recordPath(uid string) string { return filepath.Join(d.claimsDir(), uid+".json") }

// load returns the record of a claim, or nil.
func (d *Driver) load(uid string) (*record, error) {
	raw, err := os.ReadFile(d.recordPath(uid))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var r record
	if err := json.Unmarshal(raw, &r); err != nil {
		return nil, fmt.Errorf("record of claim %s: %w", uid, err)
	}
	return &r, nil
}

// records returns all records that can be read.
func (d *Driver) records() (all []*record) {
	entries, _ := os.ReadDir(d.claimsDir()) // without the directory, there are none
	for _, e := range entries {
		uid, ok := strings.CutSuffix(e.Name(), ".json")
		if r, err := d.load(uid); ok && err == nil && r != nil {
			all = append(all, r)
		}
	}
	return all
}

// slow is how long an operation takes in a driver with a fault that shows only while the
// operation is in progress: longer than the suite waits for it.
const slow = 400 * time.Millisecond

// canceledSoon reports whether the client will cancel the call before a slow operation ends.
func canceledSoon(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ok && time.Until(deadline) < slow
}

func (d *Driver) save(r *record) error {
	d.mu.Lock()
	calls := d.calls
	d.mu.Unlock()
	if d.fault("PREP-05/record") && calls > 1 {
		return nil
	}
	raw, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if d.fault("PREP-25") {
		return writeSlowly(d.recordPath(r.UID), raw, slow)
	}
	if err := write(d.recordPath(r.UID), raw); err != nil || !d.fault("SEC-03") {
		return err
	}
	return os.Chmod(d.recordPath(r.UID), 0o666)
}

// write replaces a file atomically.
func write(path string, raw []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp")
	if err != nil {
		return err
	}
	_, err = f.Write(raw)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// writeSlowly writes a file in place, in two steps.
func writeSlowly(path string, raw []byte, pause time.Duration) error {
	if err := os.WriteFile(path, raw[:1], 0o600); err != nil {
		return err
	}
	<-time.After(pause)
	return os.WriteFile(path, raw, 0o600)
}

// lock takes a lock that all instances share.
func (d *Driver) lock(ctx context.Context, name string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(d.PluginDir, name), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), f.Close())
		case <-time.After(time.Millisecond):
		}
	}
}

// locked calls f while no other call of any instance runs.
func (d *Driver) locked(f func() error) error {
	if d.fault("UNPR-15") {
		return f()
	}
	// A call that was canceled by its client still ends in a defined state.
	unlock, err := d.lock(context.Background(), "calls.lock")
	if err != nil {
		return err
	}
	defer unlock()
	return f()
}

// NodePrepareResources implements dra.DRAPluginServer.
func (d *Driver) NodePrepareResources(
	ctx context.Context, request *dra.NodePrepareResourcesRequest,
) (*dra.NodePrepareResourcesResponse, error) {
	response := &dra.NodePrepareResourcesResponse{Claims: map[string]*dra.NodePrepareResourceResponse{}}
	if len(request.Claims) == 0 && d.fault("PREP-06") {
		return nil, errors.New("the request has no claims")
	}
	if d.fault("UPG-01/busy") && len(request.Claims) > 0 {
		short, cancel := context.WithTimeout(ctx, time.Millisecond)
		defer cancel()
		unlock, err := d.lock(short, "prepare.lock")
		if err != nil {
			return nil, errors.New("the other instance is busy")
		}
		defer unlock()
	}
	defer d.begin()()
	for _, c := range request.Claims {
		var r *record
		err := d.lockedFor(c.Uid, func() (err error) {
			r, err = d.prepare(ctx, c)
			return err
		})
		if d.fault("PREP-17/claims") && len(request.Claims) > 4 {
			<-time.After(time.Second)
		}
		if err != nil {
			if d.fault("PREP-07") {
				return nil, err
			}
			response.Claims[c.Uid] = &dra.NodePrepareResourceResponse{Error: err.Error()}
			continue
		}
		response.Claims[c.Uid] = d.answer(r, len(request.Claims))
	}
	if len(request.Claims) > 1 {
		d.spoilAnswer(response.Claims, request.Claims[len(request.Claims)-1].Uid)
	}
	return response, nil
}

// begin counts a call of prepare until end is called.
func (d *Driver) begin() (end func()) {
	count := func(n int) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.calls += n
	}
	count(1)
	if !d.fault("UNPR-15") {
		return func() { count(-1) }
	}
	d.prepares.Lock() // so that only prepare and unprepare interleave
	return func() {
		d.prepares.Unlock()
		count(-1)
	}
}

// spoilAnswer applies faults of calls for several claims.
func (d *Driver) spoilAnswer(answers map[string]*dra.NodePrepareResourceResponse, lastUID string) {
	failed, last := false, answers[lastUID]
	for _, r := range answers {
		failed = failed || r.Error != ""
	}
	for uid, r := range answers {
		switch {
		case d.fault("PREP-02/other") && !failed:
			answers[uid] = last
		case d.fault("PREP-07/specs") && failed && r.Error == "":
			_ = os.Remove(d.specPath(uid))
		}
	}
	if d.fault("PREP-02") {
		for _, r := range d.records() {
			answers[r.UID] = d.answer(r, 1)
		}
	}
}

// lockedFor calls f while no other call for any claim runs or, with a fault, no other call for this claim.
func (d *Driver) lockedFor(uid string, f func() error) error {
	if !d.fault("PREP-13/race") {
		return d.locked(f)
	}
	lock, _ := d.locks.LoadOrStore(uid, &sync.Mutex{})
	m := lock.(*sync.Mutex) //nolint:forcetypeassert // the map has nothing else
	m.Lock()
	defer m.Unlock()
	return f()
}

// answer returns the response for a claim.
func (d *Driver) answer(r *record, _ int) *dra.NodePrepareResourceResponse {
	response := &dra.NodePrepareResourceResponse{}
	var requests []string
	for _, p := range r.Devices {
		requests = append(requests, base(p.Request))
	}
	for _, p := range r.Devices {
		x := &dra.Device{RequestNames: []string{base(p.Request)}, PoolName: p.Pool, DeviceName: p.Device, CdiDeviceIds: p.IDs}
		if p.Share != "" && !d.fault("SHARE-01") {
			x.ShareId = &p.Share
		}
		switch {
		case d.fault("PREP-01"):
			x.PoolName = "wrong"
		case d.fault("PREP-19") && len(r.Devices) == 1 && !strings.Contains(p.Request, "/"):
			x.RequestNames = []string{"wrong"}
		case d.fault("PREP-20"):
			x.RequestNames = requests
		case d.fault("CDI-01"):
			x.CdiDeviceIds = append(slices.Clone(x.CdiDeviceIds), p.Device)
		case d.fault("PREP-03") && d.again(r.UID):
			x.CdiDeviceIds = append(slices.Clone(x.CdiDeviceIds), x.CdiDeviceIds...)
		case d.fault("PREP-01/count") && len(response.Devices) > 0 && response.Devices[0].RequestNames[0] == base(p.Request):
			continue
		}
		response.Devices = append(response.Devices, x)
	}
	return response
}

// again reports whether a claim was prepared before by this process.
func (d *Driver) again(uid string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.attempts[uid] > 1
}

// isNew reports whether this process made the record of a claim.
func (d *Driver) isNew(uid string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.made[uid]
}

func base(request string) string {
	name, _, _ := strings.Cut(request, "/")
	return name
}

// prepare prepares one claim.
func (d *Driver) prepare(ctx context.Context, c *dra.Claim) (*record, error) {
	d.enter(c.Uid)
	defer d.leave(c.Uid)
	if err := d.spoilCall(ctx, c); err != nil {
		return nil, err
	}
	old, _ := d.load(c.Uid) // build reports the error
	r, err := d.build(ctx, c)
	if err != nil {
		return nil, errors.Join(err, d.spoilFailure(c.Uid, r))
	}
	if err := d.spoilBuilt(ctx, c.Uid); err != nil {
		return nil, err
	}
	if err := d.save(r); err != nil {
		return nil, err
	}
	d.spoilSaved(r.UID)
	if err := errors.Join(d.writeSpecs(r, old != nil), d.writePod(r)); err != nil {
		return nil, err
	}
	d.report(r)
	return r, nil
}

// enter records that a call of prepare is under way.
func (d *Driver) enter(uid string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.attempts[uid]++
	d.preparing[uid] = true
}

// leave records that a call of prepare has ended.
func (d *Driver) leave(uid string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.preparing, uid)
}

// writeSpecs is writeSpec with faults. known reports whether the claim has a record of an earlier call.
func (d *Driver) writeSpecs(r *record, known bool) error {
	if known && d.fault("CDI-02/again") {
		return nil
	}
	if err := d.writeSpec(r); err != nil && !d.fault("CDI-02/ignored") {
		return err
	}
	return nil
}

// build returns the record of a claim: the existing one, or a new one from its allocation. With an error,
// it may return an incomplete new record.
func (d *Driver) build(ctx context.Context, c *dra.Claim) (*record, error) {
	// The driver ignores the deadline of the caller; its client has one.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	r := &record{UID: c.Uid, Namespace: c.Namespace, Name: c.Name}
	claim, err := d.read(ctx, c)
	if claim == nil || err != nil {
		return r, err
	}
	old, err := d.load(c.Uid)
	if err := d.spoilAgain(old, claim); err != nil {
		return nil, err
	}
	if err != nil || old != nil && !d.fault("PREP-04") {
		return old, err
	}
	d.mu.Lock()
	stale := d.ended[c.Uid]
	d.made[c.Uid] = true
	d.mu.Unlock()
	if stale != nil {
		return stale, nil
	}
	for _, a := range claim.Status.ReservedFor {
		if a.Resource == "pods" {
			r.Pods++
		}
	}
	r.PodClaim = claim.Annotations[resourceapi.PodResourceClaimAnnotation]
	for i, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != d.Name && !d.isNamesake(result) {
			r.Others = true
			d.spoilForeign(r, result)
			continue
		}
		p, err := d.device(claim, result, i)
		if err != nil {
			return r, err
		}
		d.spoilDevice(r, p)
		r.Devices = append(r.Devices, p)
	}
	d.spoilDuration(r)
	return r, nil
}

// read returns a claim that is allocated. It returns nil for a claim that a driver with a fault does not prepare.
func (d *Driver) read(ctx context.Context, c *dra.Claim) (*resourceapi.ResourceClaim, error) {
	claim, err := d.Client.ResourceV1().ResourceClaims(c.Namespace).Get(ctx, c.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err) && d.fault("PREP-09"):
		return nil, nil
	case err != nil:
		return nil, err
	case string(claim.UID) != c.Uid && !d.fault("PREP-10"):
		d.crash("PREP-10")
		return nil, fmt.Errorf("claim %s has the UID %s, not %s", c.Name, claim.UID, c.Uid)
	case claim.Status.Allocation == nil && d.fault("PREP-11"):
		return nil, nil
	case claim.Status.Allocation == nil:
		d.crash("PREP-11")
		if d.fault("PREP-11/hang") {
			select {} // no deadline ends it
		}
		return nil, fmt.Errorf("claim %s is not allocated", c.Name)
	}
	return claim, d.spoil(ctx, claim)
}

// device returns the prepared device for one result of an allocation.
func (d *Driver) device(
	claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult, i int,
) (p prepared, err error) {
	p = prepared{
		Request: result.Request, Pool: result.Pool, Device: result.Device, Share: string(ptr.Deref(result.ShareID, "")),
		Admin: ptr.Deref(result.AdminAccess, false),
	}
	if !d.has(result.Device) && !d.fault("PREP-14") {
		return p, fmt.Errorf("the node has no device %s", result.Device)
	}
	if d.fault("LIST-01") && strings.Contains(result.Request, "/") {
		return p, fmt.Errorf("the claim has no request %s", result.Request)
	}
	if err := d.room(string(claim.UID), p, result); err != nil {
		return p, err
	}
	parameters, err := d.parameters(claim, result.Request)
	if err != nil {
		return p, err
	}
	id := fmt.Sprintf("%s-%d", claim.UID, i)
	switch {
	case d.fault("SHARE-04") && p.Share != "":
		id = p.Device
	case d.fault("PREP-04"):
		id += "-" + d.nonce
	}
	p.IDs = []string{d.Name + "/device=" + id, d.commonID()}
	p.Value = parameters + d.amounts(claim, result)
	return p, nil
}

// amounts returns the capacity of a share.
func (d *Driver) amounts(claim *resourceapi.ResourceClaim,
	result resourceapi.DeviceRequestAllocationResult) (text string) {
	consumed := result.ConsumedCapacity
	if d.fault("SHARE-10") {
		for _, q := range claim.Spec.Devices.Requests {
			if q.Name == base(result.Request) && q.Exactly != nil && q.Exactly.Capacity != nil {
				consumed = q.Exactly.Capacity.Requests
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(consumed)) {
		q := consumed[name]
		text += fmt.Sprintf(";%s:%s", name, q.String())
	}
	return text
}

// room returns an error if another claim has the device, or if its remaining capacity is too small.
func (d *Driver) room(uid string, p prepared, result resourceapi.DeviceRequestAllocationResult) error {
	if p.Admin && !d.fault("ADMIN-01") {
		return nil
	}
	used := 0
	for _, r := range d.records() {
		if r.UID == uid || r.Zombie && !d.exists(r) {
			continue
		}
		forgets := d.fault("PREP-13/restart") && p.Share == "" || d.fault("SHARE-11/restart") && p.Share != ""
		if forgets && !d.isNew(r.UID) {
			continue
		}
		for _, x := range r.Devices {
			if x.Device != p.Device || x.Admin && !d.fault("ADMIN-01/use") {
				continue
			}
			if p.Share == "" {
				d.crash("PREP-13")
				return fmt.Errorf("claim %s/%s has device %s", r.Namespace, r.Name, p.Device)
			}
			used++
		}
	}
	ghosts, _ := filepath.Glob(d.ghost("*")) // the pattern is valid
	used += len(ghosts)
	slots := result.ConsumedCapacity["slots"]
	if p.Share != "" && used+int(slots.Value()) > slotsTotal {
		return fmt.Errorf("device %s has no room for %s slots", p.Device, slots.String())
	}
	return nil
}

// ghost returns the file of a claim with capacity that was not returned.
func (d *Driver) ghost(uid string) string { return filepath.Join(d.StateDir, "used-"+uid) }

func (d *Driver) exists(r *record) bool {
	_, err := d.Client.ResourceV1().ResourceClaims(r.Namespace).Get(context.Background(), r.Name, metav1.GetOptions{})
	return err == nil
}

// parameters returns the value of the opaque parameters of a request. A claim's parameters win over a class's, and
// later ones over earlier ones.
func (d *Driver) parameters(claim *resourceapi.ResourceClaim, request string) (value string, err error) {
	for _, source := range []resourceapi.AllocationConfigSource{
		resourceapi.AllocationConfigSourceClass, resourceapi.AllocationConfigSourceClaim,
	} {
		for _, c := range claim.Status.Allocation.Devices.Config {
			named := func(q string) bool { return d.names(q, request) }
			applies := len(c.Requests) == 0 || slices.ContainsFunc(c.Requests, named)
			fromClass := source == resourceapi.AllocationConfigSourceClass
			if fromClass && (d.fault("PREP-21/class") || d.fault("PREP-21/named") && len(c.Requests) > 0) {
				continue
			}
			if c.Source != source || c.Opaque == nil || c.Opaque.Driver != d.Name || !applies {
				continue
			}
			raw := c.Opaque.Parameters.Raw
			if d.fault("PREP-23") && len(raw) > 4096 {
				return "", fmt.Errorf("parameters of %d bytes", len(raw))
			}
			var p struct {
				APIVersion string `json:"apiVersion"`
				Kind       string `json:"kind"`
				Value      string `json:"value"`
			}
			decoder := json.NewDecoder(strings.NewReader(string(raw)))
			decoder.DisallowUnknownFields()
			err := decoder.Decode(&p)
			if err == nil && p.Kind != "Parameters" {
				err = fmt.Errorf("parameters of kind %q: it must be Parameters", p.Kind)
			}
			if err != nil {
				d.crash("PREP-22")
			}
			ignored := d.fault("PREP-22") || d.fault("PREP-22/class") && fromClass
			if err != nil && !ignored {
				return "", err
			}
			if value == "" || !d.fault("PREP-21") {
				value = p.Value
			}
		}
	}
	return value, nil
}

// names reports whether a name in a configuration refers to the request of a result.
func (d *Driver) names(name, request string) bool {
	switch subrequest := strings.Contains(request, "/"); {
	case d.fault("LIST-01/subrequest") && subrequest:
		return name == base(request)
	case d.fault("LIST-01/request") && subrequest:
		return name == request
	case d.fault("LIST-01/other") && subrequest:
		return base(name) == base(request)
	}
	return name == request || name == base(request)
}

// NodeUnprepareResources implements dra.DRAPluginServer.
func (d *Driver) NodeUnprepareResources(
	ctx context.Context, request *dra.NodeUnprepareResourcesRequest,
) (*dra.NodeUnprepareResourcesResponse, error) {
	response := &dra.NodeUnprepareResourcesResponse{Claims: map[string]*dra.NodeUnprepareResourceResponse{}}
	for _, c := range request.Claims {
		if d.fault("UNPR-10") && strings.Count(c.Uid, "-") != 4 {
			return nil, fmt.Errorf("%q is not a UID", c.Uid)
		}
		known := false
		err := d.lockedFor(c.Uid, func() (err error) {
			known, err = d.unprepare(ctx, c)
			return err
		})
		if err != nil && d.fault("UNPR-10/call") {
			return nil, err
		}
		entry := &dra.NodeUnprepareResourceResponse{}
		if err != nil {
			entry.Error = err.Error()
		}
		if known || err != nil || !d.fault("UNPR-02") {
			response.Claims[c.Uid] = entry
		}
	}
	for _, r := range d.records() {
		if d.fault("UNPR-02/more") && response.Claims[r.UID] == nil {
			response.Claims[r.UID] = &dra.NodeUnprepareResourceResponse{}
		}
	}
	return response, nil
}

// unprepare unprepares one claim, and reports whether it was prepared.
func (d *Driver) unprepare(ctx context.Context, c *dra.Claim) (known bool, err error) {
	d.mu.Lock()
	seen, finished, own := d.attempts[c.Uid] > 0, d.finished[c.Uid], d.own[c.Uid]
	d.mu.Unlock()
	if filepath.Base(c.Uid) != c.Uid {
		return false, fmt.Errorf("%q is not a UID", c.Uid)
	}
	if !d.fault("UNPR-11") {
		_ = os.Remove(d.failedFile(c.Uid))
	}
	r, err := d.load(c.Uid)
	if err != nil {
		return false, err
	}
	d.spoilOthers(c)
	switch {
	case d.fault("UNPR-06"):
		for _, x := range d.records() {
			if x.Name == c.Name && x.UID != c.Uid {
				r = x
			}
		}
	case d.fault("UPG-02") && !own:
		return false, nil
	}
	if r == nil || r.Zombie {
		switch {
		case d.fault("UNPR-03") && !seen && !finished:
			return false, errors.New("the claim is not known")
		case d.fault("UNPR-04") && finished:
			return false, errors.New("the claim was unprepared before")
		}
		if r != nil && !d.exists(r) {
			return false, d.remove(r)
		}
		return false, nil
	}
	if d.fault("WORK-01") && r.Pods > 1 {
		r.Pods--
		return true, d.save(r)
	}
	return true, d.release(ctx, r)
}

// spoilOthers applies faults of unprepare that concern other claims.
func (d *Driver) spoilOthers(c *dra.Claim) {
	for _, x := range d.records() {
		namesake := x.Name == c.Name && x.Namespace != c.Namespace
		if x.UID != c.Uid && (d.fault("UNPR-01/others") || d.fault("UNPR-06/namespace") && namesake) {
			_ = os.Remove(d.specPath(x.UID))
		}
	}
}

// release undoes what prepare did.
func (d *Driver) release(ctx context.Context, r *record) error {
	if d.fault("TAINT-05") && len(r.Devices) > 0 && d.removed(r.Devices[0].Device) {
		return fmt.Errorf("device %s has failed", r.Devices[0].Device)
	}
	if d.fault("UNPR-05") || d.fault("UNPR-09") {
		_, err := d.Client.ResourceV1().ResourceClaims(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
		if missing := apierrors.IsNotFound(err); err != nil && missing == d.fault("UNPR-05") {
			return err
		}
	}
	if d.fault("UNPR-09/hang") { // the client does not have a deadline
		_, _ = d.Client.ResourceV1().ResourceClaims(r.Namespace).Get(context.Background(), r.Name, metav1.GetOptions{})
	}
	if d.fault("WORK-03") {
		ctx, cancel := context.WithTimeout(ctx, time.Second) // UNPR-09: the API server may not answer
		defer cancel()
		_ = d.patchClaim(ctx, r.Namespace, r.Name, `{"metadata":{"annotations":{"torn-down":"true"}}}`)
	}
	if d.fault("SHARE-02") {
		for _, x := range d.records() {
			if x.UID != r.UID && len(x.Devices) > 0 && x.Devices[0].Share != "" && r.Devices[0].Device == x.Devices[0].Device {
				_ = os.Remove(d.specPath(x.UID))
			}
		}
	}
	if d.fault("UNPR-14") {
		_ = os.WriteFile(filepath.Join(d.StateDir, fmt.Sprint("leak-", time.Now().UnixNano())), nil, 0o600)
	}
	if err := d.remove(r); err != nil {
		return err
	}
	d.mu.Lock()
	d.finished[r.UID] = true
	delete(d.attempts, r.UID)
	d.leak(r)
	d.mu.Unlock()
	if d.fault("UNPR-01") {
		r.Zombie = true
		return d.save(r)
	}
	return nil
}

// leak applies faults that leave resources of a claim that was unprepared. The caller holds the
// lock.
func (d *Driver) leak(r *record) {
	switch d.Fault {
	case "UNPR-13/stale":
		d.ended[r.UID] = r
	case "UNPR-14/uid":
		_ = os.WriteFile(filepath.Join(d.StateDir, r.UID+".json"), nil, 0o600)
	case "UNPR-14/descriptors":
		d.leaveOpen()
	case "UNPR-14/memory":
		d.kept = append(d.kept, bytes.Repeat([]byte("x"), 4<<20))
	case "UNPR-01/second":
		if len(r.Devices) == 2 && strings.HasSuffix(r.Devices[1].Request, "-1") && r.Devices[1].Share == "" {
			_ = d.save(&record{UID: "kept-" + r.Devices[1].Device, Devices: r.Devices[1:]})
		}
	case "UNPR-01/share":
		if len(r.Devices) > 0 && r.Devices[0].Share != "" {
			_ = os.WriteFile(d.ghost(r.UID), nil, 0o600)
		}
	}
}

// leaveOpen opens a file and does not close it. The caller holds the lock.
func (d *Driver) leaveOpen() {
	if f, err := os.Open(os.DevNull); err == nil {
		d.files = append(d.files, f)
	}
}

// remove removes everything that the driver has of a claim. It removes the record last, so a call that failed can be
// repeated.
func (d *Driver) remove(r *record) error {
	if d.fault("UNPR-10/record") {
		_ = os.Remove(d.recordPath(r.UID))
	}
	if !d.fault("CDI-03") {
		if err := os.Remove(d.specPath(r.UID)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if !d.fault("META-07") {
		_ = os.RemoveAll(d.metadataDir(r.UID))
	}
	_ = os.Remove(d.podFile(r.UID))
	d.unreport(r)
	if err := os.Remove(d.recordPath(r.UID)); err != nil && !errors.Is(err, os.ErrNotExist) {
		log.Printf("Failed to remove a record: %v", err)
	}
	return nil
}
