// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	beta "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

func caseRegistrationSocket(ctx context.Context, s *suite) {
	name := filepath.Base(s.main().registration)
	if strings.HasPrefix(name, ".") || !strings.HasSuffix(name, ".sock") {
		s.fatal("the registration socket is named %s: it must not start with a dot and must end with .sock", name)
	}
}

func caseRegistrationInfo(ctx context.Context, s *suite) {
	info := s.main().info
	if info.Type != registration.DRAPlugin || info.Name != s.config.Driver || info.Endpoint == "" {
		s.fatal("GetInfo returns type %q, name %q, endpoint %q; want %q, %q, and the path of a socket",
			info.Type, info.Name, info.Endpoint, registration.DRAPlugin, s.config.Driver)
	}
}

func caseRegistrationVersions(ctx context.Context, s *suite) {
	i := s.main()
	versions := i.info.SupportedVersions
	if !slices.Contains(versions, dra.DRAPluginService) {
		s.fatal("GetInfo returns the supported versions %v: %s is missing", versions, dra.DRAPluginService)
	}
	s.must(i.serves(ctx), "call %s, which GetInfo names", dra.DRAPluginService)
	if slices.Contains(versions, beta.DRAPluginService) {
		_, err := beta.NewDRAPluginClient(i.conn).NodePrepareResources(ctx, &beta.NodePrepareResourcesRequest{})
		if status.Code(err) == codes.Unimplemented {
			s.fatal("GetInfo names %s, which the endpoint does not serve: %v", beta.DRAPluginService, err)
		}
	}
}

func caseRegistrationBeta(ctx context.Context, s *suite) {
	c, devices := s.prepared(ctx)
	request := &beta.NodePrepareResourcesRequest{
		Claims: []*beta.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}},
	}
	response, err := beta.NewDRAPluginClient(s.main().conn).NodePrepareResources(ctx, request)
	s.must(err, "call v1beta1.DRAPlugin")
	if got := len(response.GetClaims()[string(c.UID)].GetDevices()); got != len(devices) {
		s.fatal("v1beta1 returns %d devices, and v1 returns %d", got, len(devices))
	}
}

// others returns an environment for another instance on the same node.
func (s *suite) others() Env {
	s.restart = true
	env := s.env
	env.PodUID = ""
	return env
}

func caseRegistrationReady(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	s.restart = true
	old := s.main()
	s.must(old.stop(ctx, stopSignal), "stop the driver")
	for _, path := range []string{old.registration, old.endpoint} {
		_ = os.Remove(path) // REG-12 reports sockets that are left
	}
	i, err := s.launch(old.env)
	s.must(err, "start the driver")
	var info *registration.PluginInfo
	err = poll(ctx, func() error {
		if i.ended() {
			return permanent{i.err}
		}
		paths, err := registrationSockets(s.env.RegistryDir)
		if len(paths) == 0 {
			return errors.Join(err, errors.New("there is no registration socket"))
		}
		info, err = i.getInfo(ctx, paths[0])
		return err
	})
	s.must(err, "GetInfo after a start")
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", i.path(info.Endpoint))
	s.must(err, "connect to the endpoint after GetInfo has returned")
	_ = conn.Close()
}

func caseRegistrationStale(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	old := s.main()
	s.restart = true
	s.must(old.stop(ctx, stopSignal), "stop the driver")
	for _, path := range []string{old.registration, old.endpoint} {
		_ = os.Remove(path) // the driver may have removed it
		s.staleSocket(path)
	}
	_, err := s.start(ctx, old.env)
	s.must(err, "start next to stale sockets of the same names")
}

// staleSocket creates the socket of a process that has ended.
func (s *suite) staleSocket(path string) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	s.must(err, "create a stale socket")
	l.SetUnlinkOnClose(false)
	_ = l.Close()
}

func caseRegistrationAgain(ctx context.Context, s *suite) {
	i := s.main()
	for range 2 {
		info, err := i.getInfo(ctx, i.registration)
		s.must(err, "GetInfo again, as after a restart of the kubelet")
		if info.Endpoint != i.info.Endpoint {
			s.fatal("GetInfo returns the endpoint %s, and returned %s before", info.Endpoint, i.info.Endpoint)
		}
		s.must(i.notify(ctx, i.registration, &registration.RegistrationStatus{PluginRegistered: true}), "notify again")
	}
	s.must(i.disconnect(), "disconnect")
	s.must(i.connect(ctx, i.endpoint), "connect")
	s.must(i.serves(ctx), "call the driver as a kubelet that was restarted")
}

func caseRegistrationRestart(ctx context.Context, s *suite) {
	s.requireRestart()
	before := s.main().info
	s.startAgain(ctx, stopSignal)
	after := s.main().info
	if before.Name != after.Name || before.Type != after.Type || !slices.Equal(before.SupportedVersions,
		after.SupportedVersions) {
		s.fatal("GetInfo returns %v after a restart, and returned %v before", text(after), text(before))
	}
}

