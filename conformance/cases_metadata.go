// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// metadataDir is the directory of metadata in containers.
const metadataDir = "/var/run/kubernetes.io/dra-device-attributes"

// metadataVersions are the known versions, the newest first.
func metadataVersions() []string {
	return []string{"metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"}
}

// metadata has the fields that the versions of the metadata API have in common.
type metadata struct {
	APIVersion string `json:"apiVersion"`
	Metadata   struct {
		Generation int64 `json:"generation"`
	} `json:"metadata"`
	Requests []struct {
		Name    string           `json:"name"`
		Devices []metadataDevice `json:"devices"`
	} `json:"requests"`
}

// devices returns the keys of the devices of all requests.
func (m metadata) devices() (keys []string) {
	for _, q := range m.Requests {
		for _, d := range q.Devices {
			keys = append(keys, deviceKey(d.Pool, d.Name, ""))
		}
	}
	return keys
}

// metadataDevice is a device of the metadata.
type metadataDevice struct {
	Driver      string                         `json:"driver"`
	Pool        string                         `json:"pool"`
	Name        string                         `json:"name"`
	Attributes  map[string]json.RawMessage     `json:"attributes"`
	NetworkData *resourceapi.NetworkDeviceData `json:"networkData"`
}

// metadataFiles returns the metadata files of a response: path in containers to path on
// the node.
func (s *suite) metadataFiles(devices []*dra.Device) map[string]string {
	files := map[string]string{}
	for _, m := range s.metadataMounts(devices) {
		files[m.ContainerPath] = m.HostPath
	}
	return files
}

// metadataMounts returns the mounts of metadata that the CDI devices of a response have.
func (s *suite) metadataMounts(devices []*dra.Device) (mounts []*specs.Mount) {
	for _, e := range s.edits(s.withIDs(devices)) {
		for _, m := range e.Mounts {
			if strings.HasPrefix(m.ContainerPath, metadataDir+"/") {
				mounts = append(mounts, m)
			}
		}
	}
	if len(mounts) == 0 {
		s.fatal("no CDI device mounts a file below %s", metadataDir)
	}
	return mounts
}

// readMetadata decodes a metadata file.
func (s *suite) readMetadata(name string) []metadata {
	objects, _, err := decodeMetadata(name)
	s.must(err, "read metadata")
	return objects
}

