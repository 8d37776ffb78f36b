// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"bytes"
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// deviceMetadata are the files of device metadata (KEP-5304), one per claim and request, that containers find below
// /var/run/kubernetes.io/dra-device-attributes. The helper of package kubeletplugin writes them when a claim is
// prepared. The driver adds what is known only after a pod is attached. By then, the runtime has bind-mounted a
// file, so the driver changes it in place before the container's program starts.
//
// The helper does not use the driver's locks, does not survive crashes, and does not restore removed files.
// Therefore, it writes through the functions in this file.
type deviceMetadata struct {
	options Options
	records *nodeRecords
	kinds   kinds
	locks   claimLocks
	helper  *helper
	// specs are the names of the helper's CDI specs.
	specs *files.Directory[struct{}]
	// restoring holds the UIDs of claims that are prepared again to restore missing files: a claim that was unprepared
	// in the meantime must not be prepared.
	restoring sync.Map
}

func newDeviceMetadata(
	o Options, records *nodeRecords, kinds kinds, locks claimLocks, helper *helper,
) *deviceMetadata {
	m := &deviceMetadata{options: o, records: records, kinds: kinds, locks: locks, helper: helper}
	m.specs = files.NewDirectory(o.CDIDir, m.specsPrefix(), ".json",
		func(string) (struct{}, error) { return struct{}{}, nil })
	return m
}

// helperOptions make the helper write device metadata.
func (m *deviceMetadata) helperOptions() []kubeletplugin.Option {
	return []kubeletplugin.Option{
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{metadatav1beta1.SchemeGroupVersion}),
		kubeletplugin.CDIDirectory(m.options.CDIDir),
		kubeletplugin.GRPCInterceptor(m.refresh),
		kubeletplugin.MetadataFileOps(kubeletplugin.MetadataFileOperations{
			WriteFile: m.writeFile,
			RemoveAll: m.removeDir,
			Remove:    func(path string) error { return files.Remove(m.options.Failpoints, "metadata CDI spec", path) },
			Glob:      m.specsLike,
		}),
	}
}

// Names of the helper's files (kubeletplugin/metadata.go, v0.37).
const (
	metadataDir  = "dra-device-metadata" // below the plugin's directory, then NAMESPACE_CLAIM/REQUEST/
	metadataFile = "metadata.json"
)

// writeFile writes one of the helper's files. The caller may hold the claim's lock: update does, and
// the helper does not.
func (m *deviceMetadata) writeFile(path string, content []byte, mode os.FileMode) error {
	release, err := m.locks.Named(metadataDir)
	if err != nil {
		return err
	}
	defer release()
	if filepath.Base(path) == metadataFile {
		return files.Rewrite(m.options.Failpoints, "metadata", path, content, files.Options{Mode: mode})
	}
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, content) {
		return nil
	}
	return files.Replace(m.options.Failpoints, "metadata CDI spec", path, content, files.Options{Mode: mode})
}

// specsPrefix begins the names of the helper's CDI specs.
func (m *deviceMetadata) specsPrefix() string { return m.options.DriverName + "_metadata_" }

// specsLike returns the paths of the metadata CDI specs that match a pattern, which ends with * and the
// specs' suffix. filepath.Glob would read the directory, with its two files for each claim, whenever a claim is
// unprepared.
func (m *deviceMetadata) specsLike(pattern string) (paths []string, err error) {
	prefix, _, _ := strings.Cut(filepath.Base(pattern), "*")
	err = m.specs.Each(prefix, func(name string, _ struct{}, _ error) {
		paths = append(paths, m.specs.Path(name))
	})
	return paths, err
}

// claimOfSpec returns the claim's UID from the path of a metadata CDI
// spec.
func (m *deviceMetadata) claimOfSpec(path string) types.UID {
	uid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), m.specsPrefix()), "_")
	return types.UID(uid)
}

// removeDir removes the files of a claim. Their directory has the claim's
// name: they stay if another claim of that name is prepared.
func (m *deviceMetadata) removeDir(dir string) error {
	if m.isNeeded(dir) {
		return nil
	}
	return m.options.Failpoints.Do("remove metadata", func() error { return os.RemoveAll(dir) })
}

// isNeeded reports whether a recorded claim has its metadata in the directory, or records cannot be read.
func (m *deviceMetadata) isNeeded(dir string) bool {
	all, err := m.records.claims.List()
	namespace, name, _ := strings.Cut(filepath.Base(dir), "_") // see metadataName; neither contains a "_"
	return err != nil || slices.ContainsFunc(all, func(c *record.Claim) bool {
		return c.Namespace == namespace && c.Name == name
	})
}

// metadataName returns the name of a claim's metadata directory.
func metadataName(c *record.Claim) string { return c.Namespace + "_" + c.Name }

