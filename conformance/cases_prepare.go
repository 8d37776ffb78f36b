// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
)

// Names of objects that do not exist.
const (
	missingClaim  = "conformance-no-such-claim"
	missingDevice = "conformance-no-such-device"
	otherDriver   = "other.conformance.example"
	otherNode     = "conformance-other-node"
)

// complete skips the case if a response does not have devices and the driver declares AnswersNoDevices.
func (s *suite) complete(devices []*dra.Device) {
	if len(devices) == 0 && s.config.AnswersNoDevices {
		s.skip("the driver declares that its responses have no devices (answersNoDevices)")
	}
}

// longestName is the longest name that a claim can have.
func longestName() string {
	const label, limit = "conformance-claim-with-a-long-name.", 253
	return strings.TrimSuffix(strings.Repeat(label, limit/len(label)+1)[:limit-1], ".") + "x"
}

func casePrepareDevices(ctx context.Context, s *suite) {
	c, devices := s.prepared(ctx)
	s.complete(devices)
	s.expectDevices(c, devices)
	s.end(ctx, c)
	results := s.some(ctx, 2)
	for i := range results {
		results[i].Request = request // which has the count 2
	}
	c, devices = s.prepared(ctx, results...)
	s.expectDevices(c, devices)
	s.end(ctx, c)
	c = s.allocate(ctx, s.createNamed(ctx, longestName(), request), allocationOf(s.pick(ctx)))
	s.expectDevices(c, s.prepare(ctx, c))
}

// expectDevices ends the case unless a response has the devices of the claim.
func (s *suite) expectDevices(c *claim, devices []*dra.Device) {
	allocated := map[string]bool{}
	for _, r := range c.results() {
		allocated[deviceKey(r.Pool, r.Device, "")] = true
	}
	answered := map[string]bool{}
	for _, d := range devices {
		key := deviceKey(d.PoolName, d.DeviceName, "")
		if !allocated[key] {
			s.fatal("the response has device %s, which is not allocated to the claim", key)
		}
		answered[key] = true
	}
	for key := range allocated {
		if !answered[key] {
			s.fatal("device %s is allocated to the claim, but is not in the response (a driver that does not use CDI to give "+
				"devices to containers declares answersNoDevices)", key)
		}
	}
}

func casePrepareEntries(ctx context.Context, s *suite) {
	s.prepared(ctx)
	first, second := s.allocated(ctx), s.allocated(ctx)
	responses, err := s.main().prepare(ctx, first.proto(), second.proto())
	s.must(err, "prepare two claims")
	for _, c := range []*claim{first, second} {
		if responses[string(c.UID)] == nil {
			s.fatal("the response has no entry for claim UID %s", c.UID)
		}
	}
	if len(responses) != 2 {
		s.fatal("the request has 2 claims, but the response has %d entries", len(responses))
	}
	s.expectSeparate(first, second, responses[string(first.UID)].GetDevices())
	s.expectSeparate(second, first, responses[string(second.UID)].GetDevices())
}

// expectSeparate ends the case if the entry of a claim has a device, or a share, of the other claim of the call.
func (s *suite) expectSeparate(c, other *claim, devices []*dra.Device) {
	has := func(c *claim, d *dra.Device) bool {
		return slices.ContainsFunc(c.results(), func(r resourceapi.DeviceRequestAllocationResult) bool {
			sameShare := d.GetShareId() == "" || d.GetShareId() == string(ptr.Deref(r.ShareID, ""))
			return r.Device == d.DeviceName && sameShare
		})
	}
	for _, d := range devices {
		if has(other, d) && !has(c, d) {
			s.fatal("the entry of claim %s has device %s, which is allocated to claim %s of the same call", c.Name,
				deviceKey(d.PoolName, d.DeviceName, d.GetShareId()), other.Name)
		}
	}
}

func casePrepareTwice(ctx context.Context, s *suite) {
	c, devices := s.prepared(ctx)
	before := s.contents(devices)
	s.same(devices, s.prepare(ctx, c), "in a second call")
	s.unchanged(before, devices, "after a second call")
	i := slices.IndexFunc(s.devices(ctx), device.shared)
	if i < 0 || s.server == nil { // claims of others may have shares on a live node
		return
	}
	s.end(ctx, c)
	c, devices = s.prepared(ctx, s.share(s.devices(ctx)[i], largest)) // which does not leave room for another one
	s.same(devices, s.prepare(ctx, c), "in a second call for the largest share of a device")
}