// decodeMetadata returns the objects of a metadata file and its content. It returns an error if the file is incomplete
// or does not have an object.
func decodeMetadata(name string) (objects []metadata, raw []byte, err error) {
	if raw, err = os.ReadFile(name); err != nil {
		return nil, nil, err
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	for {
		var m metadata
		err := d.Decode(&m)
		switch {
		case errors.Is(err, io.EOF) && len(objects) == 0:
			return nil, raw, fmt.Errorf("metadata file %s is empty", name)
		case errors.Is(err, io.EOF):
			return objects, raw, nil
		case err != nil:
			return nil, raw, fmt.Errorf("metadata file %s of %d bytes: %w", name, len(raw), err)
		}
		objects = append(objects, m)
	}
}

// metadataPath returns where containers find the metadata of a request of a claim.
func (s *suite) metadataPath(kind, claim, request string) string {
	return path.Join(metadataDir, kind, claim, request, s.config.Driver+"-metadata.json")
}

func caseMetadataPath(ctx context.Context, s *suite) {
	named, devices := s.prepared(ctx)
	want := s.metadataPath("resourceclaims", named.Name, request)
	if files := s.metadataFiles(devices); files[want] == "" {
		s.fatal("the metadata of a claim that pods name is mounted at %v, want %s", files, want)
	}
	results := []resourceapi.DeviceRequestAllocationResult{s.pick(ctx)}
	made := s.allocate(ctx, s.createFor(ctx, map[string]string{resourceapi.PodResourceClaimAnnotation: podClaim},
		request), resourceapi.DeviceAllocationResult{Results: results})
	want = s.metadataPath("resourceclaimtemplates", podClaim, request)
	if files := s.metadataFiles(s.prepare(ctx, made)); files[want] == "" {
		s.fatal("the metadata of a claim of a template, which the pod calls %s, is mounted at %v, want %s", podClaim,
			files, want)
	}
}

func caseMetadataReadOnly(ctx context.Context, s *suite) {
	_, devices := s.prepared(ctx)
	for _, m := range s.metadataMounts(devices) {
		if !slices.Contains(m.Options, "ro") || slices.Contains(m.Options, "rw") {
			s.fatal("the metadata is mounted at %s with the options %v, without ro", m.ContainerPath, m.Options)
		}
		info, err := os.Stat(m.HostPath)
		s.must(err, "metadata file")
		if mode := info.Mode(); !mode.IsRegular() || mode.Perm() != 0o644 {
			s.fatal("the metadata file %s has the mode %v, want -rw-r--r--", m.HostPath, mode)
		}
	}
}

// caseMetadataContainers checks the metadata of containers that reference single requests
// of a claim: the kubelet passes them the CDI devices of these requests only.
func caseMetadataContainers(ctx context.Context, s *suite) {
	requests := []string{"first", "second"}
	results := []resourceapi.DeviceRequestAllocationResult{
		resultFor(s.pick(ctx), requests[0]), resultFor(s.pick(ctx), requests[1]),
	}
	c, devices := s.prepared(ctx, results...)
	seen := func(when string) {
		for _, name := range requests {
			own := slices.DeleteFunc(slices.Clone(devices), func(d *dra.Device) bool {
				return len(d.RequestNames) > 0 && !slices.Contains(d.RequestNames, name)
			})
			file := s.metadataFiles(own)[s.metadataPath("resourceclaims", c.Name, name)]
			if file == "" {
				s.fatal("%s, a container with the request %s of the claim gets no metadata of this request", when, name)
			}
			s.readMetadata(file)
		}
	}
	seen("after prepare")
	other, _ := s.prepared(ctx)
	s.unprepare(ctx, other)
	devices = s.prepare(ctx, c)
	seen("after prepare for another pod, and unprepare of another claim")
	if s.server == nil || s.config.Serve != nil {
		return
	}
	s.startAgain(ctx, stopSignal)
	seen("after a restart of the driver")
}

// caseMetadataUpdates reads the metadata continuously while the claim is prepared again. The driver
// may add data that it learns later, such as network data.
func caseMetadataUpdates(ctx context.Context, s *suite) {
	for range s.config.Cycles / 5 {
		c, devices := s.prepared(ctx)
		reading, stop := context.WithCancel(ctx)
		results := make(chan error, 1)
		files := s.metadataFiles(devices)
		go func() { results <- watchMetadata(reading, files) }()
		_ = s.prepare(ctx, c)
		select {
		case <-time.After(100 * time.Millisecond): // a driver may write in the background
		case <-ctx.Done():
		}
		stop()
		s.must(<-results, "while the claim is prepared")
		s.end(ctx, c)
	}
}

// watchMetadata reads files repeatedly until the context ends, and returns an error if one is
// incomplete, or changes without a higher generation.
func watchMetadata(ctx context.Context, files map[string]string) error {
	contents, generations := map[string][]byte{}, map[string]int64{}
	for last := false; !last; {
		last = ctx.Err() != nil
		for _, name := range files {
			objects, raw, err := decodeMetadata(name)
			if err != nil {
				return err
			}
			generation := objects[0].Metadata.Generation
			if before, ok := contents[name]; ok && !bytes.Equal(raw, before) && generation <= generations[name] {
				return fmt.Errorf("metadata file %s changed, and its generation went from %d to %d", name, generations[name],
					generation)
			}
			contents[name], generations[name] = raw, generation
		}
	}
	return nil
}

// caseMetadataOthers prepares a claim with another driver's device for the same request.
func caseMetadataOthers(ctx context.Context, s *suite) {
	other := ofOther()
	other.Request = request
	c, devices := s.prepared(ctx, s.pick(ctx), other)
	want := s.metadataPath("resourceclaims", c.Name, request)
	for _, m := range s.metadataMounts(devices) {
		if m.ContainerPath != want {
			s.fatal("with another driver in the request, the metadata is mounted at %s, want the file %s: each driver has "+
				"its own", m.ContainerPath, want)
		}
		for _, q := range s.readMetadata(m.HostPath)[0].Requests {
			for _, d := range q.Devices {
				if d.Driver != s.config.Driver {
					s.fatal("the driver writes metadata of device %s, which belongs to the driver %s", d.Name, d.Driver)
				}
			}
		}
	}
}

// preparedMetadata returns the metadata files of a claim that the kubelet prepared, by the CDI specs
// of the node.
func (s *suite) preparedMetadata(claim string) (files []string) {
	cache := s.cdiCache()
	for _, id := range cache.ListDevices() {
		for _, e := range s.edits([]string{id}) {
			for _, m := range e.Mounts {
				if strings.HasPrefix(m.ContainerPath, path.Join(metadataDir, "resourceclaims", claim)+"/") &&
					strings.HasSuffix(m.ContainerPath, "/"+s.config.Driver+"-metadata.json") {
					files = append(files, m.HostPath)
				}
			}
		}
	}
	return files
}

// sameMetadata returns an error that describes how the network data of metadata files differ from the status, or nil.
func (s *suite) sameMetadata(files []string, status []resourceapi.AllocatedDeviceStatus) error {
	found := map[string]*resourceapi.NetworkDeviceData{}
	for _, name := range files {
		for _, q := range s.readMetadata(name)[0].Requests {
			for _, d := range q.Devices {
				found[deviceKey(d.Pool, d.Name, "")] = d.NetworkData
			}
		}
	}
	for _, d := range status {
		key := deviceKey(d.Pool, d.Device, "")
		if !equality.Semantic.DeepEqual(found[key], d.NetworkData) {
			return fmt.Errorf("device %s: the metadata has the network data %v, and the status has %v", key, found[key],
				d.NetworkData)
		}
	}
	return nil
}

// caseMetadataNetwork compares the metadata with the status. If the suite may start pods, it uses a running pod,
// because a driver may not learn a pod's network earlier.
func caseMetadataNetwork(ctx context.Context, s *suite) {
	if !slices.Contains(s.config.Features, "Status") {
		s.skip("compares with the status: needs the feature Status")
	}
	var files []string
	var status func() []resourceapi.AllocatedDeviceStatus
	if s.config.Pods.Image != "" {
		p := s.startPod(ctx, podOptions{claims: []int{0}, command: serveOn("lo")})
		s.view(ctx, p, firstContainer)
		s.running(ctx, p)
		c := s.claimsOf(ctx, p)[0]
		files = s.preparedMetadata(c.Name)
		status = func() []resourceapi.AllocatedDeviceStatus {
			return s.withNetworkData(s.claimsOf(context.WithoutCancel(ctx), p)[0])
		}
	} else {
		c, devices := s.prepared(ctx)
		entries := s.networkData(ctx, c)
		files = slices.Collect(maps.Values(s.metadataFiles(devices)))
		status = func() []resourceapi.AllocatedDeviceStatus { return entries }
	}
	ctx, cancel := context.WithTimeout(ctx, s.config.Quiet.Duration)
	defer cancel()
	s.must(poll(ctx, func() error {
		entries := status()
		if len(entries) == 0 {
			return errors.New("no entry of the driver has network data")
		}
		return s.sameMetadata(files, entries)
	}), "after prepare")
}

func caseMetadataSubrequest(ctx context.Context, s *suite) {
	r := resultFor(s.pick(ctx), request+"/small")
	c, devices := s.prepared(ctx, r)
	want := s.metadataPath("resourceclaims", c.Name, request)
	files := s.metadataFiles(devices)
	name, ok := files[want]
	if !ok {
		s.fatal("the metadata is mounted at %v, want %s", files, want)
	}
	for _, m := range s.readMetadata(name) {
		for _, q := range m.Requests {
			if q.Name != r.Request {
				s.fatal("the metadata has the request %q, want %q", q.Name, r.Request)
			}
		}
	}
}

func caseMetadataStream(ctx context.Context, s *suite) {
	c, devices := s.prepared(ctx)
	r := c.results()[0]
	want := deviceKey(r.Pool, r.Device, "")
	for _, name := range s.metadataFiles(devices) {
		var versions []string
		for _, m := range s.readMetadata(name) {
			versions = append(versions, m.APIVersion)
			if got := m.devices(); !slices.Equal(got, []string{want}) {
				s.fatal("the metadata in version %s has the devices %v, and the claim has %s", m.APIVersion, got, want)
			}
		}
		newestFirst := slices.IsSortedFunc(versions, func(a, b string) int {
			return slices.Index(metadataVersions(), a) - slices.Index(metadataVersions(), b)
		})
		if !slices.Contains(versions, metadataVersions()[0]) || !newestFirst {
			s.fatal("the metadata has the versions %v; it must have %s, and newer ones before older ones", versions,
				metadataVersions()[0])
		}
	}
}

func caseMetadataRemoved(ctx context.Context, s *suite) {
	c, devices := s.prepared(ctx)
	files := s.metadataFiles(devices)
	s.unprepare(ctx, c)
	for _, name := range files {
		if _, err := os.Stat(name); err == nil {
			s.fatal("metadata file %s still exists after unprepare", name)
		}
	}
}

func caseMetadataAttributes(ctx context.Context, s *suite) {
	r := s.pick(ctx)
	d := s.find(ctx, "was picked", func(d device) bool { return d.Name == r.Device && d.pool == r.Pool })
	_, devices := s.prepared(ctx, r)
	for _, name := range s.metadataFiles(devices) {
		m := s.readMetadata(name)[0]
		for _, q := range m.Requests {
			for _, x := range q.Devices {
				for attribute := range d.Attributes {
					if _, ok := x.Attributes[string(attribute)]; !ok && x.Name == d.Name {
						s.fatal("the metadata of device %s lacks the attribute %s", d.Name, attribute)
					}
				}
			}
		}
	}
}
