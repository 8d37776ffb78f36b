// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
)

// published returns a case that checks the slices that the driver publishes.
func published(check func(driver string, all []resourceapi.ResourceSlice) error) func(context.Context, *suite) {
	return func(ctx context.Context, s *suite) {
		s.devices(ctx) // waits for the first ones
		if err := s.eventually(ctx, s.config.Quiet.Duration, check); err != nil {
			s.fatal("%v", err)
		}
	}
}

// eventually repeats the check of the slices until it succeeds, or the time that a driver has for
// writing them is over.
func (s *suite) eventually(
	ctx context.Context, limit time.Duration, check func(string, []resourceapi.ResourceSlice) error,
) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var err error
	_ = poll(ctx, func() error {
		err = check(s.config.Driver, s.slices(context.WithoutCancel(ctx)))
		return err
	})
	return err
}

// settle waits until the pools are complete and the driver has stopped writing. It returns early if
// pools stay incomplete although the driver writes nothing, and when the context ends: PUB-02 and
// PUB-12 report such drivers.
func (s *suite) settle(ctx context.Context) {
	const still = 300 * time.Millisecond
	last, since := int64(-1), time.Now()
	_ = poll(ctx, func() error {
		if s.server != nil {
			if now := s.server.RevisionOf("resourceslices"); now != last {
				last, since = now, time.Now()
			}
			if time.Since(since) < still {
				return errors.New("the driver writes ResourceSlices")
			}
		}
		all := s.slices(context.WithoutCancel(ctx))
		if len(all) == 0 {
			return errors.New("the driver publishes no ResourceSlices")
		}
		if s.server != nil && time.Since(since) > s.config.Quiet.Duration {
			return nil
		}
		return checkCounts(s.config.Driver, all)
	})
}

// casePoolCounts checks the pools. It checks them again after the driver has started next to
// a slice of an earlier release.
func casePoolCounts(ctx context.Context, s *suite) {
	published(checkCounts)(ctx, s)
	if s.server == nil {
		return
	}
	i := slices.IndexFunc(s.slices(ctx), func(x resourceapi.ResourceSlice) bool {
		return ptr.Deref(x.Spec.NodeName, "") == s.config.Node
	})
	if i < 0 {
		return
	}
	old, left := s.main(), s.slices(ctx)[i]
	s.restart = true
	s.must(old.stop(ctx, stopSignal), "stop the driver")
	left.ObjectMeta = metav1.ObjectMeta{Name: "conformance-left"}
	left.Spec.Devices = []resourceapi.Device{{Name: missingDevice}}
	_, err := s.client.ResourceV1().ResourceSlices().Create(ctx, &left, metav1.CreateOptions{})
	s.must(err, "create a ResourceSlice, as one that an earlier release left")
	_, err = s.start(ctx, old.env)
	s.must(err, "start the driver again")
	err = s.eventually(ctx, s.config.StartTimeout.Duration, func(driver string, all []resourceapi.ResourceSlice) error {
		return errors.Join(checkCounts(driver, all), notOffered(missingDevice)(driver, all))
	})
	s.must(err, "the driver started next to a ResourceSlice of its pool with a device that the node does not have")
}

// pools returns the slices of each pool by generation.
func pools(all []resourceapi.ResourceSlice) map[string]map[int64][]resourceapi.ResourceSlice {
	p := map[string]map[int64][]resourceapi.ResourceSlice{}
	for _, s := range all {
		name := s.Spec.Pool.Name
		if p[name] == nil {
			p[name] = map[int64][]resourceapi.ResourceSlice{}
		}
		p[name][s.Spec.Pool.Generation] = append(p[name][s.Spec.Pool.Generation], s)
	}
	return p
}

// checkChange returns an error if a reader that follows the rule for generations sees
// two devices of one name.
func checkChange(all []resourceapi.ResourceSlice) error {
	for pool, generations := range pools(all) {
		newest := int64(-1)
		for g := range generations {
			newest = max(newest, g)
		}
		current := generations[newest]
		if int64(len(current)) != current[0].Spec.Pool.ResourceSliceCount {
			continue // incomplete: readers wait
		}
		seen := map[string]bool{}
		for _, slice := range current {
			for _, d := range slice.Spec.Devices {
				if seen[d.Name] {
					return fmt.Errorf("pool %s has two devices %s in generation %d", pool, d.Name, newest)
				}
				seen[d.Name] = true
			}
		}
	}
	return nil
}