func casePrepareRestart(ctx context.Context, s *suite) {
	s.requireRestart()
	c, devices := s.prepared(ctx)
	before := s.contents(devices)
	s.startAgain(ctx, stopSignal)
	s.same(devices, s.prepare(ctx, c), "after a restart of the driver")
	s.unchanged(before, devices, "after a restart of the driver and another call")
}

func casePrepareConcurrently(ctx context.Context, s *suite) {
	c := s.allocated(ctx)
	const callers = 8
	devices, errs := make([][]*dra.Device, callers), make([]error, callers)
	k := s.main()
	var wait sync.WaitGroup
	for i := range callers {
		wait.Go(func() { devices[i], errs[i] = k.tryPrepare(ctx, c.proto()) })
	}
	wait.Wait()
	for i := range callers {
		s.must(errs[i], "one of %d calls", callers)
		s.same(devices[0], devices[i], "in a concurrent call")
	}
	s.end(ctx, c)
	s.prepareEach(ctx, s.several(ctx, callers))
}

// several creates up to n claims, each with a device or a share.
func (s *suite) several(ctx context.Context, n int) (claims []*claim) {
	for _, r := range s.some(ctx, n) {
		claims = append(claims, s.allocated(ctx, resultFor(r, request)))
	}
	return claims
}

// prepareEach prepares claims and then unprepares them, each in a separate call, all at the same time.
func (s *suite) prepareEach(ctx context.Context, claims []*claim) {
	k := s.main()
	each := func(f func(i int) error) error {
		errs := make([]error, len(claims))
		var wait sync.WaitGroup
		for i := range claims {
			wait.Go(func() { errs[i] = f(i) })
		}
		wait.Wait()
		return errors.Join(errs...)
	}
	devices := make([][]*dra.Device, len(claims))
	s.must(each(func(i int) (err error) {
		devices[i], err = k.tryPrepare(ctx, claims[i].proto())
		return err
	}), "prepare %d claims at the same time", len(claims))
	s.must(each(func(i int) error { return k.tryUnprepare(ctx, claims[i].proto()) }),
		"unprepare %d claims at the same time", len(claims))
	if s.env.CDIDir != "" {
		s.resolves(cdiIDs(slices.Concat(devices...)), false)
	}
}

func casePrepareNothing(ctx context.Context, s *suite) {
	responses, err := s.main().prepare(ctx)
	s.must(err, "prepare no claims")
	if len(responses) != 0 {
		s.fatal("the request has no claims, but the response has %d entries", len(responses))
	}
}

// gone returns a claim that is allocated a device which does not exist.
func (s *suite) gone(ctx context.Context) *claim {
	r := s.pick(ctx)
	s.used[r.Device]-- // no claim of the case uses the device
	r.Device = missingDevice
	return s.allocated(ctx, r)
}

func casePrepareOneFails(ctx context.Context, s *suite) {
	bad := s.gone(ctx)
	good := s.several(ctx, 2)
	all := []*dra.Claim{good[0].proto(), bad.proto()}
	for _, c := range good[1:] {
		all = append(all, c.proto())
	}
	responses, err := s.main().prepare(ctx, all...)
	s.must(err, "prepare %d claims, of which one has no device", len(all))
	if r := responses[string(bad.UID)]; r.GetError() == "" && len(r.GetDevices()) > 0 {
		s.skip("the driver prepares a device that does not exist; see PREP-14")
	}
	for _, c := range good {
		r := responses[string(c.UID)]
		if r == nil || r.GetError() != "" {
			s.fatal("a claim with a device failed because of the other one: %q", r.GetError())
		}
		if s.env.CDIDir != "" {
			s.resolves(cdiIDs(r.GetDevices()), true)
		}
	}
}

func casePrepareLater(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	r := s.pick(ctx)
	missing := resultFor(r, "missing")
	missing.Device = missingDevice
	c := s.allocated(ctx, r, missing)
	_, _ = s.main().tryPrepare(ctx, c.proto()) // PREP-14 reports success
	c = s.allocate(ctx, c, resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{r}})
	devices, err := s.main().tryPrepare(ctx, c.proto())
	s.must(err, "prepare after the cause of the first failure is gone")
	for _, d := range devices {
		if d.DeviceName == missingDevice {
			s.fatal("the response still has the device of the call that failed")
		}
	}
}

