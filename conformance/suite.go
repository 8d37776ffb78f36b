// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/uuid"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
)

// suite is the state of one case.
type suite struct {
	*session
	claims  []*claim
	used    map[string]int // number of times that claims of the case have a device, by its name
	all     []device       // devices that the driver publishes, after the first use
	admin   bool           // new claims request admin access
	restart bool           // the next case needs a new session
	numbers map[string]float64

	pods      []*corev1.Pod                // that the case started
	podClaims []*resourceapi.ResourceClaim // of these pods
	consumers []*corev1.Pod                // claims are reserved for them; they never run
}

// outcome is the panic that ends a case early.
type outcome struct {
	status  Status
	message string
}

// do runs a case function, which ends early by calling fatal or skip.
func (s *suite) do(ctx context.Context, f func(context.Context, *suite)) (status Status, message string) {
	defer func() {
		if r := recover(); r != nil {
			o, ok := r.(outcome)
			if !ok {
				panic(r)
			}
			status, message = o.status, s.portable(o.message)
		}
	}()
	f(ctx, s)
	return Passed, ""
}

// portable replaces the random parts of a message, so reports of the same driver do not differ: the names and UIDs of
// the case's claims, the IDs of their shares, other names and UIDs, and the directory of the suite.
func (s *suite) portable(message string) string {
	for i, c := range s.claims {
		number := strconv.Itoa(i + 1)
		message = strings.ReplaceAll(message, string(c.UID), "$CLAIM_UID_"+number)
		message = strings.ReplaceAll(message, c.Name, "$CLAIM_"+number)
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.results() {
			if r.ShareID != nil {
				message = strings.ReplaceAll(message, string(*r.ShareID), "$SHARE_ID")
			}
		}
	}
	if s.dir != "" {
		message = strings.ReplaceAll(message, s.env.KubeletDir, "$KUBELET_DIR")
	}
	message = regexp.MustCompile(`(?i)[0-9a-f]{8}([-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}`).ReplaceAllString(message, "$$UID")
	for _, i := range s.instances {
		if prefix, _, ok := strings.Cut(i.env.PodUID, "-"); ok {
			message = strings.ReplaceAll(message, prefix, "$POD")
		}
	}
	// Names end like the names from k8s.io/apimachinery/pkg/util/rand.
	return regexp.MustCompile(`\bconformance-[bcdfghjklmnpqrstvwxz2456789]{8}\b`).ReplaceAllString(message, "$$NAME")
}

// fatal ends the case: the driver does not meet the requirement.
func (s *suite) fatal(format string, args ...any) {
	panic(outcome{Failed, fmt.Sprintf(format, args...)})
}

// skip ends the case: it does not apply to the driver.
func (s *suite) skip(format string, args ...any) {
	panic(outcome{Skipped, fmt.Sprintf(format, args...)})
}

// must ends the case if there is an error.
func (s *suite) must(err error, what string, args ...any) {
	if err != nil {
		s.fatal("%s: %v", fmt.Sprintf(what, args...), err)
	}
}

// main returns the instance that the cases use: the last running one.
func (s *suite) main() *instance {
	for _, i := range slices.Backward(s.instances) {
		if !i.ended() && i.conn != nil {
			return i
		}
	}
	s.fatal("the driver does not run; the end of its log:\n%s", tail(s.log.String(), 20))
	return nil
}

func (s *suite) takeCalls() (calls []string) {
	for _, i := range s.instances {
		calls = append(calls, i.takeCalls()...)
	}
	return calls
}

// requireRestart skips the case unless the suite can restart the driver.
func (s *suite) requireRestart() {
	if s.server == nil && len(s.config.Hooks.PID) == 0 {
		s.skip("the suite cannot restart the driver: set command or hooks.pid")
	}
}

// requireKill skips the case unless the suite can kill the driver.
func (s *suite) requireKill() {
	if s.config.Serve != nil {
		s.skip("the driver runs in the process of the suite, which cannot kill it: set Command")
	}
	s.requireRestart()
}