func casePoolChange(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	hooks := s.config.Hooks
	if len(hooks.RemoveDevice) == 0 {
		s.skip("needs a change of the node: set hooks.removeDevice")
	}
	d := s.devices(ctx)[0]
	before := pools(s.slices(ctx))[d.pool]
	after := s.server.Revision()
	state := map[string]resourceapi.ResourceSlice{}
	for _, slice := range s.slices(ctx) {
		state[slice.Name] = slice
	}
	s.restart = true
	_, err := s.hook(ctx, hooks.RemoveDevice, d.Name)
	s.must(err, "remove device %s", d.Name)
	err = poll(ctx, func() error {
		if len(s.server.Changes("resourceslices", after)) == 0 {
			return errors.New("no ResourceSlice changed")
		}
		return nil
	})
	s.must(err, "after the removal of device %s", d.Name)
	// The pool has settled when it is complete in one generation.
	err = poll(ctx, func() error { return checkCounts(s.config.Driver, s.slices(ctx)) })
	s.must(err, "after the removal of device %s", d.Name)
	for _, change := range s.server.Changes("resourceslices", after) {
		slice, ok := change.Object.(*resourceapi.ResourceSlice)
		if !ok {
			continue
		}
		state[slice.Name] = *slice
		if change.Type == "DELETED" {
			delete(state, slice.Name)
		}
		var now []resourceapi.ResourceSlice
		for _, x := range state {
			now = append(now, x)
		}
		s.must(checkChange(now), "during the change")
	}
	now := pools(s.slices(ctx))[d.pool]
	for generation := range now {
		if before[generation] != nil && len(now[generation]) > 1 {
			s.fatal("pool %s of %d slices still has generation %d after a change", d.pool, len(now[generation]), generation)
		}
	}
}

// editedAttribute is the attribute that PUB-10 adds to a device.
const editedAttribute = "conformanceEdited"

// edit changes a device in its slice, as another client may.
func (s *suite) edit(ctx context.Context, d device) {
	yes := true
	err := poll(ctx, func() error {
		for _, slice := range s.slices(ctx) {
			i := slices.IndexFunc(slice.Spec.Devices, func(x resourceapi.Device) bool { return x.Name == d.Name })
			if i < 0 || slice.Spec.Pool.Name != d.pool {
				continue
			}
			x := &slice.Spec.Devices[i]
			if x.Attributes == nil {
				x.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
			}
			x.Attributes[editedAttribute] = resourceapi.DeviceAttribute{BoolValue: &yes}
			_, err := s.client.ResourceV1().ResourceSlices().Update(ctx, &slice, metav1.UpdateOptions{})
			if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) { // the driver writes it too
				err = permanent{err}
			}
			return err
		}
		return fmt.Errorf("device %s is not published", d.Name)
	})
	s.must(err, "change a ResourceSlice")
}

func casePublishRestores(ctx context.Context, s *suite) {
	d := s.devices(ctx)[0]
	s.restart = true
	restored := func() error {
		for _, slice := range s.slices(ctx) {
			for _, x := range slice.Spec.Devices {
				if _, edited := x.Attributes[editedAttribute]; edited {
					return fmt.Errorf("device %s still has the attribute that another client added", x.Name)
				}
				if x.Name == d.Name {
					return nil
				}
			}
		}
		return fmt.Errorf("device %s is not published", d.Name)
	}
	for _, slice := range s.slices(ctx) {
		has := func(x resourceapi.Device) bool { return x.Name == d.Name }
		if slice.Spec.Pool.Name == d.pool && slices.ContainsFunc(slice.Spec.Devices, has) {
			s.must(s.client.ResourceV1().ResourceSlices().Delete(ctx, slice.Name, metav1.DeleteOptions{}),
				"delete a ResourceSlice")
		}
	}
	s.must(poll(ctx, func() error {
		return errors.Join(restored(), checkCounts(s.config.Driver, s.slices(ctx)))
	}), "after a ResourceSlice was deleted")
	s.edit(ctx, d)
	s.must(poll(ctx, restored), "after a ResourceSlice was changed")
}