func casePrepareMissing(ctx context.Context, s *suite) {
	s.expectRefusal(ctx, &dra.Claim{Namespace: s.config.Namespace, Name: missingClaim, Uid: string(uuid.NewUUID())},
		"a claim that does not exist")
}

func casePrepareReplaced(ctx context.Context, s *suite) {
	other := s.allocated(ctx).proto()
	other.Uid = string(uuid.NewUUID())
	s.expectRefusal(ctx, other, "a claim with another UID")
}

func casePrepareUnallocated(ctx context.Context, s *suite) {
	s.expectRefusal(ctx, s.create(ctx, request).proto(), "a claim without allocation")
}

// ofOther returns a result of another driver.
func ofOther() resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{
		Request: "other", Driver: otherDriver, Pool: "other-pool", Device: "other-device",
	}
}

func casePrepareOtherDriver(ctx context.Context, s *suite) {
	r := s.pick(ctx)
	namesake := ofOther() // with the names of a device of the driver
	namesake.Pool, namesake.Device = r.Pool, r.Device
	_, devices := s.prepared(ctx, r, ofOther(), namesake)
	for _, d := range devices {
		if d.DeviceName == "other-device" || slices.Contains(d.RequestNames, namesake.Request) {
			s.fatal("the response has device %s for %v, which belongs to another driver", d.DeviceName, d.RequestNames)
		}
	}
}

func casePrepareInUse(ctx context.Context, s *suite) {
	r := s.pickExclusive(ctx)
	first, devices := s.prepared(ctx, r)
	second := s.allocated(ctx, r)
	s.expectRefusal(ctx, second.proto(), "a device that another claim has")
	s.same(devices, s.prepare(ctx, first), "after another claim was refused")
	if s.server != nil && s.config.Serve == nil {
		s.startAgain(ctx, stopSignal)
		s.expectRefusal(ctx, second.proto(), "a device that another claim has, after a restart of the driver")
	}
	s.end(ctx, first)
	third, k := s.allocated(ctx, r), s.main()
	var errs [2]error
	var wait sync.WaitGroup
	for i, c := range []*claim{second, third} {
		wait.Go(func() { _, errs[i] = k.tryPrepare(ctx, c.proto()) })
	}
	wait.Wait()
	if errs[0] == nil && errs[1] == nil {
		s.fatal("prepare of two claims with the same device at the same time succeeded for both")
	}
	for _, err := range errs {
		s.expectResponse(err, "prepare of a device that another call may have prepared")
	}
}

func casePrepareGone(ctx context.Context, s *suite) {
	s.expectRefusal(ctx, s.gone(ctx).proto(), "a device that does not exist")
	hooks := s.config.Hooks
	if len(hooks.RemoveDevice) == 0 || len(hooks.RestoreDevice) == 0 {
		return
	}
	c := s.allocated(ctx)
	name := c.results()[0].Device
	_, err := s.hook(ctx, hooks.RemoveDevice, name)
	s.must(err, "remove device %s", name)
	defer func() {
		s.restart = true
		_, _ = s.hook(context.WithoutCancel(ctx), hooks.RestoreDevice, name)
	}()
	err = poll(ctx, func() error {
		_, refused := s.main().tryPrepare(ctx, c.proto())
		if refused == nil { // another call must answer the same
			s.unprepare(ctx, c)
			return errors.New("prepare still succeeds")
		}
		s.expectResponse(refused, "prepare of device %s, which was removed from the node", name)
		return nil
	})
	s.must(err, "prepare of device %s, which was removed from the node", name)
}

func casePrepareNoDevices(ctx context.Context, s *suite) {
	c := s.allocated(ctx, ofOther())
	devices, err := s.main().tryPrepare(ctx, c.proto())
	if err != nil {
		s.expectResponse(err, "prepare of a claim without a device of the driver")
		s.skip("the driver refuses a claim without a device of the driver; the kubelet does not request that: %v", err)
	}
	if len(devices) > 0 {
		s.fatal("the claim has no device of the driver, but the response has %d", len(devices))
	}
	s.unprepare(ctx, c)
}

// casePrepareUnnamed prepares a claim of a pod with containers that do not name it.
func casePrepareUnnamed(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	c := s.allocated(ctx)
	devices := s.prepare(ctx, s.reserve(ctx, c, s.pod(ctx, c, nil)))
	s.complete(devices)
	if len(devices) != len(c.results()) {
		s.fatal("no container names the claim, and the response has %d devices, want %d", len(devices), len(c.results()))
	}
}