// requireFakeAPI skips the case unless the suite serves the driver's API.
func (s *suite) requireFakeAPI() {
	if s.server == nil {
		s.skip("needs the API server of the suite: set command")
	}
}

// startAgain stops the driver with a signal and starts it again, as the same pod.
func (s *suite) startAgain(ctx context.Context, signal syscall.Signal) {
	s.restart = true
	old := s.main()
	if s.server == nil {
		s.must(s.killLive(ctx, signal), "restart the driver")
		return
	}
	s.must(old.stop(ctx, signal), "stop the driver")
	_, err := s.start(ctx, old.env)
	s.must(err, "after %v", signal)
}

// killLive kills the driver of Config.Kubelet and waits until another process serves.
func (s *suite) killLive(ctx context.Context, signal syscall.Signal) error {
	before, err := s.livePID(ctx)
	if err != nil {
		return err
	}
	if err := syscall.Kill(before, signal); err != nil {
		return fmt.Errorf("kill process %d: %w", before, err)
	}
	return poll(ctx, func() error {
		now, err := s.livePID(ctx)
		if err == nil && now == before {
			err = fmt.Errorf("process %d still runs", before)
		}
		if err != nil {
			return err
		}
		return s.main().call(ctx)
	})
}

func (s *suite) livePID(ctx context.Context) (pid int, err error) {
	out, err := s.hook(ctx, s.config.Hooks.PID, "")
	if err != nil {
		return 0, err
	}
	if pid, err = strconv.Atoi(out); err != nil || pid <= 1 {
		return 0, fmt.Errorf("hook pid printed %q: it must print the ID of the driver's process", out)
	}
	return pid, nil
}

// device is a device that the driver publishes, with its pool.
type device struct {
	resourceapi.Device
	pool string
	// anyNode reports whether the device is not limited to one node.
	anyNode bool
}

func (d device) shared() bool { return ptr.Deref(d.AllowMultipleAllocations, false) }

// slices returns the ResourceSlices of the driver.
func (s *suite) slices(ctx context.Context) []resourceapi.ResourceSlice {
	list, err := s.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	s.must(err, "list ResourceSlices")
	return slices.DeleteFunc(list.Items,
		func(x resourceapi.ResourceSlice) bool { return x.Spec.Driver != s.config.Driver })
}

// devices returns the devices for this node, without those that have taints. It waits
// until the driver publishes some.
func (s *suite) devices(ctx context.Context) []device {
	if s.all != nil {
		return s.all
	}
	ctx, cancel := context.WithTimeout(ctx, s.publishLimit)
	defer cancel()
	if !s.settled || s.restart {
		s.settled = true
		s.settle(ctx)
	}
	_ = poll(ctx, func() error { // once at least: the time may be over for pools that stay incomplete
		for _, slice := range s.slices(context.WithoutCancel(ctx)) {
			node := ptr.Deref(slice.Spec.NodeName, "")
			if node != "" && s.config.Node != "" && node != s.config.Node {
				continue
			}
			for _, d := range slice.Spec.Devices {
				if len(d.Taints) == 0 && s.config.mayUse(d.Name) {
					s.setConfiguredPolicy(d)
					s.all = append(s.all, device{d, slice.Spec.Pool.Name, node == ""})
				}
			}
		}
		if len(s.all) == 0 {
			return errors.New("no devices")
		}
		return nil
	})
	if len(s.all) == 0 {
		s.silent = true
		s.fatal("driver %s publishes no device without taints for node %s in %v", s.config.Driver, s.config.Node,
			s.publishLimit)
	}
	slices.SortStableFunc(s.all, func(a, b device) int {
		return compareBool(b.Name == s.config.Device, a.Name == s.config.Device)
	})
	slices.SortStableFunc(s.all, func(a, b device) int { return compareBool(a.anyNode, b.anyNode) })
	return s.all
}