func casePublishQuiet(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	s.devices(ctx)
	before := s.server.Revision()
	quiet, cancel := context.WithTimeout(ctx, s.config.Quiet.Duration)
	defer cancel()
	<-quiet.Done()
	if n := len(s.server.Changes("resourceslices", before)); n > 0 {
		s.fatal("nothing changed, but the driver wrote ResourceSlices %d times in %v", n, s.config.Quiet)
	}
}

// republish stops the driver, deletes its slices, and starts it again.
func (s *suite) republish(ctx context.Context, signal syscall.Signal) {
	s.restart = true
	old := s.main()
	s.must(old.stop(ctx, signal), "stop the driver")
	for _, slice := range s.slices(ctx) {
		if strings.HasPrefix(slice.Name, foreignPrefix) {
			continue
		}
		s.must(s.client.ResourceV1().ResourceSlices().Delete(ctx, slice.Name, metav1.DeleteOptions{}),
			"delete a ResourceSlice")
	}
	_, err := s.start(ctx, old.env)
	s.must(err, "start the driver again")
}

// casePublishAgain removes the slices while the driver does not run, as the kubelet does,
// and starts the driver again: after a clean exit, and after it was killed.
func casePublishAgain(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	s.requireKill()
	want := len(s.devices(ctx))
	foreign := s.foreignSlices(ctx)
	for _, signal := range []syscall.Signal{stopSignal, syscall.SIGKILL} {
		s.republish(ctx, signal)
		err := poll(ctx, func() error {
			published := 0
			for _, slice := range s.slices(ctx) {
				published += len(slice.Spec.Devices)
			}
			if published < want {
				return fmt.Errorf("the driver publishes %d devices, and published %d before", published, want)
			}
			return nil
		})
		s.must(err, "the driver ended by %v, the kubelet removed its slices, and the driver came back", signal)
		for _, before := range foreign {
			now, err := s.client.ResourceV1().ResourceSlices().Get(ctx, before.Name, metav1.GetOptions{})
			s.must(err, "get the ResourceSlice of driver %s on node %s", before.Spec.Driver, *before.Spec.NodeName)
			if !equality.Semantic.DeepEqual(before.Spec, now.Spec) {
				s.fatal("the driver changed the ResourceSlice of driver %s on node %s", before.Spec.Driver, *before.Spec.NodeName)
			}
		}
	}
}

// foreignSlices creates a slice of the driver on another node, and one of another driver on this
// node.
func (s *suite) foreignSlices(ctx context.Context) (all []*resourceapi.ResourceSlice) {
	for i, owner := range [][2]string{{s.config.Driver, otherNode}, {otherDriver, s.config.Node}} {
		slice := &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s%d", foreignPrefix, i)},
			Spec: resourceapi.ResourceSliceSpec{Driver: owner[0], NodeName: &owner[1], Pool: resourceapi.ResourcePool{
				Name: owner[1], Generation: 1, ResourceSliceCount: 1}},
		}
		created, err := s.client.ResourceV1().ResourceSlices().Create(ctx, slice, metav1.CreateOptions{})
		s.must(err, "create a ResourceSlice of driver %s on node %s", owner[0], owner[1])
		all = append(all, created)
	}
	return all
}

// foreignPrefix begins the names of slices that do not belong to this driver or this node.
const foreignPrefix = "conformance-foreign-"

// notOffered returns a check that a device is gone, or has a taint that keeps new pods away.
func notOffered(name string) func(string, []resourceapi.ResourceSlice) error {
	return func(_ string, all []resourceapi.ResourceSlice) error {
		return eachDevice(all, func(x resourceapi.Device) error {
			hinders := func(t resourceapi.DeviceTaint) bool { return t.Effect != resourceapi.DeviceTaintEffectNone }
			if x.Name == name && !slices.ContainsFunc(x.Taints, hinders) {
				return errors.New("it is offered without a taint")
			}
			return nil
		})
	}
}