// some returns allocation results for up to n devices or shares, each for a separate request.
func (s *suite) some(ctx context.Context, n int) (results []resourceapi.DeviceRequestAllocationResult) {
	add := func(d device) {
		if len(results) < n {
			results = append(results, resultFor(s.take(d), fmt.Sprintf("%s-%d", request, len(results))))
		}
	}
	for _, d := range s.devices(ctx) {
		switch {
		case d.shared():
			for range room(d) {
				add(d)
			}
		case !s.taken(d):
			add(d)
		}
	}
	return results
}

// room returns the number of smallest shares that a device has room for.
func room(d device) int {
	n := 32
	for _, c := range d.Capacity {
		if size := smallest(c); size.Sign() > 0 {
			n = min(n, int(c.Value.AsApproximateFloat64()/size.AsApproximateFloat64()))
		}
	}
	return n
}

func casePrepareMany(ctx context.Context, s *suite) {
	all := false // whether the claim has all devices of the driver
	for _, n := range []int{1, 10, 32} {
		if all {
			break
		}
		s.used = nil
		results := s.some(ctx, n)
		all = len(results) < n
		n = len(results)
		start := time.Now()
		c, devices := s.prepared(ctx, results...)
		if took := time.Since(start); took > s.config.callTimeout {
			s.fatal("prepare of %d devices took %v", n, took)
		}
		if len(devices) < n && (len(devices) > 0 || !s.config.AnswersNoDevices) {
			s.fatal("the claim has %d devices, but the response has %d", n, len(devices))
		}
		s.end(ctx, c)
		s.numbers = map[string]float64{"prepareMostDevices": float64(n)}
	}
	s.used = nil
	claims := s.several(ctx, 10)
	var protos []*dra.Claim
	for _, c := range claims {
		protos = append(protos, c.proto())
	}
	responses, err := s.main().prepare(ctx, protos...) // within the limit of one call
	s.must(err, "prepare %d claims in one call", len(claims))
	for _, c := range claims {
		if r := responses[string(c.UID)]; r == nil || r.GetError() != "" {
			s.fatal("a claim of a call with %d claims failed: %q", len(claims), r.GetError())
		}
	}
}

func casePrepareFast(ctx context.Context, s *suite) {
	const limit = time.Second
	var slowest time.Duration
	for range 20 {
		s.used = nil
		c := s.allocated(ctx)
		start := time.Now()
		s.prepare(ctx, c)
		slowest = max(slowest, time.Since(start))
		s.end(ctx, c)
	}
	s.numbers = map[string]float64{"prepareSlowestOf20Ms": float64(slowest.Milliseconds())}
	if slowest > limit {
		s.fatal("the slowest of 20 calls took %v; the limit is %v", slowest, limit)
	}
}

func casePrepareRequestNames(ctx context.Context, s *suite) {
	c, devices := s.prepared(ctx)
	for _, d := range devices {
		for _, name := range d.RequestNames {
			if name != c.results()[0].Request {
				s.fatal("the response has device %s for request %q, which the claim does not have", d.DeviceName, name)
			}
		}
	}
}

func casePrepareRequests(ctx context.Context, s *suite) {
	first, second := resultFor(s.pick(ctx), "first"), resultFor(s.pick(ctx), "second")
	c, devices := s.prepared(ctx, first, second)
	for _, r := range []resourceapi.DeviceRequestAllocationResult{first, second} {
		found := false
		for _, d := range devices {
			if len(d.RequestNames) != 1 {
				s.fatal("the response has device %s for the requests %v; it is allocated for one", d.DeviceName, d.RequestNames)
			}
			share := ""
			if r.ShareID != nil {
				share = string(*r.ShareID)
			}
			sameDevice := d.DeviceName == r.Device && (share == "" || d.GetShareId() == "" || d.GetShareId() == share)
			found = found || sameDevice && d.RequestNames[0] == r.Request
			if first.Device != second.Device && sameDevice && d.RequestNames[0] != r.Request {
				s.fatal("the response has device %s for request %s, but it is allocated for %s", d.DeviceName, d.RequestNames[0],
					r.Request)
			}
		}
		if !found {
			s.complete(devices)
			s.fatal("the response has no device for request %s", r.Request)
		}
	}
	if first.Device != second.Device {
		s.givesOwn(ctx, c, devices, [2]resourceapi.DeviceRequestAllocationResult{first, second})
	}
}