// setConfiguredPolicy sets the policy that the configuration describes for capacities without a request
// policy. Kubernetes permits all amounts of these, but the driver may not.
func (s *suite) setConfiguredPolicy(d resourceapi.Device) {
	for name, amount := range s.config.Shares {
		c, ok := d.Capacity[resourceapi.QualifiedName(name)]
		if ok && c.RequestPolicy == nil && ptr.Deref(d.AllowMultipleAllocations, false) {
			c.RequestPolicy = &resourceapi.CapacityRequestPolicy{
				Default: &amount, ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &amount, Step: &amount},
			}
			d.Capacity[resourceapi.QualifiedName(name)] = c
		}
	}
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

// pick returns the result of allocating a device that no claim of the case has, or a
// share of one.
func (s *suite) pick(ctx context.Context) resourceapi.DeviceRequestAllocationResult {
	for _, d := range s.devices(ctx) {
		if !s.taken(d) {
			return s.take(d)
		}
	}
	s.skip("the driver publishes too few devices: it has %d", len(s.devices(ctx)))
	return resourceapi.DeviceRequestAllocationResult{}
}

// pickShared returns the result of allocating a share.
func (s *suite) pickShared(ctx context.Context) resourceapi.DeviceRequestAllocationResult {
	return s.take(s.find(ctx, "allows multiple allocations", device.shared))
}

// pickExclusive returns the result of allocating a device that cannot be shared.
func (s *suite) pickExclusive(ctx context.Context) resourceapi.DeviceRequestAllocationResult {
	return s.take(s.find(ctx, "is allocated as a whole", func(d device) bool { return !d.shared() && !s.taken(d) }))
}

// taken reports whether claims of the case have a device, or all that it has room for.
func (s *suite) taken(d device) bool {
	if d.shared() {
		return s.used[d.Name] >= max(1, room(d))
	}
	return s.used[d.Name] > 0
}

func (s *suite) find(ctx context.Context, what string, f func(device) bool) device {
	all := s.devices(ctx)
	i := slices.IndexFunc(all, f)
	if i < 0 {
		s.skip("the driver publishes no device that %s", what)
	}
	return all[i]
}

// request is the name of the first request of claims.
const request = "device"

// take counts the allocation of a device, or of the smallest share of it, and returns its result.
func (s *suite) take(d device) resourceapi.DeviceRequestAllocationResult {
	r := resourceapi.DeviceRequestAllocationResult{Request: request, Driver: s.config.Driver, Pool: d.pool, Device: d.Name}
	if s.used == nil {
		s.used = map[string]int{}
	}
	s.used[d.Name]++
	if !d.shared() {
		return r
	}
	r.ShareID = ptr.To(uuid.NewUUID())
	r.ConsumedCapacity = amounts(d, smallest)
	return r
}

// share returns the result of allocating a share with amounts of all capacities.
func (s *suite) share(
	d device, amount func(resourceapi.DeviceCapacity) resource.Quantity,
) resourceapi.DeviceRequestAllocationResult {
	r := s.take(d)
	r.ConsumedCapacity = amounts(d, amount)
	return r
}

// amounts returns an amount of each capacity of a device.
func amounts(
	d device, amount func(resourceapi.DeviceCapacity) resource.Quantity,
) map[resourceapi.QualifiedName]resource.Quantity {
	all := map[resourceapi.QualifiedName]resource.Quantity{}
	for name, c := range d.Capacity {
		all[name] = amount(c)
	}
	return all
}

// free reports whether a device or a share is left for another claim of the case.
func (s *suite) free(ctx context.Context) bool {
	return slices.ContainsFunc(s.devices(ctx), func(d device) bool { return !s.taken(d) })
}

// smallest returns the smallest amount that the policy of a capacity lets a share have.
func smallest(c resourceapi.DeviceCapacity) resource.Quantity {
	p := c.RequestPolicy
	switch {
	case p == nil:
		return c.Value
	case p.ValidRange != nil && p.ValidRange.Min != nil && !p.ValidRange.Min.IsZero():
		return *p.ValidRange.Min
	case len(p.ValidValues) > 0:
		return p.ValidValues[0]
	case p.Default != nil:
		return *p.Default
	}
	return c.Value
}