// describe returns the metadata of a share: its device's published attributes, the grant, and its attachment's
// state if there is exactly one. pending may be nil.
func (m *deviceMetadata) describe(
	ctx context.Context,
	uid types.UID,
	s share,
	pending *pendingAttachment,
) *kubeletplugin.DeviceMetadata {
	described := &kubeletplugin.DeviceMetadata{Attributes: map[string]resourceapi.DeviceAttribute{}}
	attributes := attribute.Granted(s.Capacity)
	if s.AdminAccess {
		attributes = attribute.Map{} // a request with admin access has no grant, regardless of the allocation
	}
	maps.Copy(attributes, s.deviceAttributes())
	for name, value := range attributes {
		described.Attributes[string(name)] = value
	}
	networkData, additional := m.onlyAttachmentOf(ctx, uid, s, pending)
	described.NetworkData = networkData
	for name, value := range additional {
		described.Attributes[string(name)] = value
	}
	return described
}

// pendingAttachment is an attachment that has no record yet.
type pendingAttachment struct {
	record   attach.Record
	attached Attached
}

// onlyAttachmentOf describes a share's attachment, or returns nil if the share has none or several: all of a claim's
// pods see the same file. A pending attachment replaces one in the same namespace.
func (m *deviceMetadata) onlyAttachmentOf(
	ctx context.Context, uid types.UID, s share, pending *pendingAttachment,
) (*resourceapi.NetworkDeviceData, attribute.Map) {
	if s.attacher == nil {
		return nil, nil
	}
	attachments := m.records.attachmentsOf(ctx, uid, s.Name)
	if pending != nil && pending.record.Share == s.Name {
		isReplaced := func(a attach.Record) bool { return a.Namespace.Cookie == pending.record.Namespace.Cookie }
		if !slices.ContainsFunc(attachments, func(a attach.Record) bool { return !isReplaced(a) }) {
			return pending.attached.NetworkData, pending.attached.Attributes
		}
		return nil, nil
	}
	if len(attachments) != 1 {
		return nil, nil
	}
	state, err := s.attacher.Read(ctx, s.Share, attachments[0])
	if err != nil {
		return nil, nil
	}
	return state.NetworkData, state.Attributes
}

// refresh is an interceptor of the helper's calls. When a claim is prepared again, the helper writes the
// metadata without the claim's lock, and may overwrite the metadata of an attachment created meanwhile. The
// interceptor writes the current metadata before the call returns.
func (m *deviceMetadata) refresh(
	ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	response, err := handler(ctx, request)
	prepare, ok := request.(*drapb.NodePrepareResourcesRequest)
	if err != nil || !ok {
		return response, err
	}
	for _, c := range prepare.GetClaims() {
		uid := types.UID(c.GetUid())
		if attachments, err := m.records.attachments.OfClaim(c.GetUid()); err == nil && len(attachments) == 0 {
			continue
		}
		err := m.locks.withClaim(ctx, uid, func(ctx context.Context) error {
			m.updateClaim(ctx, uid)
			return nil
		})
		if err != nil {
			klog.FromContext(ctx).Error(err, "Failed to refresh device metadata", "claimUID", uid)
		}
	}
	return response, nil
}

// updateClaim writes the current metadata of all shares of a claim. The caller holds the claim's lock.
func (m *deviceMetadata) updateClaim(ctx context.Context, uid types.UID) {
	claim, err := m.records.claims.Get(uid)
	if claim == nil || err != nil {
		return
	}
	updated := map[string]bool{} // requests; each has one file
	for _, s := range m.kinds.resolveAll(claim.Shares) {
		if !updated[s.Request] {
			updated[s.Request] = true
			m.update(ctx, uid, s, nil)
		}
	}
}

// update writes the current metadata of a share, and of all shares of
// its request, because they are in one file. pending may be nil. It waits for the helper.
func (m *deviceMetadata) update(ctx context.Context, uid types.UID, s share, pending *pendingAttachment) {
	select {
	case <-m.helper.started:
	case <-ctx.Done():
		return
	}
	claim, err := m.records.claims.Get(uid)
	if claim == nil || err != nil {
		return
	}
	var devices []kubeletplugin.Device
	for _, other := range m.kinds.resolveAll(claim.Shares) {
		if other.Request == s.Request {
			devices = append(devices, kubeletplugin.Device{
				Requests: []string{other.Request}, PoolName: other.Pool, DeviceName: other.Device,
				Metadata: m.describe(ctx, uid, other, pending),
			})
		}
	}
	if err := m.helper.UpdateRequestMetadata(ctx, claim.Namespace, claim.Name, claim.UID, s.Request, devices); err != nil {
		klog.FromContext(ctx).Error(err, "Failed to update device metadata", "request", s.Request)
	}
}