// givesOwn ends the case if containers of one request get edits of the other request's device:
// edits that a claim for that device alone contains, and that a claim for their own device does not
// contain.
func (s *suite) givesOwn(
	ctx context.Context, c *claim, devices []*dra.Device, results [2]resourceapi.DeviceRequestAllocationResult,
) {
	var both, alone [2][]string
	for i, r := range results {
		own := slices.DeleteFunc(slices.Clone(devices), func(d *dra.Device) bool {
			return !slices.Contains(d.RequestNames, r.Request)
		})
		both[i] = s.values(own)
	}
	s.end(ctx, c)
	for i, r := range results {
		c, devices := s.prepared(ctx, r)
		alone[i] = s.values(devices)
		s.end(ctx, c)
	}
	for i := range results {
		for _, v := range both[i] {
			if slices.Contains(alone[1-i], v) && !slices.Contains(alone[i], v) {
				s.fatal("a container that references request %s only gets %s, which is of device %s of request %s",
					results[i].Request, v, results[1-i].Device, results[1-i].Request)
			}
		}
	}
}

// opaque returns the configuration of an allocation.
func opaque(
	driver, parameters string, source resourceapi.AllocationConfigSource, requests ...string,
) resourceapi.DeviceAllocationConfiguration {
	c := resourceapi.DeviceAllocationConfiguration{Source: source, Requests: requests}
	c.Opaque = &resourceapi.OpaqueDeviceConfiguration{Driver: driver,
		Parameters: runtime.RawExtension{Raw: []byte(parameters)}}
	return c
}

// parameters returns the first of the driver's parameters; it skips the case if there are
// fewer than n.
func (s *suite) parameters(n int) []string {
	if len(s.config.Parameters) < n {
		s.skip("needs %d examples of the driver's opaque parameters: set parameters", n)
	}
	return s.config.Parameters
}

// effect describes what containers get from a device that is allocated with the configuration.
func (s *suite) effect(
	ctx context.Context, request string, config ...resourceapi.DeviceAllocationConfiguration,
) string {
	s.used = nil
	c := s.configured(ctx, config, resultFor(s.pick(ctx), request))
	devices := s.prepare(ctx, c)
	text := s.fingerprint(ctx, c, devices)
	s.end(ctx, c)
	return text
}

// effects returns the effects of the first two of the driver's parameters on a request. It skips
// the case if they do not differ.
func (s *suite) effects(ctx context.Context, request string) (first, second string) {
	p := s.parameters(2)
	name, source := s.config.Driver, resourceapi.AllocationConfigSourceClaim
	first, second = s.effect(ctx, request, opaque(name, p[0], source)), s.effect(ctx, request, opaque(name, p[1], source))
	if first == second {
		s.skip("the CDI edits show no difference between the two examples of parameters: set hooks.effect")
	}
	return first, second
}

func caseParametersMerged(ctx context.Context, s *suite) {
	first, second := s.effects(ctx, request)
	p, name := s.parameters(2), s.config.Driver
	fromClass, fromClaim := resourceapi.AllocationConfigSourceClass, resourceapi.AllocationConfigSourceClaim
	check := func(want, what string, config ...resourceapi.DeviceAllocationConfiguration) {
		if got := s.effect(ctx, request, config...); got != want {
			s.fatal("%s: got %s, want %s", what, got, want)
		}
	}
	check(first, "the parameters of the class have no effect", opaque(name, p[0], fromClass))
	check(second, "the parameters of the class have no effect", opaque(name, p[1], fromClass))
	for i, want := range []string{first, second} { // one of them may be the default
		for _, source := range []resourceapi.AllocationConfigSource{fromClass, fromClaim} {
			check(want, fmt.Sprintf("parameters from %s that name the request have no effect", source),
				opaque(name, p[i], source, request))
		}
	}
	const wins = "the claim's parameters must win over those of the class"
	check(first, wins, opaque(name, p[1], fromClass), opaque(name, p[0], fromClaim))
	check(second, wins, opaque(name, p[0], fromClass), opaque(name, p[1], fromClaim))
	check(first, "the parameters of another driver have an effect",
		opaque(name, p[0], fromClaim), opaque(otherDriver, `{"x":1}`, fromClaim))
	check(first, "the parameters of another request have an effect",
		opaque(name, p[0], fromClaim, request), opaque(name, p[1], fromClaim, "other"))
}