func caseRegistrationRefused(ctx context.Context, s *suite) {
	s.requireRestart()
	s.requireFakeAPI()
	i := s.main()
	s.restart = true
	const reason = "conformance-refuses-this-registration"
	i.asked = true // the driver may end
	_ = i.notify(ctx, i.registration, &registration.RegistrationStatus{Error: reason})
	ctx, cancel := context.WithTimeout(ctx, s.config.Quiet.Duration)
	defer cancel()
	err := poll(ctx, func() error {
		if strings.Contains(s.log.String(), reason) || i.ended() {
			return nil
		}
		return errors.New("the driver has neither logged the error nor ended")
	})
	s.must(err, "after a registration that failed")
}

func caseSocketLength(ctx context.Context, s *suite) {
	i := s.main()
	const limit, kubeletDir = 107, "/var/lib/kubelet"
	for _, path := range []string{i.registration, i.endpoint} {
		if s.env.KubeletDir != "" {
			path = strings.Replace(path, s.env.KubeletDir, kubeletDir, 1)
		}
		if len(path) > limit {
			s.fatal("the path of socket %s has %d bytes; the kernel's limit is %d", path, len(path), limit)
		}
	}
}

func caseDriverName(_ context.Context, s *suite) {
	name := s.config.Driver
	for _, slice := range s.slices(context.Background()) {
		name = slice.Spec.Driver
	}
	if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 || len(name) > 63 {
		s.fatal("the name %q, of %d characters, is not a DNS subdomain of at most 63: %v", name, len(name), problems)
	}
}

// whilePreparing calls f while an instance prepares a claim: the API server delays the driver's
// request for the claim until f has returned. If the driver does not make such a request, it may
// have prepared the claim before f is called. whilePreparing returns the result of prepare.
func (s *suite) whilePreparing(ctx context.Context, i *instance, c *claim, f func()) ([]*dra.Device, error) {
	const asks = time.Second // how long a driver may take to request the claim
	reached, release := make(chan struct{}), make(chan struct{})
	reach, free := sync.OnceFunc(func() { close(reached) }), sync.OnceFunc(func() { close(release) })
	defer free()
	defer s.server.Intercept(nil)
	s.server.Intercept(func(r *http.Request, _ runtime.Object) error {
		if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/resourceclaims/"+c.Name) {
			reach()
			select {
			case <-release:
			case <-r.Context().Done():
			}
		}
		return nil
	})
	type result struct {
		devices []*dra.Device
		err     error
	}
	done := make(chan result, 1)
	go func() {
		devices, err := i.tryPrepare(ctx, c.proto())
		done <- result{devices, err}
	}()
	var r result
	select {
	case <-reached:
		f()
		free()
		r = <-done
	case r = <-done:
		f()
	case <-time.After(asks): // it waits for something else
		f()
		free()
		r = <-done
	}
	return r.devices, r.err
}

func caseStop(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	i := s.main()
	s.restart = true
	c := s.allocated(ctx)
	foreign := filepath.Join(s.env.RegistryDir, otherDriver+"-reg.sock")
	s.staleSocket(foreign)
	stopping, cancel := context.WithTimeout(ctx, 30*time.Second) // the grace period of pods
	defer cancel()
	// The call ends with an answer, or with an error of the connection: the kubelet calls again.
	_, _ = s.whilePreparing(stopping, i, c, func() {
		i.asked = true
		s.must(i.kill(syscall.SIGTERM), "stop the driver")
		select {
		case <-i.done:
		case <-time.After(interrupted): // the driver may wait for the call
		}
	})
	select {
	case <-i.done:
	case <-stopping.Done():
		s.fatal("the driver has not ended 30s after SIGTERM")
	}
	for _, path := range []string{i.registration, i.endpoint} {
		if _, err := os.Stat(path); err == nil {
			s.fatal("socket %s still exists after the driver ended", path)
		}
	}
	_, err := s.start(ctx, i.env)
	s.must(err, "start the driver after SIGTERM during prepare")
	if _, err := os.Stat(foreign); err != nil {
		s.fatal("the driver removed the registration socket of another one: %v", err)
	}
	devices, err := s.main().tryPrepare(ctx, c.proto())
	s.must(err, "prepare after SIGTERM during prepare")
	ids := cdiIDs(devices)
	if s.env.CDIDir != "" {
		s.resolves(ids, true)
	}
	s.unprepare(ctx, c)
	if s.env.CDIDir != "" {
		s.resolves(ids, false)
	}
}

// interrupted is how long a call stays in progress after an event that may end it.
const interrupted = 300 * time.Millisecond

