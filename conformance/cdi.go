// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// cdiIDs returns the IDs of all devices of a response.
func cdiIDs(devices []*dra.Device) (ids []string) {
	for _, d := range devices {
		ids = append(ids, d.GetCdiDeviceIds()...)
	}
	return ids
}

// cdiCache reads the CDI specs.
func (s *suite) cdiCache() *cdi.Cache {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(s.env.CDIDir), cdi.WithAutoRefresh(false))
	s.must(err, "read CDI specs")
	return cache
}

// rememberStatic remembers the CDI devices that exist before the first claim: no claim owns
// them, and they remain when claims end.
func (s *session) rememberStatic() error {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(s.env.CDIDir), cdi.WithAutoRefresh(false))
	if err != nil {
		return fmt.Errorf("read CDI specs: %w", err)
	}
	s.static = cache.ListDevices()
	return nil
}

// ofClaim returns the IDs that a claim owns.
func (s *suite) ofClaim(ids []string) []string {
	return slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return slices.Contains(s.static, id) })
}

// resolves ends the case unless the specs have all of the IDs or, if want is false, none of
// them. IDs that no claim owns may always exist.
func (s *suite) resolves(ids []string, want bool) {
	cache := s.cdiCache()
	if !want {
		ids = s.ofClaim(ids)
	}
	for _, id := range ids {
		found := cache.GetDevice(id) != nil
		if found == want || !validCDIName(id) { // CDI-01 reports invalid names
			continue
		}
		if want {
			s.fatal("CDI device %s is not in the specs of %s; errors of specs: %v", id, s.env.CDIDir, cache.GetErrors())
		}
		s.fatal("CDI device %s is still in the specs of %s", id, s.env.CDIDir)
	}
}

// present returns the IDs that are in the specs now.
func (s *suite) present(ids []string) []string {
	if s.env.CDIDir == "" || len(ids) == 0 {
		return nil
	}
	cache := s.cdiCache()
	return slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return cache.GetDevice(id) == nil })
}

// withIDs returns the IDs of the CDI devices of a response, and skips the case if there are none.
func (s *suite) withIDs(devices []*dra.Device) []string {
	ids := cdiIDs(devices)
	if len(ids) == 0 {
		s.skip("the driver returns no CDI devices")
	}
	return ids
}

// edits returns the container edits of CDI devices, including the edits of their specs.
func (s *suite) edits(ids []string) (all []specs.ContainerEdits) {
	cache := s.cdiCache()
	for _, id := range ids {
		d := cache.GetDevice(id)
		if d == nil {
			continue // CDI-02
		}
		all = append(all, d.ContainerEdits, d.GetSpec().ContainerEdits)
	}
	return all
}

// values returns the values of variables, the device nodes, and the directories and files that
// devices give to containers.
func (s *suite) values(devices []*dra.Device) (all []string) {
	for _, e := range s.edits(cdiIDs(devices)) {
		for _, v := range e.Env {
			_, value, _ := strings.Cut(v, "=")
			all = append(all, value)
		}
		for _, d := range e.DeviceNodes {
			all = append(all, d.Path)
		}
		for _, m := range e.Mounts {
			all = append(all, m.HostPath)
		}
	}
	return all
}

// fingerprint describes the effect of a claim on its containers, without the names that
// differ between claims. It skips the case if the suite cannot see the effect.
func (s *suite) fingerprint(ctx context.Context, c *claim, devices []*dra.Device) string {
	var text string
	if hook := s.config.Hooks.Effect; len(hook) > 0 {
		var err error
		text, err = s.hook(ctx, slices.Concat(s.claimVariables(c), hook), c.results()[0].Device)
		s.must(err, "run hook effect")
	} else {
		raw, err := json.Marshal(s.edits(s.withIDs(devices)))
		s.must(err, "encode CDI edits")
		text = string(raw)
	}
	names := []string{string(c.UID), c.Name}
	for _, r := range c.results() {
		if r.ShareID != nil {
			names = append(names, string(*r.ShareID))
		}
	}
	for _, name := range names {
		text = strings.ReplaceAll(text, name, "NAME")
		text = strings.ReplaceAll(text, strings.ReplaceAll(name, "-", "_"), "NAME")
		text = strings.ReplaceAll(text, strings.ToUpper(strings.ReplaceAll(name, "-", "_")), "NAME")
	}
	return text
}