// removeDevice removes a device from the node. The caller must call restore.
func (s *suite) removeDevice(ctx context.Context, name string) (restore func()) {
	hooks := s.config.Hooks
	if len(hooks.RemoveDevice) == 0 {
		s.skip("needs a change of the node: set hooks.removeDevice")
	}
	s.restart = true
	_, err := s.hook(ctx, hooks.RemoveDevice, name)
	s.must(err, "remove device %s", name)
	return func() {
		if len(hooks.RestoreDevice) > 0 {
			_, err := s.hook(context.WithoutCancel(ctx), hooks.RestoreDevice, name)
			s.must(err, "restore device %s", name)
		}
	}
}

// casePublishGone measures the time until a removed device is no longer offered.
func casePublishGone(ctx context.Context, s *suite) {
	d := s.devices(ctx)[0]
	start := time.Now()
	restore := s.removeDevice(ctx, d.Name)
	err := s.eventually(ctx, s.config.StartTimeout.Duration, notOffered(d.Name))
	took := time.Since(start)
	restore()
	s.must(err, "%v after the device was removed from the node", s.config.StartTimeout)
	s.numbers = map[string]float64{"deviceGoneMs": float64(took.Milliseconds())}
	if len(s.config.Hooks.RestoreDevice) == 0 {
		return
	}
	err = s.eventually(ctx, s.config.StartTimeout.Duration, isOffered(d.Name))
	s.must(err, "%v after device %s was restored", s.config.StartTimeout, d.Name)
}

// isOffered returns a check that a device is published without a taint that keeps new pods away.
func isOffered(name string) func(string, []resourceapi.ResourceSlice) error {
	return func(driver string, all []resourceapi.ResourceSlice) error {
		if notOffered(name)(driver, all) == nil {
			return errors.New("it is not offered")
		}
		return nil
	}
}

// caseTaintUnprepare unprepares a claim after its device was removed, as after a failure.
func caseTaintUnprepare(ctx context.Context, s *suite) {
	r := s.pick(ctx)
	c, devices := s.prepared(ctx, r)
	restore := s.removeDevice(ctx, r.Device)
	defer restore()
	err := s.eventually(ctx, s.config.StartTimeout.Duration, notOffered(r.Device))
	s.must(err, "%v after the device was removed from the node", s.config.StartTimeout)
	s.unprepare(ctx, c)
	if s.env.CDIDir != "" {
		s.resolves(cdiIDs(devices), false)
	}
}

// isSlice reports whether a request writes a ResourceSlice.
func isSlice(r *http.Request) bool {
	return r.Method != http.MethodGet && strings.Contains(r.URL.Path, "/resourceslices")
}

func casePublishErrors(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	s.restart = true
	s.devices(ctx)
	const reason = "conformance-refuses-this-slice"
	kind := schema.GroupKind{Group: resourceapi.GroupName, Kind: "ResourceSlice"}
	s.server.Intercept(func(r *http.Request, _ runtime.Object) error {
		if isSlice(r) && r.Method != http.MethodDelete {
			err := apierrors.NewInvalid(kind, "slice", nil)
			err.ErrStatus.Message = reason
			return err
		}
		return nil
	})
	s.republish(ctx, stopSignal)
	i := s.main()
	i.asked = true // the driver may end
	err := poll(ctx, func() error {
		if strings.Contains(s.log.String(), reason) || i.ended() {
			return nil
		}
		return errors.New("the driver has neither logged the error nor ended")
	})
	if s.config.Serve != nil && err != nil {
		s.skip("the log of a driver in the process of the suite is not known: set Command")
	}
	s.must(err, "after the API server refused ResourceSlices as invalid")
	if !i.ended() {
		s.noticesDropped(ctx)
	}
}

// noticesDropped ends the case if the API server drops fields of disabled features and the driver does not react: it
// must log that, end, or publish without these fields.
func (s *suite) noticesDropped(ctx context.Context) {
	gated := s.dropGated()
	before := len(s.log.String())
	s.republish(ctx, stopSignal)
	i := s.main()
	i.asked = true // the driver may end
	noticed := regexp.MustCompile(`(?i)drop|feature|gate`)
	limited, cancel := context.WithTimeout(ctx, s.config.Quiet.Duration)
	defer cancel()
	s.settle(limited)
	if ever, _ := gated(); !ever {
		return
	}
	limited, cancel = context.WithTimeout(ctx, s.config.Quiet.Duration)
	defer cancel()
	s.must(poll(limited, func() error {
		if _, still := gated(); still && !i.ended() && !noticed.MatchString(s.log.String()[before:]) {
			return errors.New("the driver has neither logged that fields were dropped or features are disabled, nor ended, " +
				"nor published without these fields")
		}
		return nil
	}), "after the API server dropped fields of disabled features from ResourceSlices")
}