// claim is a ResourceClaim that a case created.
type claim struct {
	*resourceapi.ResourceClaim
	deleted, ended bool
}

func (c *claim) proto() *dra.Claim {
	return &dra.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}
}

func (c *claim) results() []resourceapi.DeviceRequestAllocationResult {
	return c.Status.Allocation.Devices.Results
}

// create creates a claim with requests and without an allocation.
func (s *suite) create(ctx context.Context, requests ...string) *claim {
	return s.createNamed(ctx, "conformance-"+rand.String(8), requests...)
}

func (s *suite) createNamed(ctx context.Context, name string, requests ...string) *claim {
	return s.createAs(ctx, metav1.ObjectMeta{Name: name}, requests...)
}

// createFor creates a claim with annotations.
func (s *suite) createFor(ctx context.Context, annotations map[string]string, requests ...string) *claim {
	return s.createAs(ctx, metav1.ObjectMeta{Name: "conformance-" + rand.String(8), Annotations: annotations}, requests...)
}

func (s *suite) createAs(ctx context.Context, meta metav1.ObjectMeta, requests ...string) *claim {
	meta.Namespace = orDefault(meta.Namespace, s.config.Namespace)
	meta.Finalizers = []string{resourceapi.Finalizer}
	desired := &resourceapi.ResourceClaim{ObjectMeta: meta}
	if s.server == nil {
		desired.Finalizers = nil // the controller that removes it does not see the suite's consumers
	}
	for _, r := range requests {
		desired.Spec.Devices.Requests = append(desired.Spec.Devices.Requests, s.request(r))
	}
	created, err := s.client.ResourceV1().ResourceClaims(meta.Namespace).Create(ctx, desired, metav1.CreateOptions{})
	s.must(err, "create a claim")
	c := &claim{ResourceClaim: created}
	s.claims = append(s.claims, c)
	return c
}

// otherSubrequest is the name of a subrequest without an allocation.
const otherSubrequest = "other"

// request returns a request for one device, or the request of a subrequest REQUEST/SUBREQUEST.
func (s *suite) request(name string) resourceapi.DeviceRequest {
	const class = "conformance"
	if name, sub, ok := strings.Cut(name, "/"); ok {
		q := resourceapi.DeviceRequest{Name: name}
		for _, sub := range []string{sub, otherSubrequest} {
			q.FirstAvailable = append(q.FirstAvailable, resourceapi.DeviceSubRequest{
				Name: sub, DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
			})
		}
		return q
	}
	r := &resourceapi.ExactDeviceRequest{
		DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
	}
	if s.admin {
		r.AdminAccess = ptr.To(true)
	}
	return resourceapi.DeviceRequest{Name: name, Exactly: r}
}

// mainRequest returns the name of a request without the subrequest's name.
func mainRequest(name string) string {
	name, _, _ = strings.Cut(name, "/")
	return name
}

// reallocate deallocates a claim, as the scheduler and the controller of claims do when no pod uses it anymore, and
// allocates something else.
func (s *suite) reallocate(
	ctx context.Context, c *claim, results ...resourceapi.DeviceRequestAllocationResult,
) *claim {
	err := poll(ctx, func() error {
		now := s.read(ctx, c)
		now.Status.Allocation, now.Status.ReservedFor = nil, nil
		updated, err := s.client.ResourceV1().ResourceClaims(c.Namespace).UpdateStatus(ctx, now, metav1.UpdateOptions{})
		if err == nil {
			c.ResourceClaim = updated
		} else if !apierrors.IsConflict(err) { // the driver writes the status too
			err = permanent{err}
		}
		return err
	})
	s.must(err, "deallocate claim %s", c.Name)
	return s.allocate(ctx, c, resourceapi.DeviceAllocationResult{Results: results})
}

// allocate writes an allocation to a claim, as the scheduler does.
func (s *suite) allocate(ctx context.Context, c *claim, allocation resourceapi.DeviceAllocationResult) *claim {
	// The selector permits the driver of this node to write the status of the claim.
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: allocation, NodeSelector: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{
			{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{s.config.Node}},
		}}},
	}}
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{s.consumer(ctx, c)}
	updated, err := s.client.ResourceV1().ResourceClaims(c.Namespace).UpdateStatus(ctx, c.ResourceClaim,
		metav1.UpdateOptions{})
	s.must(err, "allocate claim %s", c.Name)
	c.ResourceClaim = updated
	return c
}