func caseUpdateBoth(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	old := s.main()
	c, devices := s.prepared(ctx)
	ids := s.present(cdiIDs(devices))
	second, err := s.start(ctx, s.others())
	s.must(err, "start a second instance")
	s.resolves(ids, true)
	s.endOn(ctx, old, c)
	for _, i := range []*instance{old, second, old} {
		s.must(i.call(ctx), "call an instance")
		c := s.allocated(ctx)
		s.prepareOn(ctx, i, c)
		s.endOn(ctx, i, c)
	}
	if old.endpoint == second.endpoint || old.registration == second.registration {
		s.fatal("both instances have the socket %s", old.endpoint)
	}
	one, other := s.allocated(ctx), s.allocated(ctx)
	result := make(chan error, 1)
	_, err = s.whilePreparing(ctx, old, one, func() {
		go func() {
			_, err := second.tryPrepare(ctx, other.proto())
			result <- err
		}()
		<-time.After(interrupted) // the second instance may wait for the first one
	})
	s.must(err, "prepare of a claim on one instance, and of another claim on the other at the same time")
	s.must(<-result, "prepare of a claim, while the other instance prepares another one")
	s.prepareOnBoth(ctx, old, second)
}

// prepareOnBoth prepares a claim on two instances at the same time.
func (s *suite) prepareOnBoth(ctx context.Context, instances ...*instance) {
	c := s.allocated(ctx)
	var devices [2][]*dra.Device
	var errs [2]error
	var wait sync.WaitGroup
	for n, i := range instances {
		wait.Go(func() { devices[n], errs[n] = i.tryPrepare(ctx, c.proto()) })
	}
	wait.Wait()
	s.must(errors.Join(errs[:]...), "prepare of one claim on both instances at the same time")
	s.same(devices[0], devices[1], "of the other instance")
}

func caseUpdateState(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	old := s.main()
	second, err := s.start(ctx, s.others())
	s.must(err, "start a second instance")
	for _, order := range [][2]*instance{{old, second}, {second, old}} {
		c := s.allocated(ctx)
		devices := s.prepareOn(ctx, order[0], c)
		s.unprepareOn(ctx, order[1], c.proto())
		if s.env.CDIDir != "" {
			s.resolves(cdiIDs(devices), false)
		}
	}
}

func caseUpdateOldEnds(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	s.devices(ctx)
	old := s.main()
	second, err := s.start(ctx, s.others())
	s.must(err, "start a second instance")
	before := s.server.Revision()
	s.must(old.stop(ctx, stopSignal), "stop the old instance")
	for _, change := range s.server.Changes("resourceslices", before) {
		if slice, ok := change.Object.(*resourceapi.ResourceSlice); ok && change.Type == "DELETED" {
			s.fatal("the old instance deleted a ResourceSlice of pool %s when it ended", slice.Spec.Pool.Name)
		}
	}
	for _, path := range []string{second.registration, second.endpoint} {
		if _, err := os.Stat(path); err != nil {
			s.fatal("the end of the old instance removed a socket of the new one: %v", err)
		}
	}
	if len(s.slices(ctx)) == 0 {
		s.fatal("the end of the old instance removed the ResourceSlices")
	}
	s.prepareOn(ctx, second, s.allocated(ctx))
}

func caseUpdateFails(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	s.requireKill()
	old := s.main()
	c, devices := s.prepared(ctx)
	ids := s.present(cdiIDs(devices))
	second, err := s.launch(s.others())
	s.must(err, "start a second instance")
	// The suite kills it when it has opened a socket, which is later than most failures.
	poller, cancel := context.WithTimeout(ctx, s.config.StartTimeout.Duration)
	defer cancel()
	_ = poll(poller, func() error { return second.register(poller, s.env.RegistryDir, s.connected()) })
	s.must(second.stop(ctx, syscall.SIGKILL), "kill the second instance")
	for _, path := range []string{old.registration, old.endpoint} {
		if _, err := os.Stat(path); err != nil {
			s.fatal("the new instance removed a socket of the old one: %v", err)
		}
	}
	s.resolves(ids, true)
	s.endOn(ctx, old, c)
	s.resolves(ids, false)
	s.prepareOn(ctx, old, s.allocated(ctx))
}

func caseUpdateSequential(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	c, devices := s.prepared(ctx)
	before := s.contents(devices)
	s.must(s.main().stop(ctx, stopSignal), "stop the old instance")
	if s.env.CDIDir != "" {
		s.resolves(cdiIDs(devices), true)
	}
	second, err := s.start(ctx, s.others())
	s.must(err, "start the new instance")
	s.same(devices, s.prepareOn(ctx, second, c), "of the next instance")
	s.unchanged(before, devices, "after a call to the next instance")
	s.unprepareOn(ctx, second, c.proto())
}