// contents returns the edits that devices apply to containers, by the IDs of their CDI devices.
func (s *suite) contents(devices []*dra.Device) string {
	var all []string
	for _, id := range slices.Sorted(slices.Values(cdiIDs(devices))) {
		raw, err := json.Marshal(s.edits([]string{id}))
		s.must(err, "encode CDI edits")
		all = append(all, id+": "+string(raw))
	}
	return strings.Join(all, ", ")
}

// unchanged ends the case unless the CDI devices of a response have the contents that they had.
func (s *suite) unchanged(before string, devices []*dra.Device, when string) {
	if now := s.contents(devices); now != before {
		s.fatal("%s, the CDI devices have other contents: they were %s, and are %s", when, before, now)
	}
}

// conflict returns how two edits of one container contradict each other, or "".
func conflict(a, b []specs.ContainerEdits) string {
	set := map[string]string{}
	collect := func(all []specs.ContainerEdits, add func(what, value string)) {
		for _, e := range all {
			for _, v := range e.Env {
				name, value, _ := strings.Cut(v, "=")
				add("environment variable "+name, value)
			}
			for _, d := range e.DeviceNodes {
				add("device node "+d.Path, fmt.Sprint(d.HostPath, d.Type, d.Major, ":", d.Minor))
			}
			for _, m := range e.Mounts {
				add("mount "+m.ContainerPath, m.HostPath)
			}
		}
	}
	collect(a, func(what, value string) { set[what] = value })
	problem := ""
	collect(b, func(what, value string) {
		if other, ok := set[what]; ok && other != value && problem == "" {
			problem = fmt.Sprintf("%s is %q for one and %q for the other", what, other, value)
		}
	})
	return problem
}

// readSpecs parses all specs in a directory repeatedly until the context ends, and returns an error
// for the first one that is incomplete.
func readSpecs(ctx context.Context, dir string) error {
	for ctx.Err() == nil {
		paths, err := filepath.Glob(filepath.Join(dir, "*.json"))
		if err != nil {
			return err
		}
		for _, path := range paths {
			raw, err := os.ReadFile(path)
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err != nil {
				return err
			}
			if !json.Valid(raw) {
				return fmt.Errorf("%s is incomplete: it has %d bytes and is not JSON", filepath.Base(path), len(raw))
			}
		}
	}
	return nil
}

func caseCDINames(ctx context.Context, s *suite) {
	_, devices := s.prepared(ctx)
	for _, id := range s.withIDs(devices) {
		if !validCDIName(id) {
			s.fatal("CDI device ID %q is not <vendor>/<class>=<name>", id)
		}
	}
}

func caseCDIPresent(ctx context.Context, s *suite) {
	_, devices := s.prepared(ctx)
	s.resolves(s.withIDs(devices), true)
	if s.server != nil && s.free(ctx) {
		s.withoutSpecs(ctx)
	}
}

// withoutSpecs prepares a claim while nothing can be written to the directory of specs. The driver may
// have the directory elsewhere: a call that succeeds is tested like any other.
func (s *suite) withoutSpecs(ctx context.Context) {
	c := s.allocated(ctx)
	away := s.env.CDIDir + ".away"
	s.must(errors.Join(os.Rename(s.env.CDIDir, away), os.WriteFile(s.env.CDIDir, nil, 0o600)),
		"replace the directory of CDI specs with a file")
	restore := sync.OnceValue(func() error { return errors.Join(os.Remove(s.env.CDIDir), os.Rename(away, s.env.CDIDir)) })
	defer func() { _ = restore() }()
	devices, err := s.main().tryPrepare(ctx, c.proto())
	s.must(restore(), "restore the directory of CDI specs")
	when := "after a call that succeeded while CDI specs could not be written"
	if err != nil {
		s.expectResponse(err, "prepare while CDI specs cannot be written")
		devices = s.prepare(ctx, c)
		when = "after a call that failed because CDI specs could not be written, and another one"
	}
	for _, id := range cdiIDs(devices) {
		if validCDIName(id) && s.cdiCache().GetDevice(id) == nil { // CDI-01 reports invalid names
			s.fatal("%s, CDI device %s is not in the specs", when, id)
		}
	}
}

func caseCDIRemoved(ctx context.Context, s *suite) {
	c, devices := s.prepared(ctx)
	ids := s.withIDs(devices)
	s.cdiCache()
	s.unprepare(ctx, c)
	s.resolves(ids, false)
}