// consumer returns the consumer that an allocated claim is reserved for. The kube-controller-manager deallocates a
// claim that is reserved only for a pod that does not exist.
func (s *suite) consumer(ctx context.Context, c *claim) resourceapi.ResourceClaimConsumerReference {
	if s.server == nil && slices.Contains(s.config.Features, "WorkloadClaims") {
		return resourceapi.ResourceClaimConsumerReference{
			APIGroup: "conformance.example", Resource: "cases", Name: c.Name, UID: uuid.NewUUID(),
		}
	}
	return s.pod(ctx, c, []corev1.ResourceClaim{{Name: podClaim}})
}

// podClaim is the name of the claim in the pods of the suite.
const podClaim = "nic"

// pod creates a pod with a claim, which its container names as given.
func (s *suite) pod(
	ctx context.Context, c *claim, named []corev1.ResourceClaim,
) resourceapi.ResourceClaimConsumerReference {
	desired := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: "conformance-" + rand.String(8)},
		Spec: corev1.PodSpec{
			NodeName:       s.config.Node,
			ResourceClaims: []corev1.PodResourceClaim{{Name: podClaim, ResourceClaimName: &c.Name}},
			Containers: []corev1.Container{{
				Name: "main", Image: "none", Resources: corev1.ResourceRequirements{Claims: named},
			}},
		},
	}
	if s.server == nil { // a real kubelet must not start it
		desired.Spec.NodeName = ""
		desired.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "conformance.example/never"}}
	}
	created, err := s.client.CoreV1().Pods(c.Namespace).Create(ctx, desired, metav1.CreateOptions{})
	s.must(err, "create a pod")
	if s.server == nil { // the fake one ends with the cases
		s.consumers = append(s.consumers, created)
	}
	return resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: created.Name, UID: created.UID}
}

// allocated creates a claim with results; without any, it picks one device.
func (s *suite) allocated(ctx context.Context, results ...resourceapi.DeviceRequestAllocationResult) *claim {
	return s.configured(ctx, nil, results...)
}

// configured creates a claim with configuration and results; without results, it picks
// one device.
func (s *suite) configured(
	ctx context.Context, config []resourceapi.DeviceAllocationConfiguration,
	results ...resourceapi.DeviceRequestAllocationResult,
) *claim {
	if len(results) == 0 {
		results = append(results, s.pick(ctx))
	}
	var requests []string
	for _, r := range results {
		if !slices.Contains(requests, r.Request) {
			requests = append(requests, r.Request)
		}
	}
	for _, x := range config { // an API server refuses configuration for requests that do not exist
		for _, q := range x.Requests {
			known := slices.ContainsFunc(requests, func(r string) bool { return mainRequest(r) == mainRequest(q) })
			if !known {
				requests = append(requests, q)
			}
		}
	}
	c := s.create(ctx, requests...)
	return s.allocate(ctx, c, resourceapi.DeviceAllocationResult{Results: results, Config: config})
}

// prepare prepares a claim and returns its devices.
func (s *suite) prepare(ctx context.Context, c *claim) []*dra.Device {
	return s.prepareOn(ctx, s.main(), c)
}

func (s *suite) prepareOn(ctx context.Context, i *instance, c *claim) []*dra.Device {
	devices, err := i.tryPrepare(ctx, c.proto())
	s.must(err, "prepare claim %s", c.Name)
	return devices
}

// tryPrepare prepares a claim and returns its devices, or the error.
func (k *kubelet) tryPrepare(ctx context.Context, c *dra.Claim) ([]*dra.Device, error) {
	responses, err := k.prepare(ctx, c)
	if err != nil {
		return nil, err
	}
	r, ok := responses[c.Uid]
	switch {
	case !ok:
		return nil, fmt.Errorf("the response has no entry for claim UID %s", c.Uid)
	case r.GetError() != "":
		return nil, errors.New(r.GetError())
	}
	return r.GetDevices(), nil
}

