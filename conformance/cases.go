package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
)

// Where Kubernetes says what it asks for.
const (
	proto      = "k8s.io/kubelet/pkg/apis/dra/v1/api.proto"
	pluginDoc  = "k8s.io/dynamic-resource-allocation/kubeletplugin, DRAPlugin"
	kep4381    = "KEP-4381, Communication between kubelet and kubelet plugin"
	kep5075    = "KEP-5075, consumable capacity"
	cdiSpec    = "CNCF Container Device Interface, SPEC.md"
	devicesDoc = proto + ", Device"
)

// Cases are what every plugin must do, in an order in which the simplest
// comes first.
func Cases() []Case {
	return []Case{
		{Name: "prepare answers with the allocated devices", Because: devicesDoc, Run: preparesWhatIsAllocated},
		{Name: "prepare again answers the same", Because: pluginDoc + ": PrepareResourceClaims must be idempotent", Run: preparesAgain},
		{Name: "prepare by several callers at once answers the same", Because: pluginDoc + ": PrepareResourceClaims must be idempotent", Run: preparesAtOnce},
		{Name: "prepare of nothing is no error", Because: proto, Run: preparesNothing},
		{Name: "the device has the share's ID", Because: kep5075 + ": ShareID in the plugin's response", Needs: sharing, Run: answersShareID},
		{Name: "CDI devices are there once prepared, and gone once unprepared", Because: cdiSpec, Needs: cdiVisible, Run: keepsCDISpecs},
		{Name: "a claim that cannot be prepared fails alone", Because: proto + ": errors are per claim", Run: failsAlone},
		{Name: "a claim that does not exist is not prepared", Because: pluginDoc, Run: refusesMissing},
		{Name: "a claim of another UID is not prepared", Because: kep4381 + ": the UID tells a claim from a namesake", Run: checksUID},
		{Name: "a claim without an allocation is not prepared", Because: pluginDoc, Run: refusesUnallocated},
		{Name: "results of other drivers are left alone", Because: kep4381 + ": a claim may have devices of several drivers", Run: leavesOthersAlone},
		{Name: "a device in use is not given to another claim", Because: pluginDoc + ": the driver is the last line of defense", Run: refusesDoubleUse},
		{Name: "claims share a device and do not disturb each other", Because: kep5075, Needs: sharing, Run: sharesADevice},
		{Name: "unprepare of an unknown claim is no error", Because: pluginDoc + ": UnprepareResourceClaims must be idempotent", Run: unpreparesUnknown},
		{Name: "unprepare again is no error", Because: pluginDoc + ": UnprepareResourceClaims must be idempotent", Run: unpreparesAgain},
		{Name: "unprepare works when the claim has been deleted", Because: pluginDoc + ": the ResourceClaim may have been deleted already", Run: unpreparesDeleted},
		{Name: "a claim can be prepared again after unprepare", Because: kep4381 + ": a claim outlives the pods that use it", Run: comesBack},
	}
}

func preparesWhatIsAllocated(ctx context.Context, s *Suite) error {
	c, err := s.allocated(ctx, nil)
	if err != nil {
		return err
	}
	devices, err := s.prepareOne(ctx, c)
	if err != nil {
		return err
	}
	want := c.Status.Allocation.Devices.Results[0]
	if len(devices) == 0 {
		return errors.New("the response has no devices")
	}
	for _, d := range devices {
		if d.PoolName != want.Pool || d.DeviceName != want.Device {
			return fmt.Errorf("the response has device %s/%s, allocated is %s/%s", d.PoolName, d.DeviceName, want.Pool, want.Device)
		}
		if len(d.RequestNames) > 0 && !slices.Contains(d.RequestNames, want.Request) {
			return fmt.Errorf("device %s is for requests %v, allocated for %s", d.DeviceName, d.RequestNames, want.Request)
		}
		for _, id := range d.CdiDeviceIds {
			if _, _, _, err := parser.ParseQualifiedName(id); err != nil {
				return fmt.Errorf("device %s: %w", d.DeviceName, err)
			}
		}
	}
	return nil
}

func preparesAgain(ctx context.Context, s *Suite) error {
	c, err := s.allocated(ctx, nil)
	if err != nil {
		return err
	}
	first, err := s.prepareOne(ctx, c)
	if err != nil {
		return err
	}
	again, err := s.prepareOne(ctx, c)
	if err != nil {
		return fmt.Errorf("the second time: %w", err)
	}
	return same(first, again)
}