func caseCDINotReused(ctx context.Context, s *suite) {
	result := s.pick(ctx)
	first, devices := s.prepared(ctx, result)
	ids := s.withIDs(devices)
	s.unprepare(ctx, first)
	_, devices = s.prepared(ctx, result)
	for _, id := range s.ofClaim(cdiIDs(devices)) {
		if slices.Contains(ids, id) {
			s.fatal("another claim for the same device has the CDI device ID %s too", id)
		}
	}
}

func caseCDIWhole(ctx context.Context, s *suite) {
	s.cdiCache()
	c := s.allocated(ctx)
	reading, stop := context.WithCancel(ctx)
	result := make(chan error, 1)
	go func() { result <- readSpecs(reading, s.env.CDIDir) }()
	defer stop()
	s.cycles(func() {
		s.withIDs(s.prepare(ctx, c))
		s.unprepare(ctx, c)
	})
	stop()
	s.must(<-result, "read the CDI specs while they change")
}

func caseCDIVersion(ctx context.Context, s *suite) {
	_, devices := s.prepared(ctx)
	cache := s.cdiCache()
	for _, id := range s.withIDs(devices) {
		d := cache.GetDevice(id)
		if d == nil {
			continue // CDI-02
		}
		minimum, err := specs.MinimumRequiredVersion(d.GetSpec().Spec)
		s.must(err, "CDI spec %s", d.GetSpec().GetPath())
		// A version above the minimum is not a failure: older runtimes refuse the file, but the CDI
		// specification does not forbid it.
		if compareVersions(d.GetSpec().Version, minimum) < 0 {
			s.fatal("CDI spec %s has the version %s, but its contents need %s", d.GetSpec().GetPath(), d.GetSpec().Version,
				minimum)
		}
	}
	for path, errs := range cache.GetErrors() {
		if strings.HasPrefix(path, s.env.CDIDir) && s.server != nil {
			s.fatal("CDI spec %s: %v", path, errors.Join(errs...))
		}
	}
}

func caseCDIConflict(ctx context.Context, s *suite) {
	_, first := s.prepared(ctx)
	_, second := s.prepared(ctx)
	if problem := conflict(s.edits(s.withIDs(first)), s.edits(cdiIDs(second))); problem != "" {
		s.fatal("a container with two claims gets edits that conflict: %s", problem)
	}
	for _, c := range s.claims {
		s.end(ctx, c)
	}
	_, devices := s.prepared(ctx, s.some(ctx, 2)...)
	for _, d := range devices[1:] {
		if problem := conflict(s.edits(devices[0].GetCdiDeviceIds()), s.edits(d.GetCdiDeviceIds())); problem != "" {
			s.fatal("a container with two devices of a claim gets edits that conflict: %s", problem)
		}
	}
}

func caseCDIRestart(ctx context.Context, s *suite) {
	s.requireRestart()
	_, devices := s.prepared(ctx)
	ids, before := s.withIDs(devices), s.contents(devices)
	s.startAgain(ctx, stopSignal)
	s.resolves(ids, true)
	s.unchanged(before, devices, "after a restart of the driver")
	if s.server == nil || s.config.Serve != nil {
		return
	}
	s.startWithoutClaims(ctx)
	s.resolves(ids, true)
	s.unchanged(before, devices, "after a start of the driver while the API server refused to read claims")
}

// startWithoutClaims starts the driver again, while the API server refuses all requests for claims.
// If the driver ends, startWithoutClaims starts it again afterward.
func (s *suite) startWithoutClaims(ctx context.Context) {
	old := s.main()
	s.must(old.stop(ctx, stopSignal), "stop the driver")
	s.server.Intercept(func(r *http.Request, _ runtime.Object) error {
		if strings.Contains(r.URL.Path, "/resourceclaims") {
			return apierrors.NewInternalError(errors.New("conformance refuses requests for claims"))
		}
		return nil
	})
	i, err := s.launch(old.env)
	s.must(err, "start the driver")
	i.asked = true // the driver may end
	const starts = 2 * time.Second
	limited, cancel := context.WithTimeout(ctx, starts)
	defer cancel()
	_ = poll(limited, func() error {
		if i.ended() {
			return nil
		}
		return i.register(limited, i.env.RegistryDir, s.connected())
	})
	s.server.Intercept(nil)
	s.must(i.stop(ctx, stopSignal), "stop the driver")
	_, err = s.start(ctx, old.env)
	s.must(err, "start the driver after the API server serves claims again")
}

// resultFor returns a copy of an allocation result for another request.
func resultFor(r resourceapi.DeviceRequestAllocationResult, request string) resourceapi.DeviceRequestAllocationResult {
	r.Request = request
	return r
}