// prepared creates, allocates, and prepares a claim.
func (s *suite) prepared(
	ctx context.Context, results ...resourceapi.DeviceRequestAllocationResult,
) (*claim, []*dra.Device) {
	c := s.allocated(ctx, results...)
	return c, s.prepare(ctx, c)
}

// expectRefusal ends the case unless prepare of the claim returns an error.
func (s *suite) expectRefusal(ctx context.Context, c *dra.Claim, why string) {
	devices, err := s.main().tryPrepare(ctx, c)
	if err == nil {
		s.fatal("prepare of %s succeeded with %d devices, but must fail", why, len(devices))
	}
	s.expectResponse(err, "prepare of %s", why)
}

// expectResponse ends the case if a call failed because the driver did not respond.
func (s *suite) expectResponse(err error, what string, args ...any) {
	if unanswered(err) {
		s.fatal("%s: the driver must return an error, and did not respond: %v", fmt.Sprintf(what, args...), err)
	}
}

// errCrashed is the error of a driver that has ended although no case asked it to.
var errCrashed = errors.New("the driver's process ended, and was not asked to")

// crash returns an error if the driver has crashed since the case began with a process. before is
// 0 if something else started the driver, and the process is not known.
func (s *suite) crash(ctx context.Context, before int) error {
	for _, i := range s.instances {
		if err := i.crashed(); err != nil {
			return err
		}
	}
	if before == 0 || s.restart {
		return nil
	}
	if now, err := s.livePID(ctx); err != nil || now != before {
		return errCrashed
	}
	return nil
}

// unprepare unprepares a claim.
func (s *suite) unprepare(ctx context.Context, c *claim) { s.unprepareOn(ctx, s.main(), c.proto()) }

// end unprepares and deletes a claim, and its device is free for another.
func (s *suite) end(ctx context.Context, c *claim) { s.endOn(ctx, s.main(), c) }

func (s *suite) endOn(ctx context.Context, i *instance, c *claim) {
	s.unprepareOn(ctx, i, c.proto())
	s.must(s.delete(ctx, c), "end")
	c.ended, s.used = true, nil
}

func (s *suite) unprepareOn(ctx context.Context, i *instance, c *dra.Claim) {
	s.must(i.tryUnprepare(ctx, c), "unprepare claim %s", c.Name)
}

func (k *kubelet) tryUnprepare(ctx context.Context, c *dra.Claim) error {
	responses, err := k.unprepare(ctx, c)
	if err != nil {
		return err
	}
	// UNPR-02 reports a response without an entry.
	if message := responses[c.Uid].GetError(); message != "" {
		return errors.New(message)
	}
	return nil
}

// delete deletes a claim unless the case has deleted it.
func (s *suite) delete(ctx context.Context, c *claim) error {
	if c.deleted {
		return nil
	}
	c.deleted = true
	err := s.client.ResourceV1().ResourceClaims(c.Namespace).Delete(ctx, c.Name,
		metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(c.UID))})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete claim %s: %w", c.Name, err)
	}
	return nil
}

// cleanUp unprepares and deletes the claims of a case.
func (s *suite) cleanUp(ctx context.Context) (err error) {
	if err := s.deletePods(ctx, metav1.DeleteOptions{}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if s.server != nil {
		s.server.Intercept(nil)
	}
	status, message := s.do(ctx, func(ctx context.Context, s *suite) {
		for _, c := range s.claims {
			if c.ended {
				continue
			}
			s.unprepare(ctx, c)
			s.must(s.delete(ctx, c), "clean up")
		}
		for _, p := range s.consumers {
			err := s.client.CoreV1().Pods(p.Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{})
			if !apierrors.IsNotFound(err) {
				s.must(err, "delete pod %s", p.Name)
			}
		}
	})
	if status != Passed {
		return errors.New(message)
	}
	return nil
}