func caseParametersInvalid(ctx context.Context, s *suite) {
	source := resourceapi.AllocationConfigSourceClaim
	const unknown = `{"apiVersion":"no-such-version.conformance.example/v1","kind":"NoSuchKind","conformanceUnknown":1}`
	c := s.configured(ctx, []resourceapi.DeviceAllocationConfiguration{opaque(s.config.Driver, unknown, source)})
	s.expectRefusal(ctx, c.proto(), "a claim with parameters of an unknown kind")
	s.used = nil
	c = s.configured(ctx, []resourceapi.DeviceAllocationConfiguration{
		opaque(s.config.Driver, unknown, resourceapi.AllocationConfigSourceClass),
	})
	s.expectRefusal(ctx, c.proto(), "a claim of a class with parameters of an unknown kind")
	if len(s.config.Parameters) == 0 {
		return
	}
	var fields map[string]any
	s.must(json.Unmarshal([]byte(s.config.Parameters[0]), &fields), "parameters")
	fields["conformanceUnknown"] = 1
	raw, err := json.Marshal(fields)
	s.must(err, "parameters")
	s.used = nil
	c = s.configured(ctx, []resourceapi.DeviceAllocationConfiguration{opaque(s.config.Driver, string(raw), source)})
	s.expectRefusal(ctx, c.proto(), "a claim with parameters with an unknown field")
}

func caseParametersLong(ctx context.Context, s *suite) {
	const long = 9 * 1024
	all := s.parameters(1)
	i := slices.IndexFunc(all, func(p string) bool {
		return len(p) > long &&
			len(p) <= resourceapi.OpaqueParametersMaxLength
	})
	if i < 0 {
		s.skip("needs an example of the driver's opaque parameters with %d to %d bytes: add one to parameters", long,
			resourceapi.OpaqueParametersMaxLength)
	}
	p := all[i]
	c := s.configured(ctx, []resourceapi.DeviceAllocationConfiguration{
		opaque(s.config.Driver, p, resourceapi.AllocationConfigSourceClaim),
	})
	s.prepare(ctx, c)
}

// The delays before a call is canceled, or the driver killed. The last one reaches slow drivers, even on a busy
// machine. Each ends early if the call has returned.
var (
	canceledAfter = [...]time.Duration{
		0, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond, 200 * time.Millisecond,
	}
	killedAfter = [...]time.Duration{0, 2 * time.Millisecond, 15 * time.Millisecond, 200 * time.Millisecond}
)

func casePrepareCanceled(ctx context.Context, s *suite) {
	check := func(c *claim) {
		devices := s.prepare(ctx, c)
		if ids := cdiIDs(devices); s.env.CDIDir != "" {
			s.resolves(ids, true)
			s.end(ctx, c)
			s.resolves(ids, false)
		}
	}
	for _, limit := range canceledAfter {
		s.used = nil
		c := s.allocated(ctx)
		short, cancel := context.WithTimeout(ctx, limit)
		_, _ = s.main().tryPrepare(short, c.proto()) // it may succeed in time
		cancel()
		check(c)
	}
	if s.server != nil { // while the driver asks for the claim
		s.used = nil
		c := s.allocated(ctx)
		short, cancel := context.WithCancel(ctx)
		defer cancel()
		_, _ = s.whilePreparing(short, s.main(), c, func() {
			cancel()
			<-time.After(interrupted) // until the driver knows
		})
		check(c)
	}
}

func casePrepareKilled(ctx context.Context, s *suite) {
	s.requireKill()
	for _, delay := range killedAfter {
		s.used = nil
		c := s.allocated(ctx)
		done := make(chan struct{})
		k := s.main()
		go func() {
			defer close(done)
			_, _ = k.tryPrepare(ctx, c.proto()) // the driver is killed meanwhile
		}()
		select {
		case <-time.After(delay):
		case <-done:
		}
		s.startAgain(ctx, syscall.SIGKILL)
		<-done
		devices := s.prepare(ctx, c)
		s.end(ctx, c)
		if s.env.CDIDir != "" {
			s.resolves(cdiIDs(devices), false)
		}
	}
}

func caseTwoPods(ctx context.Context, s *suite) {
	c := s.reserve(ctx, s.allocated(ctx), pod("first"), pod("second"))
	devices := s.prepare(ctx, c)
	s.same(devices, s.prepare(ctx, c), "for the second pod")
	s.unprepare(ctx, c)
	if s.env.CDIDir != "" {
		s.resolves(cdiIDs(devices), false)
	}
}