// dropGated lets the API server drop fields of feature gates from slices. gated reports whether a
// written slice ever had such fields, and whether the last write of a slice still had some.
func (s *suite) dropGated() (gated func() (ever, still bool)) {
	var mu sync.Mutex
	ever, now := false, map[string]bool{} // by the pool and the first device of a slice
	s.server.Intercept(func(_ *http.Request, o runtime.Object) error {
		slice, ok := o.(*resourceapi.ResourceSlice)
		if !ok {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		has, key := false, ""
		for i := range slice.Spec.Devices {
			d := &slice.Spec.Devices[i]
			key = slice.Spec.Pool.Name + "/" + slice.Spec.Devices[0].Name
			has = has || d.AllowMultipleAllocations != nil || len(d.Taints) > 0 || len(d.ConsumesCounters) > 0
			d.AllowMultipleAllocations, d.Taints, d.ConsumesCounters, d.BindingConditions = nil, nil, nil, nil
			for name, c := range d.Capacity {
				c.RequestPolicy = nil
				d.Capacity[name] = c
			}
		}
		ever, now[key] = ever || has, has
		return nil
	})
	return func() (bool, bool) {
		mu.Lock()
		defer mu.Unlock()
		return ever, slices.Contains(slices.Collect(maps.Values(now)), true)
	}
}

func casePublishDropped(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	s.restart = true
	gated := s.dropGated()
	s.republish(ctx, stopSignal)
	s.all = nil
	i := s.main()
	s.devices(ctx)
	before := s.server.Revision()
	quiet, cancel := context.WithTimeout(ctx, s.config.Quiet.Duration)
	defer cancel()
	<-quiet.Done()
	if ever, _ := gated(); !ever {
		s.skip("the driver publishes no field of a feature gate")
	}
	limit := 10 * int(1+s.config.Quiet.Seconds())
	if n := len(s.server.Changes("resourceslices", before)); n > limit {
		s.fatal("the API server dropped fields of disabled features, and the driver wrote ResourceSlices %d times in %v",
			n, s.config.Quiet)
	}
	if i.ended() {
		s.fatal("the driver ended because the API server dropped fields of disabled features: %v", i.err)
	}
}

func caseStableNames(ctx context.Context, s *suite) {
	s.requireRestart()
	names := func() (all []string) {
		s.all = nil
		for _, d := range s.devices(ctx) {
			all = append(all, d.pool+"/"+d.Name)
		}
		slices.Sort(all)
		return all
	}
	before := names()
	if s.server != nil {
		s.republish(ctx, stopSignal)
	} else {
		s.startAgain(ctx, stopSignal)
	}
	if after := names(); !slices.Equal(before, after) {
		s.fatal("the devices are %v after a restart, and %v before", after, before)
	}
}

func caseFinalizers(ctx context.Context, s *suite) {
	before, _ := s.prepared(ctx)
	after, err := s.client.ResourceV1().ResourceClaims(before.Namespace).Get(ctx, before.Name, metav1.GetOptions{})
	s.must(err, "get the claim")
	for _, f := range after.Finalizers {
		if strings.HasPrefix(f, "resource.kubernetes.io/") && !slices.Contains(before.Finalizers, f) {
			s.fatal("the driver added the finalizer %s, which is reserved for Kubernetes, to a claim", f)
		}
	}
	for _, slice := range s.slices(ctx) {
		for _, f := range slice.Finalizers {
			if strings.HasPrefix(f, "resource.kubernetes.io/") {
				s.fatal("a ResourceSlice of pool %s has the finalizer %s, which is reserved for Kubernetes",
					slice.Spec.Pool.Name, f)
			}
		}
	}
	if s.server != nil && slices.Contains(before.Finalizers, resourceapi.Finalizer) &&
		!slices.Contains(after.Finalizers, resourceapi.Finalizer) {
		s.fatal("the driver removed the finalizer %s, which is Kubernetes' own", resourceapi.Finalizer)
	}
}