func same(first, again []*drapb.Device) error {
	if diff := cmp.Diff(first, again, protocmp.Transform()); diff != "" {
		return fmt.Errorf("answers differ (-first +again):\n%s", diff)
	}
	return nil
}

func preparesAtOnce(ctx context.Context, s *Suite) error {
	c, err := s.allocated(ctx, nil)
	if err != nil {
		return err
	}
	const callers = 8
	answers, errs := make([][]*drapb.Device, callers), make([]error, callers)
	var wait sync.WaitGroup
	for i := range callers {
		wait.Go(func() { answers[i], errs[i] = s.prepareOne(ctx, c) })
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, a := range answers[1:] {
		if err := same(answers[0], a); err != nil {
			return err
		}
	}
	return nil
}

func preparesNothing(ctx context.Context, s *Suite) error {
	answer, err := s.prepare(ctx)
	if err == nil && len(answer) != 0 {
		err = fmt.Errorf("asked for nothing, the response has %d entries", len(answer))
	}
	return err
}

func answersShareID(ctx context.Context, s *Suite) error {
	c, err := s.allocated(ctx, nil)
	if err != nil {
		return err
	}
	devices, err := s.prepareOne(ctx, c)
	if err != nil {
		return err
	}
	want := string(*c.Status.Allocation.Devices.Results[0].ShareID)
	for _, d := range devices {
		if d.GetShareId() != want {
			return fmt.Errorf("device %s has share ID %q, allocated is %q", d.DeviceName, d.GetShareId(), want)
		}
	}
	return nil
}

func cdiVisible(_ context.Context, s *Suite) error {
	if s.CDIDir == "" {
		return errors.New("the directory of CDI specs cannot be looked at from here")
	}
	return nil
}

func keepsCDISpecs(ctx context.Context, s *Suite) error {
	c, err := s.allocated(ctx, nil)
	if err != nil {
		return err
	}
	devices, err := s.prepareOne(ctx, c)
	if err != nil {
		return err
	}
	var ids []string
	for _, d := range devices {
		ids = append(ids, d.CdiDeviceIds...)
	}
	if err := s.cdi(ids, true); err != nil {
		return err
	}
	if err := s.unprepareOne(ctx, c); err != nil {
		return err
	}
	return s.cdi(ids, false)
}

// cdi checks that the CDI library finds the devices, or does not.
func (s *Suite) cdi(ids []string, want bool) error {
	cache, err := cdiapi.NewCache(cdiapi.WithSpecDirs(s.CDIDir), cdiapi.WithAutoRefresh(false))
	if err != nil {
		return err
	}
	for path, errs := range cache.GetErrors() {
		if want && strings.Contains(path, s.Driver) {
			return fmt.Errorf("the CDI library refuses %s: %w", path, errors.Join(errs...))
		}
	}
	for _, id := range ids {
		if found := cache.GetDevice(id) != nil; found != want {
			return fmt.Errorf("CDI device %s in %s: found %t, want %t", id, s.CDIDir, found, want)
		}
	}
	return nil
}

func failsAlone(ctx context.Context, s *Suite) error {
	good, err := s.allocated(ctx, nil)
	if err != nil {
		return err
	}
	bad, err := s.allocated(ctx, func(a *resourceapi.AllocationResult) { a.Devices.Results[0].Device = "no-such-device" })
	if err != nil {
		return err
	}
	responses, err := s.prepare(ctx, bad.proto(), good.proto())
	if err != nil {
		return err
	}
	if err := refused(responses, bad.UID); err != nil {
		return err
	}
	_, err = succeeded(responses, good.UID)
	return err
}

func refusesMissing(ctx context.Context, s *Suite) error {
	return s.mustRefuse(ctx, &drapb.Claim{Namespace: s.Namespace, Name: "conformance-no-such-claim", Uid: string(uuid.NewUUID())})
}

// mustRefuse accepts a refusal of the claim and one of the whole call: the
// kubeletplugin helper fetches claims before it hands any to the driver.
func (s *Suite) mustRefuse(ctx context.Context, c *drapb.Claim) error {
	responses, err := s.prepare(ctx, c)
	if err != nil {
		return ctx.Err()
	}
	return refused(responses, types.UID(c.Uid))
}

func refused(responses map[string]*drapb.NodePrepareResourceResponse, uid types.UID) error {
	r, ok := responses[string(uid)]
	switch {
	case !ok:
		return fmt.Errorf("the response has no entry for claim UID %s", uid)
	case r.Error == "":
		return errors.New("prepare succeeded, and must not")
	}
	return nil
}

func checksUID(ctx context.Context, s *Suite) error {
	c, err := s.allocated(ctx, nil)
	if err != nil {
		return err
	}
	old := c.proto()
	old.Uid = string(uuid.NewUUID())
	return s.mustRefuse(ctx, old)
}

func refusesUnallocated(ctx context.Context, s *Suite) error {
	c, err := s.create(ctx)
	if err != nil {
		return err
	}
	return s.mustRefuse(ctx, c.proto())
}

func leavesOthersAlone(ctx context.Context, s *Suite) error {
	const other = "other.conformance.example"
	c, err := s.allocated(ctx, func(a *resourceapi.AllocationResult) {
		a.Devices.Results = append(a.Devices.Results, resourceapi.DeviceRequestAllocationResult{Request: request, Driver: other, Pool: s.Node, Device: "theirs"})
	})
	if err != nil {
		return err
	}
	devices, err := s.prepareOne(ctx, c)
	if err != nil {
		return err
	}
	for _, d := range devices {
		if d.DeviceName == "theirs" {
			return fmt.Errorf("the response has device %s of driver %s", d.DeviceName, other)
		}
	}
	return nil
}

func refusesDoubleUse(ctx context.Context, s *Suite) error {
	first, err := s.allocated(ctx, nil)
	if err != nil {
		return err
	}
	if _, err := s.prepareOne(ctx, first); err != nil {
		return err
	}
	second, err := s.allocated(ctx, func(a *resourceapi.AllocationResult) {
		a.Devices.Results[0] = first.Status.Allocation.Devices.Results[0]
	})
	if err != nil {
		return err
	}
	responses, err := s.prepare(ctx, second.proto())
	if err != nil {
		return err
	}
	if err := refused(responses, second.UID); err != nil {
		return err
	}
	if err := s.unprepareOne(ctx, first); err != nil {
		return err
	}
	if _, err := s.prepareOne(ctx, second); err != nil {
		return fmt.Errorf("once the first claim is unprepared: %w", err)
	}
	return nil
}

func sharesADevice(ctx context.Context, s *Suite) error {
	var claims [2]*claim
	var devices [2][]*drapb.Device
	for i := range claims {
		var err error
		if claims[i], err = s.allocated(ctx, nil); err != nil {
			return err
		}
		if devices[i], err = s.prepareOne(ctx, claims[i]); err != nil {
			return err
		}
	}
	for _, id := range devices[0][0].CdiDeviceIds {
		if slices.Contains(devices[1][0].CdiDeviceIds, id) {
			return fmt.Errorf("both shares have the CDI device %s", id)
		}
	}
	if err := s.unprepareOne(ctx, claims[0]); err != nil {
		return err
	}
	again, err := s.prepareOne(ctx, claims[1])
	if err != nil {
		return fmt.Errorf("after the other was unprepared: %w", err)
	}
	return same(devices[1], again)
}

func unpreparesUnknown(ctx context.Context, s *Suite) error {
	c := &claim{ResourceClaim: &resourceapi.ResourceClaim{}}
	c.Namespace, c.Name, c.UID = s.Namespace, "conformance-no-such-claim", uuid.NewUUID()
	return s.unprepareOne(ctx, c)
}

func unpreparesAgain(ctx context.Context, s *Suite) error {
	c, err := s.allocated(ctx, nil)
	if err != nil {
		return err
	}
	if _, err := s.prepareOne(ctx, c); err != nil {
		return err
	}
	return errors.Join(s.unprepareOne(ctx, c), s.unprepareOne(ctx, c))
}

func unpreparesDeleted(ctx context.Context, s *Suite) error {
	c, err := s.allocated(ctx, nil)
	if err != nil {
		return err
	}
	if _, err := s.prepareOne(ctx, c); err != nil {
		return err
	}
	if err := s.delete(ctx, c); err != nil {
		return err
	}
	return s.unprepareOne(ctx, c)
}

func comesBack(ctx context.Context, s *Suite) error {
	c, err := s.allocated(ctx, nil)
	if err != nil {
		return err
	}
	for range 2 {
		if _, err := s.prepareOne(ctx, c); err != nil {
			return err
		}
		if err := s.unprepareOne(ctx, c); err != nil {
			return err
		}
	}
	return nil
}