func casePodGroup(ctx context.Context, s *suite) {
	s.prepare(ctx, s.reserve(ctx, s.allocated(ctx), resourceapi.ResourceClaimConsumerReference{
		APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "group", UID: uuid.NewUUID(),
	}))
}

func pod(name string) resourceapi.ResourceClaimConsumerReference {
	return resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: name, UID: uuid.NewUUID()}
}

// reserve sets the consumers of a claim.
func (s *suite) reserve(ctx context.Context, c *claim, consumers ...resourceapi.ResourceClaimConsumerReference) *claim {
	s.requireFakeAPI() // the kube-controller-manager removes pods that do not exist
	c.Status.ReservedFor = consumers
	updated, err := s.client.ResourceV1().ResourceClaims(c.Namespace).UpdateStatus(ctx, c.ResourceClaim,
		metav1.UpdateOptions{})
	s.must(err, "reserve claim %s", c.Name)
	c.ResourceClaim = updated
	return c
}

func caseTwoNodes(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	d := s.find(ctx, "several nodes can use", func(d device) bool { return d.anyNode })
	env, err := s.directories(s.env, "other")
	s.must(err, "create another node")
	first := s.main()
	env.Node, env.PodUID, s.restart = otherNode, "", true
	second, err := s.start(ctx, env)
	s.must(err, "start the driver on another node")
	c := s.allocated(ctx, s.take(d))
	devices := s.prepareOn(ctx, second, c)
	s.prepareOn(ctx, first, c)
	s.unprepareOn(ctx, first, c.proto())
	s.same(devices, s.prepareOn(ctx, second, c), "after unprepare on another node")
}

func caseAdminAccess(ctx context.Context, s *suite) {
	r := s.pick(ctx)
	first, devices := s.prepared(ctx, r)
	admin := r
	yes := true
	admin.AdminAccess, admin.ShareID, admin.ConsumedCapacity = &yes, nil, nil
	s.admin = true // a real API server compares the allocation with the request
	second, _ := s.prepared(ctx, admin)
	s.unprepare(ctx, second)
	s.same(devices, s.prepare(ctx, first), "after a claim with admin access ended")
	if s.env.CDIDir != "" {
		s.resolves(cdiIDs(devices), true)
	}
	s.end(ctx, first)
	s.prepared(ctx, admin)
	s.admin = false
	_, err := s.main().tryPrepare(ctx, s.allocated(ctx, r).proto())
	s.must(err, "prepare of a device that only a claim with admin access has")
}

func caseSubrequest(ctx context.Context, s *suite) {
	const small = request + "/small"
	r := resultFor(s.pick(ctx), small)
	c, devices := s.prepared(ctx, r)
	for _, d := range devices {
		for _, name := range d.RequestNames {
			if name != request && name != r.Request {
				s.fatal("the response has device %s for request %q, want %q or %q", d.DeviceName, name, request, r.Request)
			}
		}
	}
	s.end(ctx, c)
	if len(s.config.Parameters) < 2 {
		s.skip("the claim is prepared; needs 2 examples of the driver's opaque parameters for the rest: set parameters")
	}
	first, second := s.effects(ctx, small)
	p, name, source := s.parameters(2), s.config.Driver, resourceapi.AllocationConfigSourceClaim
	for _, q := range []string{request, small} {
		for i, want := range []string{first, second} { // one of them may be the default
			if got := s.effect(ctx, small, opaque(name, p[i], source, q)); got != want {
				s.fatal("the parameters of request %s have no effect on subrequest %s: got %s, want %s", q, small, got, want)
			}
		}
	}
	want := first
	got := s.effect(ctx, small, opaque(name, p[0], source), opaque(name, p[1], source, request+"/"+otherSubrequest))
	if got != want {
		s.fatal("the parameters of another subrequest have an effect on subrequest %s: got %s, want %s", small, got, want)
	}
}

func caseTolerations(ctx context.Context, s *suite) {
	r := s.pick(ctx)
	r.Tolerations = []resourceapi.DeviceToleration{{
		Key: "conformance.example/any", Operator: resourceapi.DeviceTolerationOpExists,
		Effect: resourceapi.DeviceTaintEffectNoExecute,
	}}
	s.prepared(ctx, r)
}
